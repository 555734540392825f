"""Runs that are killed at any moment restart from a complete checkpoint and end bitwise like an
undisturbed run.

`pytest --run-slow tests/functional_tests/test_crash.py` kills 200 times, without it 12 times.
"""

import contextlib
import random
import time

import pytest

from megatron.core.dist_checkpointing import is_complete
from tests.support.crash_harness import assert_same_checkpoint
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA

FLAGS = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --async-save --save-interval {{interval}} "
    "--keep-last-n 3 "
    "--hidden-dropout 0.1 --train-iters {iterations} --exit-duration-in-mins 10"
)


def has_match(root, pattern):
    """Return whether a path matches; a generation can disappear during the search."""
    with contextlib.suppress(FileNotFoundError):
        return any(root.glob(pattern))
    return False


def wait_for_iterations(job, count):
    job.until(lambda: len(job.iterations()) > count, f"iteration {count}")


# ---- Moments to kill at ----


def anywhere(job, root, interval, rng):
    """Wait for any moment from the start of the program, until at most 8 saves later."""
    end = time.monotonic() + rng.uniform(0, 0.6)

    def is_over():
        return time.monotonic() > end or len(job.iterations()) >= 8 * interval

    job.until(is_over)


def while_training(job, root, interval, rng):
    """Wait for any moment of an iteration after the first save."""
    job.until(job.saved, "a save")
    num_iterations = len(job.iterations()) + rng.randrange(3 * interval)
    wait_for_iterations(job, num_iterations)
    time.sleep(rng.uniform(0, 0.02))


def while_writing(job, root, interval, rng):
    """Wait for the middle of a save: shards are being written, or it is being committed."""
    wait_for_iterations(job, rng.randrange(4))
    job.until(lambda: has_match(root, ".generation-*/saving-*"), "a save", pause=0.001)
    time.sleep(rng.uniform(0, 0.01))


def while_removing(job, root, interval, rng):
    """Wait for the middle of the removal of an old checkpoint."""
    job.until(lambda: has_match(root, ".generation-*/deleting-*"), "a removal", pause=0.001)


MOMENTS = [anywhere, while_training, while_writing, while_writing, while_removing]


def kill_and_restart(launcher, root, world_size, flags, interval, kills, victims, rng):
    """Start and kill the program `kills` times, let it finish, and return the iteration that each
    start resumed from.
    """
    tracker = root / "latest_checkpointed_iteration.txt"
    flags = f"{flags} --save {root} --load {root}"
    last_durable = 0  # the last iteration that a kill must not lose
    resumed = []
    for index in range(kills):
        # Kill at a random moment.
        job = launcher.start(world_size, flags)
        wait_for_moment = MOMENTS[index % len(MOMENTS)]
        wait_for_moment(job, root, interval, rng)
        killed_ranks = rng.choice(victims)
        job.kill(*killed_ranks)
        # The others go on for a moment, until the launcher ends them.
        moment = rng.uniform(0, 0.1)
        time.sleep(moment)
        job.kill()
        codes = job.wait()

        assert -9 in codes, f"the run was over too early, or failed:\n{job.output()}"

        # Check the files that are left, and the iteration that this start resumed from.
        for directory in root.glob("iter_*"):
            assert is_complete(directory), f"{directory} is not a complete checkpoint"

        start = job.resumed_at() or 0
        iterations = job.iterations()
        if iterations:
            assert start >= last_durable, f"resumed at {start}, although {last_durable} was saved"
            resumed.append(start)
            assert iterations[0] == start + 1
            # A save that began waited for the one before, so that one is durable.
            num_saves = (iterations[-1] - 1) // interval
            durable = (num_saves - 1) * interval
            last_durable = max(last_durable, durable, *job.saved(), 0)

        tracked = 0
        if tracker.exists():
            tracked = int(tracker.read_text())
        assert tracked >= last_durable

    (root / "run.json.tmp-host-1-0").touch()  # as if one had been killed while it wrote
    final_job = launcher.run(world_size, flags)
    start = final_job.resumed_at() or 0
    assert start >= last_durable
    return resumed


def assert_no_unfinished_files(root, iterations, interval):
    """Check that only the last three checkpoints and the tracker remain."""
    (generation,) = root.glob(".*")
    unfinished = [path.name for path in generation.iterdir()]
    assert unfinished == ["owner.json"]

    checkpoints = []
    for saves_before_the_end in (2, 1, 0):
        iteration = iterations - saves_before_the_end * interval
        checkpoints.append(f"iter_{iteration:07d}")
    names = {path.name for path in root.iterdir()}
    names -= {generation.name, "run.json", "runs"}
    assert sorted(names) == [*checkpoints, "latest_checkpointed_iteration.txt"]


def compare_with_undisturbed_run(
    launcher,
    root,
    *,
    kills,
    victims,
    interval,
    seed,
    world_size=1,
    layout="",
):
    """Kill a run `kills` times and compare its last checkpoint with that of an undisturbed run."""
    iterations = (4 + 5 * interval) * kills  # more than all of the killed starts reach
    flags = FLAGS.format(interval=interval, iterations=iterations) + " " + layout
    rng = random.Random(seed)
    crashed = root / "crashed"
    undisturbed = root / "undisturbed"
    resumed = kill_and_restart(launcher, crashed, world_size, flags, interval, kills, victims, rng)

    assert resumed == sorted(resumed)
    assert len(set(resumed)) > kills // 4, "there must be progress to lose"

    launcher.run(world_size, f"{flags} --save {undisturbed} --save-interval {iterations}")
    assert_same_checkpoint(crashed, undisturbed, iterations)
    assert_no_unfinished_files(crashed, iterations, interval)


def test_random_kills_of_one_process(launcher, tmp_path):
    kills = len(MOMENTS) + 1
    compare_with_undisturbed_run(launcher, tmp_path, kills=kills, victims=[[0]], interval=1, seed=1)


ONE_OR_ALL_RANKS = [[0], [1], [0, 1]]


def test_random_kills_of_one_or_all_ranks(launcher, tmp_path):
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    compare_with_undisturbed_run(
        launcher,
        tmp_path,
        kills=6,
        victims=ONE_OR_ALL_RANKS,
        interval=2,
        seed=2,
        world_size=world_size,
        layout=layout,
    )


@pytest.mark.slow
def test_many_random_kills_of_one_process(launcher, tmp_path):
    compare_with_undisturbed_run(launcher, tmp_path, kills=140, victims=[[0]], interval=1, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_distributed_optimizer", "tp2"])
def test_many_random_kills_of_one_or_all_ranks(launcher, tmp_path, layout):
    world_size, flags = LAYOUTS[layout]
    compare_with_undisturbed_run(
        launcher,
        tmp_path,
        kills=30,
        victims=ONE_OR_ALL_RANKS,
        interval=2,
        seed=4,
        world_size=world_size,
        layout=flags,
    )
