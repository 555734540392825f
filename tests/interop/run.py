"""`make interop`: what we write, loaded by the real peers, each in a virtual environment of its own.

The environments are kept in `.venv-interop/` and made anew when the packages change. No GPU is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-interop"


@dataclass(frozen=True)
class Peer:
    """`check(python, work)` raises CalledProcessError when the peer does not agree with us."""

    packages: tuple[str, ...]
    check: Callable[[Path, Path], None]


def check_deepspeed(python: Path, work: Path) -> None:
    run(Path(sys.executable), HERE / "deepspeed_write.py", work)
    for model in sorted(work.iterdir()):
        for ranks in (1, 2):
            for precision in ([], ["--bf16"]):
                run(python, *torchrun(ranks), HERE / "deepspeed_load.py", model, *precision, quiet=True)


def check_megatron_core(python: Path, work: Path) -> None:
    for model in MEGATRON_CORE_MODELS:
        directory = work / model
        directory.mkdir()
        run(Path(sys.executable), *torchrun(4), HERE / "megatron_core_write.py", directory, model, quiet=True)
        for ranks, tp in ((1, 1), (2, 2), (2, 1)):
            run(python, *torchrun(ranks), HERE / "megatron_core_load.py", directory, tp, quiet=True)


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


MEGATRON_CORE_MODELS = ("llama", "llama-bf16", "gpt2", "gpt2-pp2")
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
    done = subprocess.run(
        [str(python), *map(str, words)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables
    )
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-1:] if quiet and done.returncode == 0 else lines), flush=True)
    done.check_returncode()


def main() -> None:
    for name in sys.argv[1:] or PEERS:
        with tempfile.TemporaryDirectory() as work:
            PEERS[name].check(environment(name, PEERS[name].packages), Path(work))
        print(f"== {name}: ok", flush=True)


if __name__ == "__main__":
    main()
