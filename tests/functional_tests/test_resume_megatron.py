"""Runs of Megatron-LM continue from its own files, at its layout and at others, with its losses."""

import shlex

import pytest

from megatron.conversion.checkpoint_conversion import compare
from megatron.conversion.opening import open_checkpoint
from megatron.training.checkpoint.resume import check_same_model, list_training_differences
from megatron.training.config.parsing import parse_args
from megatron.training.config.stored_args import normalize_stored_args
from megatron.training.training import pretrain
from tests import ROOT
from tests.support.training_harness import (
    Measurements,
    datasets_provider,
    forward_step,
    model_provider,
)

GOLDEN = ROOT / "tests/golden" / "megatron_lm"
NOT_OURS = (
    "--ckpt-convert-format",
    "--ckpt-convert-save",
    "--save",
    "--load",
    "--data-path",
    "--data-cache-path",
)
LAYOUT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--save-interval",
    "--ckpt-format",
)

TP1 = ""
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
TP2PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
CASES = [  # case, format, processes, layout
    ("mcore_0.16.1/llama_fp32_tp2pp2", "torch_dist_fully_reshardable", 4, TP2PP2),
    ("mcore_0.16.1/llama_fp32_tp2pp2", "torch_dist_fully_reshardable", 1, TP1),
    ("mcore_0.16.1/llama_fp32_tp2pp2", "torch_dist_dp_reshardable", 2, TP2),
    ("mcore_0.16.1/llama_fp32_tp2pp2", "torch_dist_dp_reshardable", 2, VPP2),
    ("mcore_0.16.1/llama_fp32_tp2pp2", "legacy", 2, ""),
    ("mcore_0.16.1/gpt2_fp32_tp2pp2", "torch_dist_dp_reshardable", 2, PP2),
    ("mcore_0.16.1/gpt2_fp32_tp2pp2", "legacy", 1, TP1),
    ("mcore_0.16.1/gpt2_fp32_dp2_nodistopt", "torch_dist", 2, TP2),
    ("mcore_0.16.1/gpt2_fp32_dp2_nodistopt", "legacy", 2, ""),
    ("mcore_0.16.1/llama_bf16_dp2_buckets", "torch_dist_dp_reshardable", 2, ""),
    ("mcore_0.16.1/llama_bf16_dp2_buckets", "legacy", 2, PP2),
    ("mcore_0.16.1/llama_bf16_tp2_nodistopt", "torch_dist", 1, TP1),
    ("mcore_0.16.1/llama_bf16_tp2_nodistopt", "legacy", 2, TP2),
    ("mcore_0.12.0/llama_fp32_tp2pp2", "torch_dist_fully_sharded_model_space", 1, TP1),
    ("mcore_0.12.0/llama_fp32_tp2pp2", "legacy", 2, PP2),
    ("mcore_0.19.2/llama_fp32_tp2pp2", "torch_dist_fully_reshardable", 2, PP2),
    ("mcore_0.19.2/gpt2_bf16_tp2_nodistopt", "torch_dist", 2, TP2),
]


def flags_of(case: str) -> list[str]:
    """The case's own command line, without paths and layout."""
    words = shlex.split((GOLDEN / case / "flags.txt").read_text())
    kept = []
    skip = False
    for word in words:
        if word.startswith("--"):
            skip = word in NOT_OURS or word in LAYOUT
        if not skip:
            kept.append(word)
    return kept


LAST = 8  # iteration of ten in the logs; runs resume at iteration 5


def resume(rank, world_size, case, directory, layout, cache):
    flags = [
        *flags_of(case),
        *("--data-path", str(GOLDEN / "data/pysrc_a_text_document")),
        *("--data-cache-path", str(cache), "--load", str(directory), "--num-threads", "1"),
        *("--exit-interval", str(LAST)),
        *shlex.split(layout),
    ]
    measured = Measurements()
    run = pretrain(
        parse_args(flags, world_size),
        model_provider,
        datasets_provider,
        forward_step,
        writers=[measured],
    )
    return (
        run.state.iteration,
        measured.losses,
        measured.grad_norms,
        run.config.tokenizer.null_tokenizer_eod_id,
    )


@pytest.mark.parametrize("case,form,processes,layout", CASES)
def test_losses_continue_megatrons_run(pool, tmp_path, case, form, processes, layout):
    lines = [
        line
        for line in (GOLDEN / case / "loss.txt").read_text().splitlines()
        if line.startswith("iter=")
    ]
    rows = [dict(word.split("=") for word in line.split()) for line in lines]
    expected = {int(row["iter"]): (float(row["lm_loss"]), float(row["grad_norm"])) for row in rows}
    results = pool.run(resume, processes, case, GOLDEN / case / form, layout, tmp_path)
    iteration, losses, grad_norms, eod = results[0]
    assert eod == (256 if "0.19" in case else None)  # 0.19 includes it in --vocab-size
    assert iteration == LAST
    assert len(losses) == LAST - 5
    tolerance = 1e-3 if "bf16" in case else 1e-5
    for step, (loss, grad_norm) in enumerate(zip(losses, grad_norms, strict=True), start=6):
        assert loss == pytest.approx(expected[step][0], abs=tolerance), f"iteration {step}"
        assert grad_norm == pytest.approx(expected[step][1], rel=100 * tolerance), (
            f"iteration {step}"
        )


@pytest.mark.parametrize(
    "case,form", sorted({case[:2] for case in CASES if "torch_dist" in case[1]})
)
def test_megatrons_flags_give_the_same_mathematics(tmp_path, case, form):
    """No warning for arguments that Megatron-LM stores as None and derives, such as rope_type."""
    flags = [*flags_of(case), "--data-path", "data", "--data-cache-path", str(tmp_path)]
    source = open_checkpoint(GOLDEN / case / form)
    config = parse_args([*flags, "--load", str(GOLDEN / case / form)], 1)
    args = normalize_stored_args(source.args)
    assert check_same_model(config.flags(), args, source.description) == []
    assert list_training_differences(config.flags(), args) == []


def convert(rank, world_size, case, form, layout, save, to):
    """Returns where the run stood."""
    flags = [*flags_of(case), "--mock-data", "--num-threads", "1", *shlex.split(layout)]
    flags += [
        "--load",
        str(GOLDEN / case / form),
        "--ckpt-convert-format",
        to,
        "--ckpt-convert-save",
        str(save),
    ]
    return pretrain(
        parse_args(flags, world_size), model_provider, datasets_provider, forward_step
    ).state.iteration


@pytest.mark.parametrize(
    "case,form,to,processes,layout",
    [
        ("mcore_0.16.1/llama_fp32_tp2pp2", "legacy", "torch_dist", 2, TP2),
        ("mcore_0.16.1/llama_fp32_tp2pp2", "torch_dist_dp_reshardable", "torch", 2, VPP2),
        ("mcore_0.16.1/gpt2_fp32_dp2_nodistopt", "torch_dist", "torch", 1, TP1),
        ("mcore_0.16.1/llama_bf16_dp2_buckets", "legacy", "torch", 2, TP2),
    ],
)
def test_training_script_converts(pool, tmp_path, case, form, to, processes, layout):
    """--ckpt-convert-format: every tensor of Megatron-LM's files, optimizer included, bit
    for bit in the other form.
    """
    assert pool.run(convert, processes, case, form, layout, tmp_path, to) == [5] * processes
    result = open_checkpoint(tmp_path / to)
    assert compare(open_checkpoint(GOLDEN / case / form), result) == len(result.tensors) > 100
    assert (result.training.iteration, result.training.consumed_train_samples) == (5, 40)
