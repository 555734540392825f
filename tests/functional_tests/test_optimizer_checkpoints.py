"""Checkpoints of every optimizer: resume at other layouts, `--no-load-optim`, all conversions.

Each combination continues with the losses of an uninterrupted run, or is refused by name. The
default tests cover each optimizer and each format once; `--run-slow` covers all combinations.
"""

import functools
import math
from pathlib import Path

import pytest

from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import load_common
from megatron.core.optimizer import get_update_rule
from megatron.core.run_checkpoint.common_state import find_param_groups
from tests import ROOT
from tests.support.compare import assert_same, read_whole
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LLAMA, get_losses, train, whole
from tests.unit_tests.conversion.convert_tool import run_convert

OPTIMIZERS = {
    "adam": "",
    "sgd": "--optimizer sgd --lr 0.05 --min-lr 0.005",
    "sgd_without_momentum": "--optimizer sgd --sgd-momentum 0 --lr 0.05 --min-lr 0.005",
    "ademamix": "--optimizer ademamix --ademamix-beta3 0.999 --ademamix-alpha 5",
    "muon": "--optimizer muon --muon-extra-scale-factor 0.2",
    "lion": "--optimizer lion --lr 0.001 --min-lr 0.0001",
}
MIXED = ("muon", "lion")  # matrices have other states than the rest
LAYOUTS = {
    "single": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
    "zero": (2, DISTRIBUTED_OPTIMIZER),
    "tp2_zero": (4, f"--tensor-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
}
FORMATS = {
    "torch_dist": (),
    "legacy": (),
    "universal": (),
    "hf": ("--save-optim-sidecar",),
}
DTYPES = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 1024"}
COMMON = f"--mock-data --train-iters 4 --num-layers 2 --global-batch-size 4 {LLAMA}"
REFUSED = "whose state {} files cannot contain, because matrices have other states than the rest"

slow = pytest.mark.slow


def run(pool, optimizer, layout, dtype, more=""):
    world_size, flags = LAYOUTS[layout]
    return pool.run(
        train, world_size, f"{COMMON} {OPTIMIZERS[optimizer]} {flags} {DTYPES[dtype]} {more}"
    )


@pytest.fixture(scope="module")
def saved_runs(pool, tmp_path_factory):
    """Return the function that trains 2 of 4 iterations, once for each combination.

    It returns the directory of the checkpoint and its tensors.
    """

    @functools.cache
    def save(optimizer, layout, dtype):
        directory = tmp_path_factory.mktemp("saved")
        flags = f"--save {directory} --exit-interval 2"
        return directory, whole(run(pool, optimizer, layout, dtype, flags))

    return save


@pytest.fixture(scope="module")
def check_resume(pool):
    """Return the function that compares resumes with uninterrupted runs of one process."""

    @functools.cache
    def train_straight(optimizer, dtype):
        return get_losses(run(pool, optimizer, "single", dtype))

    def check(directory, saved, optimizer, layout, dtype):
        """Load without training: all tensors are equal. Then train: the losses are those of one
        run.
        """
        loaded = run(pool, optimizer, layout, dtype, f"--load {directory} --skip-train")
        assert_same(whole(loaded), saved)
        resumed = run(pool, optimizer, layout, dtype, f"--load {directory}")
        tolerance = 2e-5 if dtype == "fp32" else 2e-3
        straight = train_straight(optimizer, dtype)
        assert get_losses(resumed) == pytest.approx(straight[2:], rel=tolerance)

    return check


DEFAULT_RESUMES = [
    ("adam", "zero", "tp2", "bf16"),
    ("sgd", "tp2", "zero", "fp32"),
    ("sgd_without_momentum", "dp2", "pp2", "fp32"),
    ("ademamix", "zero", "tp2", "fp32"),
    ("muon", "zero", "tp2", "fp32"),
    ("lion", "zero", "tp2", "bf16"),
]
ALL_RESUMES = [
    (optimizer, first, second, dtype)
    for optimizer in OPTIMIZERS
    for first in LAYOUTS
    for second in LAYOUTS
    for dtype in ("fp32", "bf16")
]


def mark_slow(cases, default):
    return [case if case in default else pytest.param(*case, marks=slow) for case in cases]


@pytest.mark.parametrize(
    ("optimizer", "first", "second", "dtype"), mark_slow(ALL_RESUMES, DEFAULT_RESUMES)
)
def test_resume_at_another_layout(saved_runs, check_resume, optimizer, first, second, dtype):
    directory, saved = saved_runs(optimizer, first, dtype)
    check_resume(directory, saved, optimizer, second, dtype)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_load_optim_takes_the_weights(pool, saved_runs, optimizer):
    directory, saved = saved_runs(optimizer, "tp2", "fp32")
    flags = f"--load {directory} --no-load-optim"
    loaded = whole(run(pool, optimizer, "single", "fp32", f"{flags} --skip-train"))
    for key, value in saved.items():
        if not key.startswith("optimizer."):
            assert_same({key: loaded[key]}, {key: value})
    resumed = run(pool, optimizer, "single", "fp32", flags)
    assert len(get_losses(resumed)) == 2
    assert all(map(math.isfinite, get_losses(resumed)))


DEFAULT_CONVERSIONS = [
    ("adam", "legacy", "zero", "bf16"),
    ("sgd", "universal", "dp2", "fp32"),
    ("sgd_without_momentum", "hf", "dp2", "bf16"),
    ("ademamix", "torch_dist", "zero", "bf16"),
    ("ademamix", "legacy", "zero", "bf16"),
    ("ademamix", "legacy", "dp2", "fp32"),
    ("ademamix", "universal", "dp2", "fp32"),
    ("ademamix", "hf", "zero", "fp16"),
    ("muon", "legacy", "zero", "fp32"),
    ("muon", "torch_dist", "dp2", "bf16"),
    ("lion", "hf", "zero", "fp32"),
    ("muon", "universal", "dp2", "fp32"),
]
ALL_CONVERSIONS = [
    (optimizer, saver, layout, dtype)
    for optimizer in OPTIMIZERS
    for saver in FORMATS
    for layout in ("dp2", "zero")
    for dtype in DTYPES
]


@pytest.mark.parametrize(
    ("optimizer", "saver", "layout", "dtype"), mark_slow(ALL_CONVERSIONS, DEFAULT_CONVERSIONS)
)
def test_conversion(tmp_path, saved_runs, check_resume, optimizer, saver, layout, dtype):
    """Convert to a format and back to torch_dist; a run resumes from either."""
    source, saved = saved_runs(optimizer, layout, dtype)
    converted = convert(source, tmp_path / saver, saver)
    if optimizer in MIXED and saver in ("legacy", "universal"):
        assert converted.returncode == 1
        assert REFUSED.format(saver) in converted.stderr
        assert not (tmp_path / saver).exists()
        converted = convert(source, tmp_path / saver, saver, "--no-optim")
        assert converted.returncode == 0, converted.stderr
        return
    assert converted.returncode == 0, converted.stderr
    check_resume(tmp_path / saver, saved, optimizer, "tp2", dtype)

    back = convert(tmp_path / saver, tmp_path / "back", "torch_dist")
    assert back.returncode == 0, back.stderr
    check_resume(tmp_path / "back", saved, optimizer, "pp2", dtype)


def convert(source: Path, target: Path, saver: str, *more: str):
    sidecar = () if "--no-optim" in more else FORMATS[saver]
    arguments = ("--load-dir", source, "--save-dir", target, "--saver", saver, "--verify")
    return run_convert(*arguments, *sidecar, *more)


@pytest.mark.parametrize("layout", ["dp2", "zero"])
@pytest.mark.parametrize("optimizer", ["ademamix", "sgd_without_momentum"])
def test_legacy_files_from_training(pool, tmp_path, check_resume, optimizer, layout):
    flags = f"--save {tmp_path} --exit-interval 2 --ckpt-format torch"
    saved = whole(run(pool, optimizer, layout, "bf16", flags))
    check_resume(tmp_path, saved, optimizer, "tp2", "bf16")


@pytest.mark.parametrize(
    "flags", ["--save {} --ckpt-format torch", "--load {} --ckpt-convert-format torch"]
)
def test_muon_in_legacy_files_is_refused_at_start(pool, tmp_path, flags):
    convert_save = f"--ckpt-convert-save {tmp_path / 'converted'}" if "convert" in flags else ""
    with pytest.raises(Exception, match="torch cannot store the state of --optimizer muon"):
        run(pool, "muon", "single", "fp32", f"{flags.format(tmp_path)} {convert_save}")


def test_save_fails_if_a_load_would_reject_the_state(pool, tmp_path):
    """The first save applies the schema of loads and reports the invalid value."""
    with pytest.raises(Exception, match=r"betas is \(\), but must be a list of 2 to 3"):
        pool.run(train_with_bad_betas, 1, f"{COMMON} --save {tmp_path} --exit-interval 2")
    assert not list(tmp_path.glob("iter_*"))


def train_with_bad_betas(rank, world_size, flags):
    adam = get_update_rule("adam")
    make_rule = adam.from_config

    def make_rule_with_bad_betas(config, groups, model):
        rule = make_rule(config, groups, model)
        rule.update_group = lambda group: None
        for group in rule.param_groups:
            group["betas"] = ()
        return rule

    adam.from_config = make_rule_with_bad_betas
    try:
        return train(rank, world_size, flags)
    finally:
        adam.from_config = make_rule


def test_number_of_betas_is_that_of_the_optimizer(saved_runs):
    directory, _ = saved_runs("ademamix", "zero", "fp32")
    groups = find_param_groups(load_common(directory / "iter_0000002")["optimizer"])
    assert [group["betas"] for group in groups] == [(0.9, 0.999, 0.999)] * 2


@pytest.mark.parametrize("form", ["lion", "muon_layer_wise_buckets"])
def test_continue_a_run_of_megatron_lm(pool, tmp_path, form):
    """Load the state of Megatron-LM's Muon or Lion at TP2, save it, and compare it with the files."""
    golden = ROOT / "tests/golden/megatron_optimizers" / form
    flags = (
        f"--load {golden} --use-checkpoint-args --tensor-model-parallel-size 2 --mock-data "
        f"--optimizer {form.split('_')[0]} --train-iters 4 --lr 0.01 --micro-batch-size 1 "
        "--global-batch-size 2 --seq-length 32 --tokenizer-type NullTokenizer --vocab-size 39 "
        "--no-load-rng"
    )
    if form != "lion":
        flags += " --bf16"
    loaded = whole(pool.run(train, 2, f"{flags} --skip-train"))
    source = open_checkpoint(golden)
    assert {key for key in loaded if key.startswith("optimizer.")} == {
        key for key in source.tensors if key.startswith("optimizer.")
    }
    for key in source.tensors:
        assert_same({key: loaded[key]}, {key: read_whole(source, key)})
    resumed = pool.run(train, 2, flags)
    assert len(get_losses(resumed)) == 2
    assert all(map(math.isfinite, get_losses(resumed)))
