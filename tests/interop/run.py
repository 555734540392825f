"""What we write, loaded by the real peers. No GPU is needed.

    make interop                                  all peers, each in a virtual environment of its own
    python tests/interop/run.py megatron-core     one of them
    python tests/interop/run.py megatron-core=/path/to/python deepspeed=/path/to/python     with what is installed there

The environments are kept in `.venv-interop/` and made anew when the packages change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ENVIRONMENTS = REPOSITORY / ".venv-interop"
OURS = Path(sys.executable)


@dataclass(frozen=True)
class Peer:
    """`check(python, work)` raises CalledProcessError when the peer does not agree with us."""

    packages: tuple[str, ...]
    check: Callable[[Path, Path], None]


def check_deepspeed(python: Path, work: Path) -> None:
    run(OURS, HERE / "deepspeed_write.py", work)
    for model in sorted(work.iterdir()):
        for ranks in (1, 2):
            for precision in ([], ["--bf16"]):
                run(python, *torchrun(ranks), HERE / "deepspeed_load.py", model, *precision, quiet=True)


def check_megatron_core(python: Path, work: Path) -> None:
    for model in MEGATRON_CORE_MODELS:
        (work / model).mkdir()
        run(OURS, *torchrun(4), HERE / "megatron_core_write.py", work / model, model, quiet=True)
    convert_there_and_back(work / "llama", work / "llama-converted")
    for directory in sorted(work.iterdir()):
        for ranks, tp in ((1, 1), (2, 2), (2, 1)):
            run(python, *torchrun(ranks), HERE / "megatron_core_load.py", directory, tp, quiet=True)


def convert_there_and_back(directory: Path, target: Path) -> None:
    """Through legacy files at another layout: the converter's torch_dist must do as well as the training program's."""
    target.mkdir()
    shutil.copy(directory / "expected.pt", target)
    convert = (REPOSITORY / "tools" / "checkpoint" / "convert.py", "--load-dir")
    layout = ("--target-tensor-parallel-size", 1, "--target-pipeline-parallel-size", 2)
    legacy = directory / "legacy"
    run(OURS, *convert, directory / "checkpoint", "--save-dir", legacy, "--saver", "legacy", *layout, quiet=True)
    run(OURS, *convert, legacy, "--save-dir", target / "checkpoint", "--saver", "torch_dist", quiet=True)


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


MEGATRON_CORE_MODELS = ("llama", "llama-bf16", "llama-pp2-bf16", "gpt2", "gpt2-pp2")
PEERS = {
    "deepspeed": Peer(("torch==2.13.0", "numpy", "deepspeed==0.19.8"), check_deepspeed),
    "megatron-core": Peer(("torch==2.13.0", "numpy", "megatron-core==0.16.1"), check_megatron_core),
}


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The Python of the peer's environment, with its packages installed in the given order."""
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(packages):
        print(f"== setting up {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for package in packages:  # in order: deepspeed's setup imports torch
            run(python, "-m", "pip", "install", "-q", package)
        stamp.write_text("\n".join(packages))
    return python


def run(python: Path, *words: object, quiet: bool = False) -> None:
    """Run, and show what it printed: all of it if it failed, the last line if it is chatty."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONPATH", None)  # it could bring this project into the peer's environment
    done = subprocess.run(
        [str(python), *map(str, words)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables
    )
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-1:] if quiet and done.returncode == 0 else lines), flush=True)
    done.check_returncode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER[=PYTHON]", help=f"of {', '.join(PEERS)}; default: all")
    for word in parser.parse_args().peers or PEERS:
        name, _, python = word.partition("=")
        if name not in PEERS:
            parser.error(f"no peer {name!r}: there are {', '.join(PEERS)}")
        with tempfile.TemporaryDirectory() as work:
            PEERS[name].check(Path(python) if python else environment(name, PEERS[name].packages), Path(work))
        print(f"== {name}: ok", flush=True)


if __name__ == "__main__":
    main()
