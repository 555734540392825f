"""Run reduced command lines of real launch scripts: train, save, evaluate, resume."""

import math

import pytest

from tests import GOLDEN
from tests.real_scripts.shrink import shrunk
from tests.support.flag_sets import read
from tests.support.training_harness import train

SCRIPTS = [row for row in read(GOLDEN / "flag_sets/flag_sets.jsonl") if row["outcome"] == "parses"]
EVERY = 5  # of them, one runs in the plain suite


def script(index, row):
    return pytest.param(
        row["argv"], id=row["id"], marks=[] if index % EVERY == 0 else [pytest.mark.slow]
    )


@pytest.mark.parametrize("argv", [script(index, row) for index, row in enumerate(SCRIPTS)])
def test_it_trains_saves_and_goes_on(pool, tmp_path, argv):
    flags, world_size = shrunk(argv, tmp_path / "run")
    flags = [word if " " not in word else f"'{word}'" for word in flags]
    first = pool.run(train, world_size, " ".join(flags) + " --exit-interval 2", "")
    assert first[0].iteration == 2
    outcomes = pool.run(train, world_size, " ".join(flags), "")
    assert outcomes[0].iteration == 4
    losses = outcomes[0].measured.losses
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
