"""Ranks die, the job goes on: restarted by torchrun, or by hand with fewer ranks or another layout."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from crash_harness import DEADLINE, ONE_THREAD, Job, stored_tensors
from training_harness import COMMON, LAYOUTS, LLAMA, assert_same_bits

ROOT = Path(__file__).parents[2]
FLAGS = f"{COMMON} {LLAMA} --mock-data --async-save --train-iters 60 --save-interval 3 "
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    """The losses of one process, and of two with what they saved."""
    directory = tmp_path_factory.mktemp("undisturbed")
    single = launcher.run(1, FLAGS).losses()
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    return single, launcher.run(world_size, f"{FLAGS} {layout} --save {directory}").losses(), directory


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_torchrun_restarts_the_job(undisturbed, tmp_path):
    """One rank is killed; torchrun starts both again and they finish with the same bits."""
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {world_size} --max-restarts 2"
    run = f"{ROOT / 'pretrain_gpt.py'} {FLAGS} {layout} --save {tmp_path} --load {tmp_path}"
    command = [sys.executable, *launch.split(), *run.split()]
    environment = os.environ | ONE_THREAD
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    stderr: list[str] = []
    drain = threading.Thread(target=lambda: stderr.append(process.stderr.read()))
    drain.start()
    watchdog = threading.Timer(2 * DEADLINE, process.kill)
    watchdog.start()
    lines, killed = [], False
    for line in process.stdout:
        lines.append(line)
        if not killed and re.search(r"iteration +12/", line):
            os.kill(children(process.pid)[1], signal.SIGKILL)
            killed = True
    watchdog.cancel()
    drain.join()
    assert process.wait() == 0, "".join(lines) + "".join(stderr)
    starts = [i for i, line in enumerate(lines) if "starting from scratch" in line or "> loaded" in line]
    assert killed and len(starts) == 2
    resumed = int(re.search(r"at iteration (\d+)", lines[starts[1]])[1])
    assert resumed >= 9 and resumed % 3 == 0
    logged = {}
    for line in lines:
        if found := re.search(r"iteration +(\d+)/.*? lm loss: ([\d.E+-]+) ", line):
            logged.setdefault(int(found[1]), set()).add(float(found[2]))
    _, expected, directory = undisturbed
    assert logged == {iteration: {loss} for iteration, loss in expected.items()}, "also what was done twice"
    final = "iter_0000060"
    assert_same_bits(stored_tensors(tmp_path / final), stored_tensors(directory / final))


@pytest.mark.parametrize(
    "layouts",
    [["dp2_distributed_optimizer", "single", "dp2_distributed_optimizer"], ["tp2_pp2", "pp2_dp2", "single", "tp2_sp"]],
)
def test_other_ranks_go_on_where_these_were_killed(launcher, undisturbed, tmp_path, layouts):
    losses: dict[int, float] = {}
    for number, layout in enumerate(layouts):
        world_size, layout_flags = {"single": (1, ""), **LAYOUTS}[layout]
        job: Job = launcher.start(world_size, f"{FLAGS} {layout_flags} --save {tmp_path} --load {tmp_path}")
        if number < len(layouts) - 1:
            job.until_iteration(12 * (number + 1))
            job.kill(world_size - 1)
            job.kill()
            assert -signal.SIGKILL in job.wait()
        else:
            job.succeed()
        if number:
            assert job.resumed_at() >= 12 * number - 6
        losses |= job.losses()
    expected = undisturbed[0]
    assert sorted(losses) == sorted(expected) == list(range(1, 61))
    assert losses == pytest.approx(expected, rel=ROUNDING)
