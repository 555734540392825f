"""Hostile answers of an object store: redirects, wrong sizes, truncated bodies, endless
listings.
"""

import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fuzz.harness import MEMORY, SECONDS, find_failures, print_usage, run_main
from tests.fuzz.hostile_object_server import HostileServer
from tests.fuzz.readers import CONVERT, build_converted, run_inspect

# The threads of the client reserve address space; each case checks the memory that they use.
ADDRESS_SPACE = 8 << 30

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileServer]:
    root = tmp_path_factory.mktemp("store")
    build_converted("torch_dist")(root / "run")
    write_foreign_model(root)
    with HostileServer(root) as hostile:
        yield hostile


def write_foreign_model(root: Path) -> None:
    """Write the model of `root / "run"` with a tensor that it does not have to `root / "foreign"`."""
    folder = root / "foreign"
    argv = ["convert", "--saver", "hf", "--load-dir", str(root / "run"), "--save-dir", str(folder)]
    assert run_main(argv, CONVERT.main) == 0
    weights = load_file(folder / "model.safetensors")
    tower = torch.arange(1 << 16).float()
    save_file(weights | {"tower.weight": tower}, folder / "model.safetensors", {"format": "pt"})


def locate(number: int, name: str) -> str:
    """Return the address of a directory. Bucket 0 is honest."""
    return f"s3://{'honest' if number == 0 else f'case-{number}'}/{name}"


def copy_foreign_tensors(root: Path, number: int, out: Path) -> int:
    """Export the local model, with the foreign tensors of the one in the store."""
    argv = ["convert", "--saver", "hf", "--load-dir", str(root / "run"), "--workers", "1"]
    argv += ["--save-dir", str(out / "to"), "--keep-foreign", locate(number, "foreign")]
    status = run_main(argv, CONVERT.main)
    if status == 0:
        exported = load_file(out / "to/model.safetensors")
        assert exported["tower.weight"].shape == (1 << 16,)
    return status


def read_from_store(number: int, out: Path) -> int:
    """Do one of the things that are done with a checkpoint."""
    source = locate(number, "run")
    rng = random.Random(number)
    action = 3 if number == 0 else rng.randrange(5)
    if action < 3:
        command = ("show", "verify", "digest")[action]
        return run_inspect(command, source, "--quiet")
    argv = ["convert", "--saver", "hf", "--load-dir", source, "--save-dir", str(out / "to")]
    return run_main([*argv, "--workers", "1"], CONVERT.main)


def run_case(
    number: int, work: Path, report: Callable[[str], None], read: Callable[[int, Path], int]
) -> None:
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    # Faults are repeated until the deadline; healthy requests must not miss it on a busy machine.
    os.environ["MEGATRON_STORAGE_DEADLINE"] = "60" if number == 0 else "0.1"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        status = read(number, out)
        if number == 0 and status:
            report("the honest bucket cannot be read")
    except BaseException as error:
        report(f"{number}: {type(error).__name__}: {traceback.format_exc()[-1500:]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if growth > MEMORY:
        report(f"{number}: {growth} bytes of memory were used")
    unexpected = [path.name for path in out.iterdir() if path.name != "to"]
    if unexpected or [path.name for path in work.iterdir()] != ["out"]:
        report(f"{number}: left behind: {unexpected}")


def run_cases(
    numbers: range,
    url: str,
    work: Path,
    read: Callable[[int, Path], int],
    report: Callable[[str], None],
) -> None:
    os.environ.update(
        AWS_ENDPOINT_URL=url,
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1",
    )
    for number in numbers:
        run_case(number, work, report, read)


def check_cases(
    numbers: range,
    server: HostileServer,
    tmp_path: Path,
    read: Callable[[int, Path], int] = read_from_store,
) -> None:
    work = tmp_path / "work"
    # Spawned: after a fork, the client of object storage would wait for threads of this process.
    failures = find_failures(
        work,
        partial(run_cases, numbers, server.url, work, read),
        ADDRESS_SPACE,
        start_method="spawn",
    )
    print_usage("object storage", len(numbers), failures)
    assert not failures, f"{len(failures)} of {len(numbers)}:\n" + "\n".join(failures[:5])


def test_hostile_stores_give_clean_errors(server: HostileServer, tmp_path: Path) -> None:
    check_cases(range(10), server, tmp_path)


def test_hostile_stores_of_foreign_tensors(server: HostileServer, tmp_path: Path) -> None:
    check_cases(range(5), server, tmp_path, partial(copy_foreign_tensors, server.root))


@pytest.mark.slow
def test_hostile_stores_of_foreign_tensors_long(server: HostileServer, tmp_path: Path) -> None:
    check_cases(range(5, 405), server, tmp_path, partial(copy_foreign_tensors, server.root))


@pytest.mark.slow
def test_hostile_stores_give_clean_errors_long(server: HostileServer, tmp_path: Path) -> None:
    check_cases(range(10, 1010), server, tmp_path)
