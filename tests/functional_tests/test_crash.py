"""Runs that are killed at any moment restart from a complete checkpoint and end bitwise like an
undisturbed run.

`pytest --run-slow tests/functional_tests/test_crash.py` kills 200 times, without it 12 times.
"""

import contextlib
import random
import time

import pytest

from megatron.core.dist_checkpointing import is_complete
from tests.support.compare import assert_same
from tests.support.crash_harness import stored_tensors
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA

MODEL = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --async-save --save-interval {{interval}} "
    "--keep-last-n 3 "
    "--hidden-dropout 0.1 --train-iters {iterations} --exit-duration-in-mins 10"
)


def found(root, pattern):
    """Return whether a path matches; a generation can disappear during the search."""
    with contextlib.suppress(FileNotFoundError):
        return any(root.glob(pattern))
    return False


def some_iterations(job, count):
    job.until(lambda: len(job.iterations()) > count, f"iteration {count}")


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
    some_iterations(job, num_iterations)
    time.sleep(rng.uniform(0, 0.02))


def while_writing(job, root, interval, rng):
    """Wait for the middle of a save: shards are being written, or it is being committed."""
    some_iterations(job, rng.randrange(4))
    job.until(lambda: found(root, ".generation-*/saving-*"), "a save", pause=0.001)
    time.sleep(rng.uniform(0, 0.01))


def while_removing(job, root, interval, rng):
    """Wait for the middle of the removal of an old checkpoint."""
    job.until(lambda: found(root, ".generation-*/deleting-*"), "a removal", pause=0.001)


MOMENTS = [anywhere, while_training, while_writing, while_writing, while_removing]


def crash(launcher, root, world_size, flags, interval, kills, victims, rng):
    """Start and kill the program `kills` times, let it finish, and return the iteration that each
    start resumed from.
    """
    least = 0
    resumed = []
    for number in range(kills):
        job = launcher.start(world_size, f"{flags} --save {root} --load {root}")
        wait_for_moment = MOMENTS[number % len(MOMENTS)]
        wait_for_moment(job, root, interval, rng)
        killed_ranks = rng.choice(victims)
        job.kill(*killed_ranks)
        # The others go on for a moment, until the launcher ends them.
        moment = rng.uniform(0, 0.1)
        time.sleep(moment)
        job.kill()
        codes = job.wait()
        assert -9 in codes, f"the run was over too early, or failed:\n{job.output()}"
        for directory in root.glob("iter_*"):
            assert is_complete(directory), f"{directory} looks like a checkpoint and is none"
        start = job.resumed_at() or 0
        iterations = job.iterations()
        if iterations:
            assert start >= least, f"resumed at {start}, although {least} was saved"
            resumed.append(start)
            assert iterations[0] == start + 1
            # A save that began waited for the one before, so that one is durable.
            num_saves = (iterations[-1] - 1) // interval
            durable = (num_saves - 1) * interval
            least = max(least, durable, *job.saved(), 0)
        tracker = root / "latest_checkpointed_iteration.txt"
        tracked = 0
        if tracker.exists():
            tracked = int(tracker.read_text())
        assert tracked >= least
    (root / "run.json.tmp-host-1-0").touch()  # as if one had been killed while it wrote
    last = launcher.run(world_size, f"{flags} --save {root} --load {root}")
    start = last.resumed_at() or 0
    assert start >= least
    return resumed


def run(launcher, root, kills, world_size, layout, interval, victims, seed):
    iterations = (4 + 5 * interval) * kills  # more than all of the killed starts reach
    flags = MODEL.format(interval=interval, iterations=iterations) + " " + layout
    rng = random.Random(seed)
    crashed = root / "crashed"
    straight = root / "straight"
    resumed = crash(launcher, crashed, world_size, flags, interval, kills, victims, rng)
    assert resumed == sorted(resumed)
    assert len(set(resumed)) > kills // 4, "there must be progress to lose"
    launcher.run(world_size, f"{flags} --save {straight} --save-interval {iterations}")
    final = f"iter_{iterations:07d}"
    assert_same(stored_tensors(crashed / final), stored_tensors(straight / final))
    kept = [f"iter_{iterations - back * interval:07d}" for back in (2, 1, 0)]
    (generation,) = crashed.glob(".*")
    unfinished = [path.name for path in generation.iterdir()]
    assert unfinished == ["owner.json"], "nothing unfinished is left behind"
    ignored = (generation.name, "run.json", "runs")
    left = sorted(path.name for path in crashed.iterdir() if path.name not in ignored)
    assert left == [*kept, "latest_checkpointed_iteration.txt"], "nothing is left behind"


def test_random_kills_of_one_process(launcher, tmp_path):
    kills = len(MOMENTS) + 1
    run(launcher, tmp_path, kills, 1, "", 1, [[0]], 1)


def test_random_kills_of_one_or_all_ranks(launcher, tmp_path):
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    victims = [[0], [1], [0, 1]]
    run(launcher, tmp_path, 6, world_size, layout, 2, victims, 2)


@pytest.mark.slow
def test_many_random_kills_of_one_process(launcher, tmp_path):
    run(launcher, tmp_path, 140, 1, "", 1, [[0]], 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_distributed_optimizer", "tp2"])
def test_many_random_kills_of_one_or_all_ranks(launcher, tmp_path, layout):
    run(launcher, tmp_path, 30, *LAYOUTS[layout], 2, [[0], [1], [0, 1]], 4)
