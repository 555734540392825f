"""Checkpoints that remain on the disk under the retention rules."""

import re

import pytest

from tests.support.training_harness import COMMON, LAYOUTS, LLAMA, train

FLAGS = f"--mock-data {LLAMA} --num-layers 2 --train-iters 12 --save-interval 1 "
MODES = ["", "--async-save"]


def list_checkpoints(directory):
    """Return the iterations of all checkpoints, after checking that no removal is unfinished."""
    (generation,) = directory.glob(".*")
    assert [path.name for path in generation.iterdir()] == ["owner.json"]

    iterations = []
    for path in directory.glob("iter_*"):
        iteration = int(path.name.removeprefix("iter_"))
        iterations.append(iteration)
    return sorted(iterations)


@pytest.mark.parametrize("mode", MODES)
def test_keep_last_and_retain_interval(pool, tmp_path, mode):
    rules = "--keep-last-n 2 --save-retain-interval 5"
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    flags = f"{FLAGS} {layout} --save {tmp_path}/ --load {tmp_path} {rules} {mode}"
    pool.run(train, world_size, f"{flags} --exit-interval 7")
    assert list_checkpoints(tmp_path) == [5, 6, 7]

    outcome = pool.run(train, world_size, flags)[0]
    assert outcome.iteration == 12
    assert list_checkpoints(tmp_path) == [5, 10, 11, 12]


@pytest.mark.parametrize("mode", MODES)
def test_keep_best_by_validation_loss(pool, tmp_path, mode):
    """The lowest losses are kept; those before a restart count."""
    flags = (
        f"{FLAGS} --save {tmp_path} --load {tmp_path} --keep-best-n 2 --eval-interval 2 "
        f"--eval-iters 1 {mode}"
    )
    first = pool.run(train, 1, f"{flags} --exit-interval 7")[0].measured.points
    second = pool.run(train, 1, flags)[0].measured.points
    losses = {}
    for (name, iteration), value in (first | second).items():
        if name == "lm loss validation":
            losses[iteration] = value
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]

    best = sorted(losses, key=losses.get)[:2]
    assert list_checkpoints(tmp_path) == sorted({*best, 12})


def test_retention_follows_the_branch_after_a_rollback(pool, tmp_path):
    """After a rollback from 10 to 4, the checkpoints 8 and 10 are on a branch that was left: they
    do not count and are not removed.
    """
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path}"
    pool.run(train, 1, f"{flags} --save-interval 2 --exit-interval 10")
    pool.run(train, 1, f"{flags} --ckpt-step 4 --keep-last-n 2 --exit-interval 6")
    assert list_checkpoints(tmp_path) == [5, 6, 8, 10]

    # Without the tracker, too, 6 is the newest checkpoint.
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    outcome = pool.run(train, 1, f"{flags} --keep-last-n 2 --exit-interval 7")[0]
    assert outcome.iteration == 7
    assert list_checkpoints(tmp_path) == [6, 7, 8, 10]


def test_log_order_of_saves_and_removals(launcher, tmp_path):
    job = launcher.run(1, f"{COMMON} {FLAGS} --train-iters 3 --save {tmp_path} --keep-last-n 1")
    events = re.findall(r"> (saved|removed) \S*iter_000000(\d)", job.output())
    assert events == [
        ("saved", "1"),
        ("saved", "2"),
        ("removed", "1"),
        ("saved", "3"),
        ("removed", "2"),
    ]


def test_nothing_is_removed_without_rules(pool, tmp_path):
    pool.run(train, 1, f"{FLAGS} --save {tmp_path}")
    assert list_checkpoints(tmp_path) == list(range(1, 13))


def test_keep_best_requires_evaluation(pool):
    with pytest.raises(ValueError, match=r"--keep-best-n 2 requires --eval-iters: it compares"):
        pool.run(train, 1, f"{FLAGS} --keep-best-n 2 --eval-iters 0")
    with pytest.raises(ValueError, match="--keep-last-n must be positive, got 0"):
        pool.run(train, 1, f"{FLAGS} --keep-last-n 0")
