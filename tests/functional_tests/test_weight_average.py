"""--ema-decay in training: every layout, resuming, evaluation, and exports of the average."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

from megatron.conversion.opening import open_checkpoint
from tests.support.compare import assert_same, read_all, read_whole
from tests.support.training_harness import (
    DISTRIBUTED_OPTIMIZER,
    GPT2,
    LAYOUTS,
    LLAMA,
    get_losses,
    train,
    whole,
)
from tests.unit_tests.conversion.convert_tool import run_convert

DECAY = 0.9
RUN = f"--mock-data --train-iters 4 --global-batch-size 4 --num-layers 2 --ema-decay {DECAY} "
MOE = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
EP2 = (2, f"--expert-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}")
SINGLE = (1, "")
EVALUATION = "--eval-iters 2 --eval-interval 2 --split 80,20,0 "


def launch(pool, layout, flags):
    world_size, layout_flags = layout
    return pool.run(train, world_size, f"{RUN} {layout_flags} {flags}")


def get_validation_losses(outcomes):
    points = outcomes[0].measured.points
    return {step: loss for (name, step), loss in points.items() if name == "lm loss validation"}


def select_averages(tensors):
    """Return the averages by key of the parameter."""
    averages = {}
    for key, tensor in tensors.items():
        if key.startswith("ema."):
            averages[key.removeprefix("ema.")] = tensor
    return averages


def main_key(parameter):
    return f"optimizer.state.param.{parameter}"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (f"{LLAMA} --bf16", LAYOUTS["tp2_pp2"]),
        (LLAMA, LAYOUTS["dp2_distributed_optimizer"]),
        (f"{GPT2} --bf16", LAYOUTS["pp2_dp2"]),
        (MOE, EP2),
    ],
    ids=["tp2_pp2", "zero", "tied_pp2_dp2", "ep2"],
)
def test_saved_average_is_that_of_the_saved_main_parameters(pool, tmp_path, model, layout):
    """The average of each checkpoint follows bitwise from the one before in a plain loop."""
    flags = f"{model} --save {tmp_path} --save-interval 1"
    outcomes = launch(pool, layout, flags)
    checkpoints = []
    for iteration in range(1, 5):
        checkpoints.append(read_all(open_checkpoint(tmp_path, step=iteration)))

    for earlier, later in itertools.pairwise(checkpoints):
        averages = select_averages(earlier)
        later_averages = select_averages(later)
        assert len(averages) >= 10
        for key, average in averages.items():
            main = later[main_key(key)]
            expected = average.lerp(main, 1.0 - DECAY)
            assert torch.equal(later_averages[key], expected), key
            assert not torch.equal(expected, main), key

    assert_same(select_averages(whole(outcomes)), select_averages(checkpoints[-1]))


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        (f"{LLAMA} --bf16", LAYOUTS["dp2_distributed_optimizer"], LAYOUTS["tp2_pp2"]),
        (LLAMA, LAYOUTS["tp2_pp2"], LAYOUTS["dp2_distributed_optimizer"]),
        (MOE, EP2, SINGLE),
    ],
    ids=["zero_to_tp2_pp2", "tp2_pp2_to_zero", "ep2_to_single"],
)
def test_average_resumes_at_any_layout(pool, tmp_path, model, first, second):
    saved = whole(launch(pool, first, f"{model} --save {tmp_path} --exit-interval 2"))
    loaded = whole(launch(pool, second, f"{model} --load {tmp_path} --skip-train"))
    assert_same(loaded, saved)

    # The same layout continues bitwise, another one up to the rounding of the losses.
    straight = whole(launch(pool, first, model))
    resumed = whole(launch(pool, first, f"{model} --load {tmp_path}"))
    assert_same(resumed, straight)

    moved = whole(launch(pool, second, f"{model} --load {tmp_path}"))
    assert moved.keys() == straight.keys()

    moved_averages = select_averages(moved)
    for key, average in select_averages(straight).items():
        torch.testing.assert_close(moved_averages[key], average, rtol=1e-3, atol=1e-4)


def test_average_is_evaluated_and_exported(pool, tmp_path):
    """--eval-ema measures the loss of the exported average, and does not affect training."""
    run = tmp_path / "run"
    model = f"{LLAMA} --bf16"
    layout = LAYOUTS["dp2_distributed_optimizer"]
    flags = f"{model} {EVALUATION} --save {run} --save-interval 2 --async-save"
    averaged = launch(pool, layout, f"{flags} --eval-ema")
    plain = launch(pool, layout, f"{model} {EVALUATION}")
    losses = get_validation_losses(averaged)
    plain_losses = get_validation_losses(plain)

    assert set(losses) == {2, 4}
    for step, loss in losses.items():
        assert loss != plain_losses[step]
    # Training is not affected.
    assert get_losses(averaged) == get_losses(plain)
    assert_same(whole(averaged), whole(plain))

    # Exports into both formats contain only the rounded average.
    for saver in ("torch_dist", "hf"):
        done = run_convert(
            "--load-dir", run, "--save-dir", tmp_path / saver, "--saver", saver, "--weights", "ema",
            "--verify-target",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        exported = read_all(open_checkpoint(tmp_path / saver))
        source = open_checkpoint(run)
        for key, value in exported.items():
            expected = read_whole(source, f"ema.{key}").bfloat16()
            assert torch.equal(value, expected), key

    # The exported weights have the loss that --eval-ema measures.
    flags = f"{model} {EVALUATION} --skip-train --no-load-optim"
    measured = launch(pool, SINGLE, f"{flags} --load {run} --eval-ema")
    expected = launch(pool, SINGLE, f"{flags} --load {tmp_path / 'torch_dist'}")

    assert get_validation_losses(measured) == get_validation_losses(expected)
    assert set(get_validation_losses(measured)) == {4}


def test_export_in_fp32_is_exact(pool, tmp_path):
    launch(pool, LAYOUTS["tp2_pp2"], f"{LLAMA} --bf16 --save {tmp_path / 'run'}")
    done = run_convert(
        "--load-dir", tmp_path / "run", "--save-dir", tmp_path / "hf", "--saver", "hf",
        "--weights", "ema", "--dtype", "fp32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    norm = load_file(tmp_path / "hf/model.safetensors")["model.norm.weight"]
    source = open_checkpoint(tmp_path / "run")
    assert torch.equal(norm, read_whole(source, "ema.decoder.final_layernorm.weight"))


def test_formats_without_a_place_for_the_average_report_it(pool, tmp_path):
    launch(pool, SINGLE, f"{LLAMA} --save {tmp_path / 'run'}")

    for saver in ("hf", "legacy", "universal"):
        paths = ("--load-dir", tmp_path / "run", "--save-dir", tmp_path / saver)
        done = run_convert(*paths, "--saver", saver)
        assert done.returncode == 0, done.stderr
        assert "not carried: average of the weights (ema.*): give --weights ema" in done.stdout

    done = run_convert(
        "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "x", "--saver", "hf",
        "--weights", "ema",
    )  # fmt: skip
    assert done.returncode == 1
    assert "--weights ema: " in done.stderr
    assert "has no average of" in done.stderr


def test_torch_dist_keeps_the_average(pool, tmp_path):
    """The average survives stacking layers and back, and the selection of layers."""
    launch(pool, SINGLE, f"{LLAMA} --num-layers 4 --save {tmp_path / 'run'}")
    convert = ("--saver", "torch_dist", "--verify-target")
    steps = {"stacked": ("run", "--stacked-layers"), "plain": ("stacked",)}
    for name, (source, *flags) in steps.items():
        paths = ("--load-dir", tmp_path / source, "--save-dir", tmp_path / name)
        done = run_convert(*paths, *convert, *flags)
        assert done.returncode == 0, done.stderr

    original = read_all(open_checkpoint(tmp_path / "run"))
    assert any(key.startswith("ema.") for key in original)
    assert_same(read_all(open_checkpoint(tmp_path / "plain")), original)

    paths = ("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "edited")
    done = run_convert(*paths, "--saver", "torch_dist", "--layers", "1,3")
    assert done.returncode == 0, done.stderr

    edited = read_all(open_checkpoint(tmp_path / "edited"))
    for key in (
        "ema.decoder.layers.{}.mlp.linear_fc1.weight",
        "ema.decoder.layers.{}.mlp.linear_fc2.weight",
    ):
        assert torch.equal(edited[key.format(0)], original[key.format(1)])
        assert torch.equal(edited[key.format(1)], original[key.format(3)])


def test_average_starts_from_loaded_weights(pool, tmp_path):
    """It does so from a checkpoint without an average, and for a new run."""
    without_average = tmp_path / "without"
    run = f"--mock-data --train-iters 4 --global-batch-size 4 --num-layers 2 {LLAMA}"
    pool.run(train, 1, f"{run} --save {without_average} --exit-interval 2")
    loaded = whole(launch(pool, SINGLE, f"{LLAMA} --load {without_average} --skip-train"))
    averages = select_averages(loaded)

    assert averages
    for key, average in averages.items():
        assert torch.equal(average, loaded[main_key(key)])

    # Fine-tuning starts another average.
    with_average = tmp_path / "with"
    saved = whole(launch(pool, SINGLE, f"{LLAMA} --save {with_average} --exit-interval 2"))
    saved_averages = select_averages(saved)
    load = f"{LLAMA} --load {with_average} --skip-train"
    tuned = whole(launch(pool, SINGLE, f"{load} --finetune"))
    averages = select_averages(tuned)

    assert averages
    for key, average in averages.items():
        assert torch.equal(average, tuned[main_key(key)])
        assert not torch.equal(average, saved_averages[key])

    # Without optimizer state the average continues; without the flag it is not used.
    continued = whole(launch(pool, SINGLE, f"{load} --no-load-optim"))
    assert_same(select_averages(continued), saved_averages)

    unused = whole(pool.run(train, 1, f"{run} --load {with_average} --skip-train"))
    assert select_averages(unused) == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mock-data --train-iters 4 --eval-ema", "--eval-ema requires --ema-decay"),
        (f"{RUN} --save x --ckpt-format torch", "legacy files cannot store the average"),
        ("--mock-data --train-iters 4 --ema-decay 1", "--ema-decay"),
    ],
)
def test_impossible_flags_are_rejected(pool, flags, message):
    with pytest.raises((ValueError, SystemExit), match=message):
        pool.run(train, 1, f"{LLAMA} {flags}")
