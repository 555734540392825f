"""--ema-decay in training: every layout, resuming, evaluation, and exports of the average."""

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
    compared = 0
    for earlier, later in zip(checkpoints, checkpoints[1:], strict=False):
        for key, average in earlier.items():
            if key.startswith("ema."):
                main = later["optimizer.state.param." + key.removeprefix("ema.")]
                expected = average.lerp(main, 1.0 - DECAY)
                assert torch.equal(later[key], expected), key
                assert not torch.equal(expected, main), key
                compared += 1
    assert compared >= 3 * 10
    held = {key: value for key, value in whole(outcomes).items() if key.startswith("ema.")}
    stored = {key: value for key, value in checkpoints[-1].items() if key.startswith("ema.")}
    assert_same(held, stored)


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
    assert_same(whole(launch(pool, second, f"{model} --load {tmp_path} --skip-train")), saved)
    # The same layout continues bitwise, another one up to the rounding of the losses.
    straight = whole(launch(pool, first, model))
    resumed = whole(launch(pool, first, f"{model} --load {tmp_path}"))
    assert_same(resumed, straight)
    moved = whole(launch(pool, second, f"{model} --load {tmp_path}"))
    assert moved.keys() == straight.keys()
    for key, value in straight.items():
        if key.startswith("ema."):
            torch.testing.assert_close(moved[key], value, rtol=1e-3, atol=1e-4)


def test_average_is_evaluated_and_exported(pool, tmp_path):
    """--eval-ema measures the loss of the exported average, and does not affect training."""
    run = tmp_path / "run"
    model = f"{LLAMA} --bf16"
    layout = LAYOUTS["dp2_distributed_optimizer"]
    flags = f"{model} {EVALUATION} --save {run} --save-interval 2 --async-save"
    averaged = launch(pool, layout, f"{flags} --eval-ema")
    plain = launch(pool, layout, f"{model} {EVALUATION}")
    losses = get_validation_losses(averaged)
    assert set(losses) == {2, 4}
    assert all(loss != get_validation_losses(plain)[step] for step, loss in losses.items())
    # Training is not affected.
    assert get_losses(averaged) == get_losses(plain)
    assert_same(whole(averaged), whole(plain))

    # Exports: into both formats, the rounded average and nothing else.
    for saver in ("torch_dist", "hf"):
        done = run_convert(
            "--load-dir", run, "--save-dir", tmp_path / saver, "--saver", saver, "--weights", "ema",
            "--verify-target",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        exported = open_checkpoint(tmp_path / saver)
        for key, value in read_all(exported).items():
            expected = read_whole(open_checkpoint(run), f"ema.{key}").bfloat16()
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
        done = run_convert(
            "--load-dir", tmp_path / "run", "--save-dir", tmp_path / saver, "--saver", saver
        )
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
    """Also when layers are stacked or selected, and back."""
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
    """From a checkpoint without an average, and for a new run; an unused one is reported."""
    run = f"--mock-data --train-iters 4 --global-batch-size 4 --num-layers 2 {LLAMA}"
    pool.run(train, 1, f"{run} --save {tmp_path / 'without'} --exit-interval 2")
    loaded = whole(launch(pool, SINGLE, f"{LLAMA} --load {tmp_path / 'without'} --skip-train"))
    for key, value in loaded.items():
        if key.startswith("ema."):
            parameter = key.removeprefix("ema.")
            assert torch.equal(value, loaded[f"optimizer.state.param.{parameter}"])

    saved = whole(launch(pool, SINGLE, f"{LLAMA} --save {tmp_path / 'with'} --exit-interval 2"))
    tuned = whole(
        launch(pool, SINGLE, f"{LLAMA} --load {tmp_path / 'with'} --finetune --skip-train")
    )
    for key, value in tuned.items():
        if key.startswith("ema."):
            parameter = key.removeprefix("ema.")
            assert torch.equal(value, tuned[f"optimizer.state.param.{parameter}"])
            assert not torch.equal(value, saved[key])
    # Without optimizer state the average continues; without the flag it is not used.
    kept = whole(
        launch(pool, SINGLE, f"{LLAMA} --load {tmp_path / 'with'} --no-load-optim --skip-train")
    )
    averages = {key: value for key, value in saved.items() if key.startswith("ema.")}
    assert_same({key: kept[key] for key in averages}, averages)
    unused = whole(pool.run(train, 1, f"{run} --load {tmp_path / 'with'} --skip-train"))
    assert not any(key.startswith("ema.") for key in unused)


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
