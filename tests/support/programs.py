"""Python programs as processes that are forked after the imports, which take seconds otherwise."""

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import ROOT
from tests.support.distributed import get_fork_context


def run_program(
    program: str | Path,
    *words: object,
    directory: Path = ROOT,
    timeout: float = 300,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of a script (a path) or of source code.

    The program runs in `directory` with the variables of this process and `environment`. It does
    not run functions that are registered for the exit of the interpreter. Training needs
    `--num-workers 0`.
    """
    command = [str(program), *map(str, words)]
    with tempfile.TemporaryDirectory() as outputs:
        paths = [Path(outputs) / "out", Path(outputs) / "err"]
        arguments = (program, command, directory, {**os.environ, **environment}, paths)
        process = get_fork_context().Process(target=_run, args=arguments)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (path.read_text() for path in paths)
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _run(
    program: str | Path,
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    outputs: Sequence[Path],
) -> None:
    """Become the program."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command)
    status = 1
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
