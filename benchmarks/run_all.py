"""Run all benchmarks and store their output in benchmarks/results.md (`make bench`).

Each benchmark has a block between `<!-- begin NAME -->` and `<!-- end NAME -->`: command, date,
commit and machine, then the output. If a benchmark fails, its block is left unchanged and the exit
code is 1. Takes more than an hour on two idle cores (training 17 minutes, checkpoint 9). Results
from a busy machine are meaningless.

    python benchmarks/run_all.py                          # or: make bench
    python benchmarks/run_all.py --only startup,checkpoint
    python benchmarks/run_all.py --megatron-core-python PATH    # with megatron-core as a peer of training and start-up
    python benchmarks/run_all.py --megatron-core-python PATH --megatron-lm DIRECTORY    # and of preprocessing
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/results.md"
PEER = "--megatron-core-python"
COMMANDS = {
    "training": "benchmarks/training.py --layouts --rounds 2 --steps 6",
    "experts": "benchmarks/training.py --moe --rounds 1 --steps 6",
    "context": "benchmarks/training.py --context 4096 --rounds 1 --steps 5",
    "step": "benchmarks/step_profile.py",
    "startup": "benchmarks/startup.py",
    "preprocessing": "benchmarks/preprocessing.py",
    "checkpoint": "benchmarks/checkpoint.py",
    "library": "benchmarks/library.py --repeats 2",
    "flatness": "benchmarks/checkpoint.py --flatness",
    "planning": "benchmarks/checkpoint_planning.py",
    "commit": "benchmarks/checkpoint_commit.py",
    "conversion": "benchmarks/conversion.py",
    "formats": "benchmarks/formats.py",
    "huggingface": "benchmarks/huggingface.py --turns 3",
    "merge": "benchmarks/merge.py",
    "tiers": "benchmarks/tiers.py",
    "transfer": "benchmarks/transfer.py --layers 16",
}


def block_of(command: str, output: str) -> str:
    """Return the content of a block."""
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    text = "\n".join(line.rstrip() for line in output.strip().splitlines())
    return (
        f"\n`python {command}`; {time.strftime('%Y-%m-%d')}, {commit}, "
        f"{where}:\n\n```text\n{text}\n```\n"
    )


def replace_block(page: str, name: str, content: str) -> str:
    """Replace the content of block `name`; raise ValueError if the page has no such block."""
    pattern = re.compile(
        rf"(?<=<!-- begin {re.escape(name)} -->\n).*?(?=<!-- end {re.escape(name)} -->)", re.DOTALL
    )
    if not pattern.search(page):
        raise ValueError(
            f"the page has no block {name!r}: it needs <!-- begin {name} --> and <!-- end {name} "
            "-->"
        )
    return pattern.sub(lambda _: content, page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(COMMANDS),
        help="comma-separated names; default: all",
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument(PEER, help="Python interpreter with megatron-core 0.16.1 as a peer")
    parser.add_argument("--megatron-lm", help="source tree of Megatron-LM core_r0.16.0 as a peer")
    args = parser.parse_args()
    unknown = sorted(set(args.only) - COMMANDS.keys())
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the benchmarks are {', '.join(COMMANDS)}")
    failed = []
    for number, name in enumerate(args.only, 1):
        command = COMMANDS[name]
        peer = []
        has_peer = name in ("preprocessing", "startup") or command.startswith(
            "benchmarks/training.py"
        )
        if args.megatron_core_python and has_peer:
            peer += [PEER, args.megatron_core_python]
        if args.megatron_lm and name == "preprocessing":
            peer += ["--megatron-lm", args.megatron_lm]
        began = time.monotonic()
        print(f"[{number}/{len(args.only)}] {name}: python {command}", file=sys.stderr, flush=True)
        run = subprocess.run(
            [sys.executable, *command.split(), *peer], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        if run.returncode:
            failed.append(name)
            print(
                f"    failed with exit code {run.returncode}: its block is unchanged",
                file=sys.stderr,
                flush=True,
            )
            continue
        print(f"    {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        args.page.write_text(
            replace_block(args.page.read_text(), name, block_of(command, run.stdout))
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
