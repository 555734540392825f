"""In-process restart: a lost rank is replaced while the others keep their processes, and training
ends bitwise like an undisturbed run.
"""

import os
import random
import re
import shutil
import signal
import time

import pytest

from tests.support.crash_harness import assert_same_checkpoint
from tests.support.processes import is_running, wait_until
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA

WORLD_SIZE = 2


def start(launcher, directory, name, *fields):
    arguments = " ".join([name, str(directory), *fields])
    return launcher.start(WORLD_SIZE, arguments, program="restart_programs")


def read_attempts(directory, rank):
    """Return the numbers of a rank's attempts, and the process of each."""
    attempts = []
    processes = []
    for line in (directory / str(rank)).read_text().splitlines():
        attempt, process = line.split()
        attempts.append(int(attempt))
        processes.append(int(process))
    return attempts, processes


@pytest.mark.parametrize("others", ["compute", "wait", "communicate"])
def test_lost_rank_gets_a_new_process_and_the_others_keep_theirs(launcher, tmp_path, others):
    start(launcher, tmp_path, f"killed_while_others_{others}").succeed()
    attempts, processes = read_attempts(tmp_path, 0)
    lost_attempts, lost_processes = read_attempts(tmp_path, 1)

    assert attempts == lost_attempts == [0, 1]
    # An operation of gloo does not always notice the loss of its connection.
    if others != "communicate":
        assert processes[0] == processes[1]
    assert lost_processes[0] != lost_processes[1]


def test_rank_can_be_lost_while_others_create_their_process_group(launcher, tmp_path):
    """torch numbers the groups of a process: all ranks must number those of an attempt equally."""
    start(launcher, tmp_path, "killed_while_others_join", "inprocess_barrier_timeout=20").succeed()
    attempts, _ = read_attempts(tmp_path, 1)
    assert attempts == [0, 1]


def test_new_process_of_a_rank_inherits_the_imports_of_the_lost_one(launcher, tmp_path):
    start(launcher, tmp_path, "killed_after_import").succeed()
    assert (tmp_path / "1.imported").read_text() == "True"


def test_rank_with_a_defect_gets_a_new_process(launcher, tmp_path):
    job = start(launcher, tmp_path, "defect").succeed()
    _, processes = read_attempts(tmp_path, 0)
    assert processes[0] == processes[1]
    _, processes = read_attempts(tmp_path, 1)
    assert processes[0] != processes[1]
    assert "KeyError: 'a defect'" in job.output(1)
    assert "in-process restart 1: rank 1: KeyError: 'a defect'" in job.output(0)


def test_suspended_rank_is_replaced_after_the_hard_timeout(launcher, tmp_path):
    program = "killed_while_another_is_suspended"
    start(launcher, tmp_path, program, "inprocess_hard_timeout=0.5").succeed()
    _, processes = read_attempts(tmp_path, 0)
    assert processes[0] != processes[1]


def test_error_of_the_user_is_not_repeated(launcher, tmp_path):
    job = start(launcher, tmp_path, "user_error")
    job.until(lambda: "wrong --lr" in job.output(1))
    job.signal(0, signal.SIGTERM)  # as torchrun does when a process has failed
    assert job.wait() == [128 + signal.SIGTERM, 1]
    attempts, _ = read_attempts(tmp_path, 0)
    assert attempts == [0]


# The monitor of a rank looks for the store, which ends with rank 0, four times in this time.
LOOKS = "inprocess_hard_timeout=2"


def test_attempts_are_limited(launcher, tmp_path):
    job = start(launcher, tmp_path, "always_killed", "inprocess_max_iterations=3", LOOKS)
    assert job.wait() == [1, 1]
    attempts, _ = read_attempts(tmp_path, 1)
    assert attempts == [0, 1, 2]
    assert "--inprocess-max-iterations 3 is reached" in job.output()


def test_attempts_without_an_iteration_are_limited(launcher, tmp_path):
    job = start(launcher, tmp_path, "always_killed", LOOKS)
    assert job.wait() == [1, 1]
    assert "5 attempts did not complete a single iteration" in job.output()


