"""Run reduced command lines of real launch scripts: train, save, evaluate, resume."""

import math
import shlex

import pytest

from megatron.planning.smoke import CP, PP, TP, list_options, reduce_flags, shrink
from megatron.training.config.parsing import parse_args
from tests import GOLDEN
from tests.support.flag_sets import read
from tests.support.training_harness import train

SCRIPTS = [row for row in read(GOLDEN / "flag_sets/flag_sets.jsonl") if row["outcome"] == "parses"]
EVERY = 7  # of them, one runs in the plain suite
FIRST = 5  # with it, they have experts, FSDP2, interleaved stages and fp16 among them


def script(index, row):
    return pytest.param(
        row["argv"],
        id=row["id"],
        marks=[] if index % EVERY == FIRST else [pytest.mark.slow],
    )


def count_ranks(options):
    """Return the ranks of two replicas, or of one with at most 2 ranks of each axis."""
    sizes = {name: int(values[0]) for name, values in options if name in (TP, PP, CP)}
    return max(2, math.prod(min(size, 2) for size in sizes.values()))


@pytest.mark.parametrize("argv", [script(index, row) for index, row in enumerate(SCRIPTS)])
def test_it_trains_saves_and_goes_on(pool, tmp_path, argv):
    options = list_options(argv)
    world_size = count_ranks(options)
    arguments = [*reduce_flags(options, world_size, 4), "--distributed-backend", "gloo"]
    arguments += ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    flags = shlex.join(arguments)
    first = pool.run(train, world_size, f"{flags} --exit-interval 2", "")
    assert first[0].iteration == 2

    outcomes = pool.run(train, world_size, flags, "")
    assert outcomes[0].iteration == 4

    losses = outcomes[0].measured.losses
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)


def test_smoke_reads_every_spelling_and_leaves_errors_to_the_parser():
    spellings = (
        "--num_layers=32 --hidden_size 4096 --num-attention-heads 32 --seq-length 4096 "
        "--max_position_embeddings 4096 --pipeline_model_parallel_size 8 --lr 1e-4 "
        "--virtual-pipeline-model-parallel-size 4 --save-hf out --profile"
    )
    config = parse_args(reduce_flags(list_options(spellings.split()), 1), 1)
    assert config.model.num_layers == 2
    assert config.model.hidden_size == 32
    assert config.checkpoint.save_hf is None
    assert not config.profiling.profile

    wrong = [*spellings.split(), "--num-experts", "four"]
    with pytest.raises(ValueError, match="--num-experts: 'four' is not an integer"):
        parse_args(reduce_flags(list_options(wrong), 1), 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_smoke_fits_any_number_of_processes(monkeypatch, capsys, world_size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    for row in SCRIPTS:
        flags = shrink([*row["argv"], "--smoke"], world_size)
        parse_args(flags, world_size)
        output = capsys.readouterr().out
        assert "--smoke changed: " in output
        assert "--mock-data" in output
        assert "--data-path" not in flags
        assert "--smoke" not in flags
