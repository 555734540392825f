"""Saves of processes that are killed at any moment; many saves leave no files or threads."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    clean_up,
    is_complete,
    read_tracker,
    save,
    write_tracker,
)
from tests.support.programs import run_program
from tests.unit_tests.core.dist_checkpointing.saved_state import Training, assert_holds

CRASHING = """
import os, random, signal, sys, time, torch, traceback
from megatron.core.dist_checkpointing import AsyncSaver, ShardedTensor, clean_up, load, read_tracker, write_tracker

torch.set_num_threads(1)
root, kills = sys.argv[1], int(sys.argv[2])
random.seed(int(sys.argv[3]))

def train(ready):
    tensors = {"w": torch.zeros(300, 1000), "b": torch.zeros(7)}
    state = {key: ShardedTensor.replicated(key, tensor) for key, tensor in tensors.items()}
    step = 0
    if read_tracker(root) is not None:
        step = read_tracker(root)
        load(state, f"{root}/iter_{step:07d}", verify=True)
        assert (state["w"].local == step).all() and (state["b"].local == -step).all(), step
    clean_up(root)
    os.write(ready, step.to_bytes(4, "little"))
    with AsyncSaver() as saver:
        while True:
            step += 1
            saver.wait_staged()
            state["w"].local.add_(1)
            state["b"].local.sub_(1)
            def done(step=step):
                write_tracker(root, step)
                os.write(ready, b"x")
            saver.save(state, f"{root}/iter_{step:07d}", common={"step": step}, on_commit=done)
            for report in saver.poll():
                assert report.error is None, report.error

last = 0
for _ in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(writing)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    resumed = os.read(reading, 4)
    assert len(resumed) == 4, "a restart failed"
    step = int.from_bytes(resumed, "little")
    assert step >= last, (step, last)
    last = step
    for _ in range(random.randrange(4)):  # some commits, then any moment of the next save
        os.read(reading, 1)
    time.sleep(random.random() * 0.04)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"
    os.close(reading)
print("resumed up to", last)
"""


def run_crashes(root, kills):
    result = run_program(CRASHING, root, kills, 1, timeout=600)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 0


def test_killed_at_any_moment(tmp_path):
    run_crashes(tmp_path, 25)
    names = {path.name for path in tmp_path.iterdir() if path.name.startswith("iter")}
    clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names | {
        "latest_checkpointed_iteration.txt"
    }
    assert all(is_complete(tmp_path / name) for name in names), (
        "no incomplete checkpoint ever has its final name"
    )


@pytest.mark.slow
def test_killed_at_any_moment_often(tmp_path):
    run_crashes(tmp_path, 400)


def test_clean_up_after_crashes(tmp_path):
    training = Training(0, rows=10)
    save(training.state(), tmp_path / "c", common=training.common)
    os.rename(
        tmp_path / "c", tmp_path / ".replaced-c"
    )  # where a crash between the two renames leaves it
    (tmp_path / ".saving-c-1234-1").mkdir()
    (tmp_path / ".saving-c-1234-1.failed").touch()
    write_tracker(tmp_path, 1)
    unfinished = tmp_path / "latest_checkpointed_iteration.txt.tmp"
    unfinished.touch()
    assert clean_up(tmp_path) == [".saving-c-1234-1", ".saving-c-1234-1.failed", unfinished.name]
    assert read_tracker(tmp_path) == 1
    assert_holds(tmp_path / "c", 0, rows=10)


LEAKS = """
import ctypes, gc, os, sys, threading, torch
from megatron.core.dist_checkpointing import AsyncSaver, ShardedObject, ShardedTensor

def usage():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps for later is no leak
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    mapped = sorted(line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line)
    named = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]  # those of other programs come and go
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count(), mapped, named

root, saves = sys.argv[1], int(sys.argv[2])
state = {key: ShardedTensor.replicated(key, torch.randn(500_000)) for key in "abcdef"}
state["t"] = ShardedTensor.replicated("t", torch.randn(300, 400).t())
state["rng"] = ShardedObject("rng", torch.get_rng_state())
with AsyncSaver() as saver:
    for count in range(-30, saves):  # the first ones fill the allocator's pools
        if count == 0:
            before = usage()
        handle = saver.save(state, f"{root}/{count % 2}", common={"args": {str(i): i for i in range(500)}})
        saver.wait_staged()
        assert handle.wait().error is None
        saver.poll()
    after = usage()
assert after[1:] == before[1:], (before, after)
assert after[0] - before[0] < 4 << 20, f"{(after[0] - before[0]) / saves:.0f} bytes per save"
"""


def run_leaks(root, saves):
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    command = [sys.executable, "-c", LEAKS, str(root), str(saves)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr


def test_nothing_leaks(tmp_path):
    run_leaks(tmp_path, 30)


@pytest.mark.slow
def test_nothing_leaks_over_200_saves(tmp_path):
    run_leaks(tmp_path, 200)


def test_closing_ends_the_threads(tmp_path):
    before = set(threading.enumerate())  # some may be those of other tests, and end meanwhile
    for _ in range(3):
        with AsyncSaver(workers=3) as saver:
            saver.save(Training(0, 10).state(), tmp_path / "c", common={})
    assert set(threading.enumerate()) <= before