def test_processes_end_if_a_rank_is_missing(launcher, tmp_path):
    """A lost monitor cannot replace its rank: the launcher must restart the job."""
    job = start(launcher, tmp_path, "wait", "inprocess_barrier_timeout=0.5")
    ready_files = [tmp_path / str(rank) for rank in range(WORLD_SIZE)]
    job.until(lambda: all(path.exists() for path in ready_files))
    kept, orphan = job.workers()
    job.kill(1)
    wait_until(lambda: not is_running(orphan))  # the rank ends with its monitor
    os.kill(kept, signal.SIGKILL)

    assert job.wait() == [1, -signal.SIGKILL]
    assert "not all 2 ranks have arrived within --inprocess-barrier-timeout 0.5" in job.output()


# ---- Training ----

TRAINING = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --hidden-dropout 0.1 --async-save "
    "--save-interval 6 --non-persistent-ckpt-type local --non-persistent-save-interval 2 "
    "--replication "
)


def kill_and_train_on(launcher, root, layout, kills, seed, observation=""):
    """Kill ranks at random moments of a run, and compare it with an undisturbed one.

    `observation` are flags of the run that ranks are killed in.
    """
    world_size, layout_flags = LAYOUTS[layout]
    iterations = 6 + 5 * kills
    flags = f"{TRAINING} {layout_flags} --train-iters {iterations} "
    disks = f"--non-persistent-local-ckpt-dir {root}/disks/$RANK"
    straight = launcher.run(world_size, f"{flags} {disks}-straight --save {root}/straight")
    expected = straight.losses()

    rng = random.Random(seed)
    run = root / "run"
    restarting = f"{flags} {disks} --inprocess-restart --save {run} --load {run} {observation}"
    job = launcher.start(world_size, restarting)
    for index in range(kills):
        count = len(read_losses(job))
        job.until(lambda count=count: len(read_losses(job)) >= count + rng.randrange(2, 5))
        time.sleep(rng.uniform(0, 0.02))
        rank = index % world_size  # each of them, rank 0 first
        kill_rank(job, rank)
        if index % 3 == 0:
            # The disk of a lost node is lost, too. Its replacement has an empty one.
            shutil.rmtree(root / "disks" / str(rank), ignore_errors=True)
        if index % 3 == 1:  # another one during the restart
            time.sleep(rng.uniform(0, 0.3))
            another_rank = rng.randrange(world_size)
            kill_rank(job, another_rank)

    job.succeed()

    for iteration, loss in read_losses(job):
        assert loss == expected[iteration], f"iteration {iteration}"
    assert_same_checkpoint(run, root / "straight", iterations)

    restarts = set(re.findall(r"in-process restart (\d+):", job.output()))
    assert len(restarts) >= kills


def kill_rank(job, rank):
    job.until(lambda: len(job.workers()) == len(job.pids), "a worker of every rank")
    os.kill(job.workers()[rank], signal.SIGKILL)


def read_losses(job):
    """Return (iteration, loss) of every log line; iterations are repeated after a restart."""
    lines = re.findall(r"iteration +(\d+)/.*? lm loss: ([\d.E+-]+) ", job.output())
    return [(int(iteration), float(loss)) for iteration, loss in lines]


def test_losses_after_restarts_are_those_of_an_undisturbed_run(launcher, tmp_path):
    kill_and_train_on(launcher, tmp_path, "tp2_dp2", kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_dp2", "tp2_pp2", "pp2_dp2"])
def test_losses_after_many_restarts(launcher, tmp_path, layout):
    kill_and_train_on(launcher, tmp_path, layout, kills=20, seed=2)


@pytest.mark.slow
def test_losses_after_restarts_of_an_observed_run(launcher, tmp_path):
    observation = (
        "--log-straggler --hang-report-seconds 3 --gradient-check-interval 3 "
        "--rerun-mode validate_results"
    )
    kill_and_train_on(launcher, tmp_path, "tp2_dp2", kills=3, seed=1, observation=observation)
