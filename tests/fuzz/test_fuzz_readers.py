"""A reader of damaged files gives a result or one clean error (see `harness`).

The default suite tries 4 damages of each format, shared by its readers; `--run-slow` 1,000 of each
reader.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fuzz.harness import find_failures, print_usage, run_case, run_intact
from tests.fuzz.readers import BASES, READERS, SLOW_BASES


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def build_base(name: str, bases: Path) -> Path:
    """Return the intact files of a reader, which are built once."""
    kind = READERS[name].base
    base = bases / kind.replace(" ", "_") / "base"
    if not base.exists():
        base.parent.mkdir()
        BASES[kind](base)
    return base


def check_reader(name: str, bases: Path, tmp_path: Path, numbers: range) -> None:
    reader = READERS[name]
    base = build_base(name, bases)
    work = tmp_path / "work"

    def run_all(report):
        for number in numbers:
            run_case(name, number, reader, base, work, report)

    failures = find_failures(work, run_all)
    print_usage(name, len(numbers), failures)
    assert not failures, f"{len(failures)} of {len(numbers)}:\n" + "\n".join(failures[:5])


def check_intact_files(name: str, bases: Path, tmp_path: Path, seeds: Iterable[int]) -> None:
    base = build_base(name, bases)
    work = tmp_path / "work"
    failures = find_failures(
        work, lambda report: run_intact(name, READERS[name], base, work, seeds, report)
    )
    assert not failures, failures


@pytest.mark.parametrize("name", READERS)
def test_intact_files_are_read(name: str, bases: Path, tmp_path: Path) -> None:
    """Readers of one action have different seeds, which choose its steps."""
    check_intact_files(name, bases, tmp_path, seeds=[list(READERS).index(name)])


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_intact_files_are_read_in_every_way(name: str, bases: Path, tmp_path: Path) -> None:
    check_intact_files(name, bases, tmp_path, seeds=range(20))


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_give_clean_errors(name: str, bases: Path, tmp_path: Path) -> None:
    reader = READERS[name]
    same_format = [other for other in READERS.values() if other.base == reader.base]
    count = 2 if reader.base in SLOW_BASES else max(1, 4 // len(same_format))
    check_reader(name, bases, tmp_path, range(count))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_give_clean_errors_long(name: str, bases: Path, tmp_path: Path) -> None:
    check_reader(name, bases, tmp_path, range(30, 1030))
