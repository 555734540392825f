"""Start training programs without the cost of imports.

This program imports everything once and forks: a child becomes rank R of N with torchrun's
environment, runs `pretrain_gpt.main()`, another function or a script, and writes its output to a
file. Tests kill and wait for it by process id. Requests are JSON lines on standard input, responses go to standard output; see
`tests/support/crash_harness.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import runpy
import signal
import sys
import traceback
from typing import Any

import pretrain_gpt
from tests.support import restart_programs
from tests.support.config_server import use_config_server
from tests.support.crash_harness import STACKS_SIGNAL

MAINS = {"pretrain_gpt.py": pretrain_gpt.main, "restart_programs": restart_programs.main}


def start(request: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # A shell that starts the tests in the background lets them ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(request["log"] + f".{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(STACKS_SIGNAL)
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)} | request["environment"])
        limit = request["file_size_limits"][rank]
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.argv = [request["program"], *request["flags"]]
        program = request["program"]
        if program in MAINS:
            MAINS[program]()
        else:
            runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
        if exit_.code and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    use_config_server()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer: Any = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = [
                start(request, rank) for rank in range(int(request["environment"]["WORLD_SIZE"]))
            ]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
