"""Runs a reader on damaged files in a child process with limited memory and processor time.

A reader must give a result or one clean error: no traceback, no hang, no crash, and no file outside
of its target.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.fuzz.mutations import Mutation, damage
from tests.support.limited_process import limit_address_space

SECONDS = 20  # of processor time for one case, which usually takes a hundredth
MEMORY = 1 << 30  # bytes of address space beyond those of the process at the start
EXIT_STATUSES: list[int] = []  # of all tools run by `run_main` in this process
TARGETS = ("to", "data_text_document.bin", "data_text_document.idx", "report.html")


@dataclass
class Case:
    """One damaged copy: `source` contains it, results are written into `out`."""

    source: Path
    original: Path
    out: Path
    rng: random.Random


@dataclass(frozen=True)
class Reader:
    """A reader to test: its input, the files to damage and how, and the action.

    `files` maps patterns to a mutation that keeps the file well-formed, or None. All files are also
    damaged byte by byte.
    """

    base: str
    files: dict[str, Mutation | None]
    action: Callable[[Case], object]
    changes_source: bool = False  # a cache that is repaired


def load_tool(path: str) -> Any:
    """Import a program of tools/ as a module."""
    name = path.replace("/", "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_main(argv: list[str], main: Callable[[], Any]) -> int:
    """Run a tool and return its exit status. Its errors must be one message with "error: "."""
    out = io.StringIO()
    err = io.StringIO()
    code: Any = 0
    sys.argv = argv
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as error:
            code = error.code
    if isinstance(code, str):
        status = 1
        message = code
    else:
        status = int(code or 0)
        message = err.getvalue()
        message = message[message.rfind("error: ") :] if "error: " in message else ""
    EXIT_STATUSES.append(status)
    if status and message:
        check_message(message)
    if "--json" not in argv:
        printed = out.getvalue().replace("\x1b[A", "")  # progress bars move the cursor up
        assert "\x1b" not in printed, "an escape sequence was printed"
    return status


def check_message(message: str) -> None:
    is_clean = message.startswith("error: ") and len(message) < 6000
    assert is_clean, f"an error of another form: {message[:500]!r}"
    lines = message.rstrip("\n").split("\n")
    assert all(line.isprintable() for line in lines), f"not printable: {message[:500]!r}"


class HangError(BaseException):
    """A case has used too much processor time."""


def raise_hang(*_: object) -> None:
    raise HangError


def list_files(root: Path, ignored: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of everything under `root` outside of `ignored`."""
    sizes = {}
    for path in sorted(root.rglob("*")):
        if not path.is_relative_to(ignored):
            status = path.lstat()
            sizes[str(path)] = (status.st_size, status.st_mtime_ns)
    return sizes


def run_case(
    name: str, number: int, reader: Reader, base: Path, work: Path, report: Callable[[str], None]
) -> None:
    """Damage one copy of `base` and read it; failures are passed to `report`."""
    rng = random.Random(f"{name} {number}")
    source = work / "in"
    out = work / "out"
    for path in (source, out):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, source, copy_function=os.link)
    out.mkdir()
    pattern, mutation = rng.choice(list(reader.files.items()))
    damage(rng.choice(sorted(source.glob(pattern))), mutation, rng)
    before = list_files(work, out)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader.action(Case(source, base, out, rng))
    except BaseException as error:  # only a clean error is allowed
        text = traceback.format_exc()[-1500:]
        report(f"{name} {number}: {type(error).__name__}: {text}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not reader.changes_source and list_files(work, out) != before:
        report(f"{name} {number}: files outside of the target have changed")
    unexpected = [path.name for path in out.iterdir() if path.name not in TARGETS]
    if unexpected:
        report(f"{name} {number}: left behind: {unexpected}")


def run_intact(
    name: str, reader: Reader, base: Path, work: Path, seeds: Iterable[int], report: Callable
) -> None:
    """Run the action on intact files; it must succeed, or the fuzz would not test it."""
    for seed in seeds:
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        EXIT_STATUSES.clear()
        reader.action(Case(base, base, out, random.Random(seed)))
        if any(EXIT_STATUSES):
            report(f"{name}, seed {seed}: exit status {EXIT_STATUSES} for intact files")


def find_failures(
    work: Path,
    run_all: Callable[[Callable[[str], None]], None],
    memory: int = MEMORY,
    start_method: str = "fork",
) -> list[str]:
    """Run `run_all(report)` in a limited child process and return its reports.

    A crash of the child is a failure, too. With the start method "spawn", `run_all` must be
    picklable (see `tests.support.limited_process`).
    """
    work.mkdir(exist_ok=True)
    answers = work.with_name("answers")
    answers.write_text("")
    context: Any = multiprocessing.get_context(start_method)
    child = context.Process(target=_run_and_record, args=(run_all, memory, answers))
    child.start()
    child.join()
    failures = [json.loads(line) for line in answers.read_text().splitlines()]
    if child.exitcode:
        failures.append(f"the process died of signal {-child.exitcode}")
    return failures


def _run_and_record(
    run_all: Callable[[Callable[[str], None]], None], memory: int, answers: Path
) -> None:
    os.fsync = lambda handle: None  # no case depends on it, and tiny files mostly wait for it
    with answers.open("a") as file:

        def report(text: str) -> None:
            file.write(json.dumps(text) + "\n")
            file.flush()

        try:
            limit_address_space(memory)
            signal.signal(signal.SIGPROF, raise_hang)
            run_all(report)
        except BaseException:
            report(f"the fuzzer itself: {traceback.format_exc()}")
    os._exit(0)  # without the clean-up of the test process, which a forked child would repeat


def print_usage(name: str, count: int, failures: list[str]) -> None:
    """Print one row of the table of a long run (shown by `pytest -s`)."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    peak = usage.ru_maxrss >> 10
    now = time.strftime("%H:%M:%S")
    print(f"\n{now} {name}: {count} cases, {len(failures)} failures, children so far: "
          f"{seconds:.0f} s CPU, peak {peak} MB", flush=True)  # fmt: skip
