"""Runs continue from edited checkpoints at other layouts."""

import pytest
import torch

from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from tests.support.compare import read_whole
from tests.support.training_harness import LAYOUTS, MODELS, train, whole
from tests.unit_tests.conversion.convert_tool import run_convert

FLAGS = f"--mock-data --train-iters 8 {MODELS['llama']} --bf16 "
# Flags of the conversion, and of the run that continues.
EDITS = {
    "layers": ("--layers 0-2,1-3", "--num-layers 6"),
    "vocabulary": ("--target-vocab-size 72", "--vocab-size 71"),
}


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """Return the directory of a run that saved iteration 5."""
    root = tmp_path_factory.mktemp("run")
    world_size, layout = LAYOUTS["tp2"]
    pool.run(train, world_size, f"{FLAGS} {layout} --exit-interval 5 --save {root}")
    return root


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2"])
@pytest.mark.parametrize("edit", EDITS)
def test_run_continues_from_an_edited_checkpoint(pool, run, tmp_path, edit, layout):
    edit_flags, model = EDITS[edit]
    edited = tmp_path / "edited"
    done = run_convert(
        *("--load-dir", run, "--save-dir", edited, "--saver", "torch_dist"),
        *edit_flags.split(),
    )
    assert done.returncode == 0, done.stderr

    world_size, flags = LAYOUTS[layout]
    load = f"{FLAGS} {flags} {model} --load {edited}"
    loaded = whole(pool.run(train, world_size, f"{load} --skip-train"))
    assert loaded.keys() == open_checkpoint(edited).tensors.keys()

    # Layer 3 of the edited model was layer 1 of the run, or has not moved.
    key = "decoder.layers.3.mlp.linear_fc1.weight"
    original_key = key
    if edit == "layers":
        original_key = "decoder.layers.1.mlp.linear_fc1.weight"
    original = open_checkpoint(run)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        expected = read_whole(original, optimizer_key(state, original_key))
        assert torch.equal(loaded[optimizer_key(state, key)], expected)

    continued = pool.run(train, world_size, load)[0]
    assert continued.iteration == 8
    assert continued.consumed_train_samples == 64

    losses = continued.measured.losses
    assert len(losses) == 3
    assert max(losses) < 4.5  # log(72) is 4.3


@pytest.mark.parametrize("layout", ["tp2_sp", "ep2"])
def test_run_continues_with_experts(pool, run, tmp_path, layout):
    """The first loss is that of the dense model: all experts of a layer are equal."""
    experts = tmp_path / "experts"
    done = run_convert(
        *("--load-dir", run, "--save-dir", experts, "--saver", "torch_dist"),
        *("--upcycle-experts", 4, "--topk", 2),
    )
    assert done.returncode == 0, done.stderr

    options = "--no-load-optim --no-load-rng"
    dense = pool.run(train, 1, f"{FLAGS} --load {run} {options}")[0]
    dense_losses = dense.measured.losses
    flags = "--expert-model-parallel-size 2 --use-distributed-optimizer"
    if layout != "ep2":
        _, flags = LAYOUTS[layout]
    model = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    load = f"{FLAGS} {flags} {model} {options} --load {experts}"
    outcome = pool.run(train, 2, load)[0]
    losses = outcome.measured.losses

    assert outcome.iteration == 8
    assert len(losses) == len(dense_losses) == 3
    assert abs(losses[0] - dense_losses[0]) < 5e-3
