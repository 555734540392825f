"""Jobs that lose ranks continue: restarted by torchrun, or by hand with fewer ranks or at another
layout.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.compare import assert_same
from tests.support.crash_harness import DEADLINE, ONE_THREAD, Job, free_port, stored_tensors
from tests.support.processes import wait_until
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA

FLAGS = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --async-save --train-iters 20 --save-interval 2 "
)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    """Return the losses of one process, the losses of two, and the checkpoints of the latter."""
    directory = tmp_path_factory.mktemp("undisturbed")
    single = launcher.run(1, FLAGS).losses()
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    return (
        single,
        launcher.run(world_size, f"{FLAGS} {layout} --save {directory}").losses(),
        directory,
    )


class Torchrun:
    """`nodes` agents on this machine, which share `processes` processes of the training program."""

    def __init__(self, nodes, processes, flags, logs):
        self._logs = [logs / f"node{node}" for node in range(nodes)]
        launch = f"-m torch.distributed.run --nproc-per-node {processes // nodes} "
        launch += "--max-restarts 2 --monitor-interval 0.1 "
        launch += (
            f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} "
            "--rdzv-id job"
        )
        self._command = [
            sys.executable,
            *launch.split(),
            str(ROOT / "pretrain_gpt.py"),
            *flags.split(),
        ]
        self._agents = [self._start(log) for log in self._logs]

    def _start(self, log):
        with log.open("a") as file:
            return subprocess.Popen(
                self._command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | ONE_THREAD
            )

    def output(self):
        return "\n".join(log.read_text() for log in self._logs)

    def kill_last_worker(self):
        pid = self._agents[-1].pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)

    def wait(self):
        try:
            return [agent.wait(2 * DEADLINE) for agent in self._agents]
        finally:
            for agent in self._agents:
                agent.kill()


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_torchrun_restarts_the_job(launcher, undisturbed, tmp_path, nodes):
    """A rank dies; torchrun starts all again and they finish with the same bits.

    They continue from the last save, although --ckpt-step 2 is still on the command line.
    """
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    root = tmp_path / "run"
    flags = f"{FLAGS} {layout} --save {root} --load {root}"
    launcher.run(world_size, f"{flags} --exit-interval 4")
    job = Torchrun(nodes, world_size, f"{flags} --ckpt-step 2", tmp_path)
    wait_until(
        lambda: re.search(r"iteration +9/", job.output()), 2 * DEADLINE, job.output, pause=0.01
    )
    job.kill_last_worker()
    codes = job.wait()
    output = job.output()
    assert codes == [0] * nodes, output
    loaded_iterations = re.findall(r"> loaded .* at iteration (\d+)", output)
    first, second = map(int, loaded_iterations)
    # At iteration 9 the save of iteration 8 may still be in progress; it has waited for that of 6.
    assert first == 2
    assert second >= 6
    assert second % 2 == 0
    assert "an earlier launch of this job has saved it" in output
    logged: dict[int, set[float]] = {}
    for iteration, loss in re.findall(r"iteration +(\d+)/.*? lm loss: ([\d.E+-]+) ", output):
        logged.setdefault(int(iteration), set()).add(float(loss))
    _, losses, directory = undisturbed
    expected = {iteration: {loss} for iteration, loss in losses.items() if iteration > first}
    assert logged == expected, "also what was done twice"
    final = "iter_0000020"
    assert_same(stored_tensors(root / final), stored_tensors(directory / final))


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(
            ["dp2_distributed_optimizer", "single", "dp2_distributed_optimizer"],
            marks=pytest.mark.slow,
        ),
        ["tp2_pp2", "pp2_dp2", "single", "tp2_sp"],
    ],
)
def test_run_continues_with_other_ranks_after_a_kill(launcher, undisturbed, tmp_path, layouts):
    layouts_by_name = {"single": (1, ""), **LAYOUTS}
    losses: dict[int, float] = {}
    for index, layout in enumerate(layouts):
        world_size, layout_flags = layouts_by_name[layout]
        flags = f"{FLAGS} {layout_flags} --save {tmp_path} --load {tmp_path}"
        job: Job = launcher.start(world_size, flags)
        if index < len(layouts) - 1:
            job.until_iteration(5 * (index + 1))
            job.kill(world_size - 1)
            job.kill()
            assert -signal.SIGKILL in job.wait()
        else:
            job.succeed()
        if index:
            assert job.resumed_at() >= 5 * index - 4
        losses |= job.losses()
    expected = undisturbed[0]
    assert sorted(losses) == sorted(expected) == list(range(1, 21))
    assert losses == pytest.approx(expected, rel=ROUNDING)


def test_suspended_run_yields_to_its_successor(launcher, tmp_path):
    """A run that is suspended between two saves ends when it resumes after its successor, with the
    name of the successor.
    """
    flags = (
        f"{COMMON} {LLAMA} --num-layers 2 --mock-data --save-interval 2 --save {tmp_path} "
        f"--load {tmp_path}"
    )
    stopped = launcher.start(1, f"{flags} --train-iters 1000000")
    stopped.until_iteration(5)
    stopped.signal(0, signal.SIGSTOP)
    stopped.until(
        lambda: "\nState:\tT" in Path(f"/proc/{stopped.pids[0]}/status").read_text(), "the stop"
    )
    longer = f"--train-iters {max(stopped.iterations()) + 20} --override-opt_param-scheduler"
    successor = launcher.run(1, f"{flags} {longer}")
    last = successor.iterations()[-1]
    stopped.signal(0, signal.SIGCONT)
    assert stopped.wait() == [1]
    assert re.search(
        r"error: .* another launch has taken over this directory \(generation 2: .*pid",
        stopped.output(),
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
