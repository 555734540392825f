"""Timelines have the bubble of the formula, and pictures can be drawn."""

import shlex
import sys

import pytest

from megatron.planning.pictures import (
    draw_plan,
    draw_shares,
    make_timeline,
    select_excerpt,
)
from megatron.planning.run_plan import plan_run
from megatron.training.config.parsing import parse_args
from pretrain_gpt import model_provider

image = pytest.importorskip("matplotlib.image", reason="the extra plots is not installed")


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"),
    [(1, 1, 3), (2, 1, 5), (4, 1, 4), (4, 1, 9), (4, 2, 8)],
)
def test_timeline_has_the_bubble_of_the_plan(stages, chunks, microbatches):
    """Narayanan et al. 2021: (P - 1) / m of the time without bubble, over V with chunks; a pass
    takes 1 + 2.
    """
    passes = make_timeline(stages, chunks, microbatches)
    assert len(passes) == 2 * stages * chunks * microbatches
    assert max(item.end for item in passes) == 3 * (chunks * microbatches + stages - 1)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 1, 50), (4, 1, 64), (8, 3, 96)])
def test_excerpt_of_a_long_schedule_contains_its_bubble(stages, chunks, microbatches):
    passes = make_timeline(stages, chunks, microbatches)
    excerpt = select_excerpt(passes, stages, chunks)
    end = max(item.end for item in passes)
    assert end == max(item.end for item in excerpt.passes)

    drawn = end - (excerpt.end - excerpt.start)
    assert drawn < end / 2

    busy = sum(item.end - item.start for item in excerpt.passes)
    # Each stage waits for 3 (P - 1) of the time: no part of it is omitted.
    assert stages * drawn - busy == pytest.approx(stages * 3 * (stages - 1))


def test_excerpt_of_a_short_schedule_is_all_of_it():
    passes = make_timeline(4, 1, 8)
    assert select_excerpt(passes, 4, 1).passes == passes


def test_passes_do_not_overlap_and_wait_for_their_input():
    passes = make_timeline(4, 2, 8)
    ends = {(item.stage, item.action): item.end for item in passes}
    for stage in range(4):
        own = sorted((item for item in passes if item.stage == stage), key=lambda item: item.start)
        assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False))

    for item in passes:
        if item.action.kind == "forward" and item.stage > 0:
            assert item.start >= ends[item.stage - 1, item.action]
        if item.action.kind == "backward":
            assert item.start >= ends[item.stage, item.action._replace(kind="forward")]


def test_plan_picture(tmp_path):
    flags = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--micro-batch-size 1 --lr 1e-3 "
    )
    flags += "--train-iters 1 --global-batch-size 4 --pipeline-model-parallel-size 4 --mock-data "
    config = parse_args(shlex.split(flags + "--tokenizer-type NullTokenizer --vocab-size 127"), 4)
    config.set_vocab_size(128)
    plan = plan_run(config, 4, model_provider)
    draw_plan(plan, tmp_path / "new/plan.png", device_bytes=80e9, reserve=4e9)
    draw_plan(plan, tmp_path / "plain.png")
    drawn = image.imread(tmp_path / "new/plan.png")
    plain = image.imread(tmp_path / "plain.png")
    red = (abs(drawn[..., :3] - [0xC2 / 255, 0x33 / 255, 0x4D / 255]) < 0.02).all(-1)

    assert red.sum() > 500
    assert red.sum() > 100 * (abs(plain[..., :3] - [0.76, 0.2, 0.3]) < 0.02).all(-1).sum()


def test_shares_picture(tmp_path):
    shares = {
        "a": {"embedding": {"weights": 5}, "layer 10": {"weights": 1}},
        "b": {"layer 9": {"exp_avg": 7}},
    }
    draw_shares(shares, tmp_path / "shares.png", "who has what", "rank")
    assert image.imread(tmp_path / "shares.png").shape[1] > 600


def test_missing_matplotlib_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install 'matplotlib"):
        draw_shares({"a": {"embedding": {"weights": 5}}}, tmp_path / "shares.png", "", "")
