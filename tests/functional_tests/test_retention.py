"""Checkpoints that remain on the disk under the retention rules."""

import re

import pytest

from tests.support.training_harness import COMMON, LAYOUTS, LLAMA, train

FLAGS = f"--mock-data {LLAMA} --num-layers 2 --train-iters 12 --save-interval 1 "
MODES = ["", "--async-save"]


def kept(directory):
    (generation,) = directory.glob(".*")
    assert [path.name for path in generation.iterdir()] == ["owner.json"], (
        "nothing is left of what was removed"
    )
    return sorted(int(path.name.removeprefix("iter_")) for path in directory.glob("iter_*"))


@pytest.mark.parametrize("mode", MODES)
def test_keep_last_and_retain_interval(pool, tmp_path, mode):
    rules = "--keep-last-n 2 --save-retain-interval 5"
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    flags = f"{FLAGS} {layout} --save {tmp_path}/ --load {tmp_path} {rules} {mode}"
    pool.run(train, world_size, f"{flags} --exit-interval 7")
    assert kept(tmp_path) == [5, 6, 7]
    assert pool.run(train, world_size, flags)[0].iteration == 12
    assert kept(tmp_path) == [5, 10, 11, 12]


@pytest.mark.parametrize("mode", MODES)
def test_keep_best_by_validation_loss(pool, tmp_path, mode):
    """The lowest of the measured losses, those before a restart included."""
    flags = (
        f"{FLAGS} --save {tmp_path} --load {tmp_path} --keep-best-n 2 --eval-interval 2 "
        f"--eval-iters 1 {mode}"
    )
    first = pool.run(train, 1, f"{flags} --exit-interval 7")[0].measured.points
    second = pool.run(train, 1, flags)[0].measured.points
    losses = {
        i: value for (name, i), value in (first | second).items() if name == "lm loss validation"
    }
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    best = sorted(losses, key=losses.get)[:2]
    assert kept(tmp_path) == sorted({*best, 12})


def test_retention_follows_the_branch_after_a_rollback(pool, tmp_path):
    """Back from 10 to 4, then on: 8 and 10 are of a branch that was left, they neither count nor
    are removed.
    """
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path}"
    pool.run(train, 1, f"{flags} --save-interval 2 --exit-interval 10")
    pool.run(train, 1, f"{flags} --ckpt-step 4 --keep-last-n 2 --exit-interval 6")
    assert kept(tmp_path) == [5, 6, 8, 10]
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert pool.run(train, 1, f"{flags} --keep-last-n 2 --exit-interval 7")[0].iteration == 7
    assert kept(tmp_path) == [6, 7, 8, 10], "without the tracker, too, 6 was the newest"


def test_log_order_of_saves_and_removals(launcher, tmp_path):
    job = launcher.run(1, f"{COMMON} {FLAGS} --train-iters 3 --save {tmp_path} --keep-last-n 1")
    told = re.findall(r"> (saved|removed) \S*iter_000000(\d)", job.output())
    assert told == [
        ("saved", "1"),
        ("saved", "2"),
        ("removed", "1"),
        ("saved", "3"),
        ("removed", "2"),
    ]


def test_nothing_is_removed_without_rules(pool, tmp_path):
    pool.run(train, 1, f"{FLAGS} --save {tmp_path}")
    assert kept(tmp_path) == list(range(1, 13))


def test_keep_best_requires_evaluation(pool):
    with pytest.raises(ValueError, match=r"--keep-best-n 2 requires --eval-iters: it compares"):
        pool.run(train, 1, f"{FLAGS} --keep-best-n 2 --eval-iters 0")
    with pytest.raises(ValueError, match="--keep-last-n must be positive, got 0"):
        pool.run(train, 1, f"{FLAGS} --keep-last-n 0")
