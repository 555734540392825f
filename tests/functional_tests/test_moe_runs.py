"""Runs with experts match the losses of Megatron-LM in every layout and checkpoint format."""

import shlex

import pytest
import torch

from megatron.conversion.checkpoint_conversion import compare
from megatron.conversion.opening import open_checkpoint
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from tests import ROOT
from tests.support.compare import read_whole
from tests.support.training_harness import (
    Measurements,
    datasets_provider,
    forward_step,
    model_provider,
)
from tests.support.unpacked import unpacked

GOLDEN = ROOT / "tests/golden"
PATHS = ("--save", "--load", "--data-path", "--data-cache-path", "--save-interval")
LAYOUT = (
    "--use-distributed-optimizer",
    "--moe-token-dispatcher-type",
    "--no-load-optim",
    "--no-load-rng",
    "--finetune",
)
ZERO = "--use-distributed-optimizer"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
LAYOUTS = {  # name -> (processes, flags)
    "single": (1, ZERO),
    "ep2": (2, f"--expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}"),
    "ep2_gathered_not_sharded": (2, "--expert-model-parallel-size 2"),
    "ep4": (4, f"--expert-model-parallel-size 4 {ALLTOALL} {ZERO}"),
    "dp4_ep2": (4, f"--expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}"),
    "tp2": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {ZERO}"),
    "tp2_etp1": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        f"{ZERO}",
    ),
    "tp2_ep2_etp1": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {ALLTOALL} {ZERO}",
    ),
    "tp2_ep2_etp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"{ALLTOALL} {ZERO}",
    ),
    "tp2_ep2_etp2_gathered": (
        4,
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 {ZERO}",
    ),
    "cp2": (2, f"--context-parallel-size 2 {ZERO}"),
    "cp2_ep2": (
        4,
        f"--context-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}",
    ),
    "pp2_ep2": (
        4,
        f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL} {OVERLAP}",
    ),
    "pp2_ep2_recomputed": (
        4,
        f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


LATENT_LAYOUTS = {
    "cp2_a2a": (2, f"--context-parallel-size 2 --cp-comm-type a2a {ZERO}"),
    "cp2_all_gather_tp2": (
        4,
        "--context-parallel-size 2 --cp-comm-type all_gather --tensor-model-parallel-size 2 "
        "--sequence-parallel "
        f"{ZERO} --recompute-granularity selective --recompute-modules mla_up_proj layernorm moe",
    ),
}

# One of each kind in every run of the suite, all of them with --run-slow.
ALWAYS = {"single", "ep2", "tp2_ep2_etp2", "pp2_ep2_recomputed"}


def mark_slow(rows, always):
    """Return test parameters; those that are not in `always` are marked as slow."""
    params = []
    for row in rows:
        values = [row] if isinstance(row, str) else row
        marks = [] if row in always else [pytest.mark.slow]
        params.append(pytest.param(*values, marks=marks))
    return params


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Return the function that unpacks a checkpoint of Megatron-LM by model and name."""
    return lambda model, name: unpacked(tmp_path_factory, f"megatron_moe/{model}/{name}")


def flags_of(model: str) -> list[str]:
    """Return the command line of the golden model without paths and layout."""
    kept = []
    skip = False
    for word in shlex.split((GOLDEN / "megatron_moe" / model / "flags.txt").read_text()):
        if word.startswith("--"):
            skip = word in PATHS or word in LAYOUT
        if not skip:
            kept.append(word)
    data = GOLDEN / "megatron_lm/data/pysrc_a_text_document"
    return [*kept, "--data-path", str(data), "--num-threads", "1"]


# The iterations after which runs end, of ten in the logs: three after a resume at iteration 5.
NEW_RUN = 5
RESUMED_RUN = 8


def train(rank, world_size, model, flags):
    measured = Measurements()
    words = [
        word
        for word in flags_of(model)
        if flags.find(GPT_OSS) < 0 or word not in OTHER_THAN_GPT_OSS
    ]
    words += ["--exit-interval", str(RESUMED_RUN)]
    args = parse_args([*words, *shlex.split(flags)], world_size)
    run = pretrain(args, model_provider, datasets_provider, forward_step, writers=[measured])
    return run.state.iteration, measured.losses, measured.grad_norms, measured.experts


def golden(model):
    """Return the values in Megatron-LM's log by iteration."""
    rows = {}
    for line in (GOLDEN / "megatron_moe" / model / "loss.txt").read_text().splitlines():
        if line.startswith("iter="):
            row = {
                name: value.strip("[]")
                for name, value in (word.split("=") for word in line.split())
            }
            rows.setdefault(int(row["iter"]), row)
    return rows


def check(model, results, first=1, tolerance=1e-5):
    rows = golden(model)
    iteration, losses, grad_norms, experts = results[0]
    last = NEW_RUN if first == 1 else RESUMED_RUN
    assert iteration == last
    assert len(losses) == last + 1 - first
    for step, (loss, grad_norm, of_layers) in enumerate(
        zip(losses, grad_norms, experts, strict=True), start=first
    ):
        assert loss == pytest.approx(float(rows[step]["lm_loss"]), abs=tolerance), (
            f"iteration {step}"
        )
        assert grad_norm == pytest.approx(float(rows[step]["grad_norm"]), rel=100 * tolerance), (
            f"iteration {step}"
        )
        for name in of_layers.keys() - {"load"}:
            # Megatron-LM's log has a 0 for a dense layer.
            expected = [float(value) for value in rows[step][name].split(",") if float(value)]
            assert of_layers[name] == pytest.approx(expected, rel=100 * tolerance), (
                f"iteration {step}: {name}"
            )


MIXTRAL = "mixtral_fp32"
DEEPSEEK = "deepseek_fp32"


@pytest.mark.parametrize("layout", mark_slow(LAYOUTS, ALWAYS))
def test_losses_match_megatron_at_every_layout(pool, tmp_path, archives, layout):
    """Losses, gradient norms and the auxiliary losses of every layer."""
    from_the_start(pool, tmp_path, archives, MIXTRAL, layout)


@pytest.mark.parametrize(
    "layout", mark_slow([*LAYOUTS, *LATENT_LAYOUTS], {"tp2_ep2_etp1", "cp2_a2a"})
)
def test_latent_attention_losses_match_megatron(pool, tmp_path, archives, layout):
    """The model also has groups of experts, an expert bias, a shared expert and a dense layer."""
    from_the_start(pool, tmp_path, archives, DEEPSEEK, layout)


def from_the_start(pool, tmp_path, archives, model, layout):
    processes, flags = (LAYOUTS | LATENT_LAYOUTS)[layout]
    start = f"--load {archives(model, 'initial')} --finetune --no-load-optim --no-load-rng"
    start += f" --exit-interval {NEW_RUN}"
    check(model, pool.run(train, processes, model, f"{flags} {start} --data-cache-path {tmp_path}"))


def test_muon_orthogonalizes_whole_expert_matrices(pool, tmp_path):
    """The losses with ETP2 are those of one process, and differ from Adam's."""
    muon = (
        "--optimizer muon --muon-extra-scale-factor 0.2 --train-iters 3 --data-cache-path "
        f"{tmp_path}"
    )
    (expected,), split = (
        pool.run(train, n, MIXTRAL, f"{f} {muon}") for n, f in ((1, ZERO), LAYOUTS["tp2"])
    )
    adam = pool.run(train, 1, MIXTRAL, f"{ZERO} --train-iters 3 --data-cache-path {tmp_path}")[0]
    assert split[0][1] == pytest.approx(expected[1], abs=2e-5)
    assert adam[1][-1] != pytest.approx(expected[1][-1], abs=1e-3)


@pytest.mark.parametrize("layout", mark_slow(["single", "ep2"], {"ep2"}))
def test_bf16_losses_match_megatron(pool, tmp_path, archives, layout):
    """The model also has a gated shared expert and the z-loss."""
    model = "qwen2moe_bf16"
    tolerance = 2e-3
    processes, flags = LAYOUTS[layout]
    start = f"--load {archives(model, 'initial')} --finetune --no-load-optim --no-load-rng"
    start += f" --exit-interval {NEW_RUN}"
    check(
        model,
        pool.run(train, processes, model, f"{flags} {start} --data-cache-path {tmp_path}"),
        1,
        tolerance,
    )


# Stored tensors: weights, their main copies and two moments of each; the expert bias has no
# optimizer.
PARAMETERS = {MIXTRAL: 4 * 17, DEEPSEEK: 4 * 56 + 3}

CHAIN = [
    (MIXTRAL, "ep2", "tp2_ep2_etp1"),
    (DEEPSEEK, "tp2_ep2_etp2", "cp2_ep2"),
    (MIXTRAL, "tp2_ep2_etp2", "single"),
    (MIXTRAL, "single", "pp2_ep2"),
    (MIXTRAL, "pp2_ep2", "cp2_ep2"),
    (MIXTRAL, "cp2_ep2", "ep4"),
    (DEEPSEEK, "single", "tp2_etp1"),
    (DEEPSEEK, "pp2_ep2", "tp2_ep2_etp1"),
]


@pytest.mark.parametrize(
    "model,saved,loaded", mark_slow(CHAIN, [CHAIN[0], (DEEPSEEK, "single", "tp2_etp1")])
)
def test_runs_with_experts_resume_at_another_layout(pool, tmp_path, archives, model, saved, loaded):
    """Weights and optimizer state are bitwise equal, and the losses continue."""
    start = f"--load {archives(model, 'initial')} --finetune --no-load-optim --no-load-rng"
    cache = f"--data-cache-path {tmp_path / 'cache'}"
    processes, flags = LAYOUTS[saved]
    save = f"--save {tmp_path / 'saved'} --save-interval 5 --exit-interval 5"
    pool.run(train, processes, model, f"{flags} {start} {cache} {save}")
    processes, flags = LAYOUTS[loaded]
    convert = f"--ckpt-convert-format torch_dist --ckpt-convert-save {tmp_path}"
    load = f"{flags} --load {tmp_path / 'saved'} {cache}"
    pool.run(train, processes, model, f"{load} {convert}")
    copy = open_checkpoint(tmp_path / "torch_dist")
    assert (
        compare(open_checkpoint(tmp_path / "saved"), copy) == len(copy.tensors) == PARAMETERS[model]
    )
    check(model, pool.run(train, processes, model, load), first=6)


@pytest.mark.parametrize("layout", mark_slow(["ep2", "tp2_ep2_etp2"], {"ep2"}))
def test_legacy_files_of_a_run_with_experts(pool, tmp_path, archives, layout):
    """The files `mp_rank_TT_EEE` have one optimizer for dense layers and one for experts."""
    start = f"--load {archives(MIXTRAL, 'initial')} --finetune --no-load-optim --no-load-rng"
    cache, (processes, flags) = f"--data-cache-path {tmp_path / 'cache'}", LAYOUTS[layout]
    save = f"--save {tmp_path / 'saved'} --save-interval 5 --exit-interval 5 --ckpt-format torch"
    pool.run(train, processes, MIXTRAL, f"{flags} {start} {cache} {save}")
    names = {path.name for path in (tmp_path / "saved/iter_0000005").glob("mp_rank_*")}
    assert len(names) == processes
    assert "mp_rank_00_001" in names
    check(
        MIXTRAL,
        pool.run(train, processes, MIXTRAL, f"{flags} --load {tmp_path / 'saved'} {cache}"),
        first=6,
    )


FORMS = [
    (DEEPSEEK, "tp2ep2etp1_dp_reshardable", "single"),
    (MIXTRAL, "ep2_nodistopt_legacy", "tp2_ep2_etp2"),
    (DEEPSEEK, "pp2ep2_legacy", "ep2"),
    (MIXTRAL, "ep2_dp_reshardable", "single"),
    (MIXTRAL, "single_fully_reshardable", "ep2"),
    (MIXTRAL, "tp2ep2etp2_legacy", "pp2_ep2"),
    (DEEPSEEK, "ep2_dp_reshardable", "tp2_ep2_etp2"),
    (DEEPSEEK, "single_fully_reshardable", "cp2_ep2"),
]
# The layout of the files: the random states of its ranks have the keys of this rank.
OWN_LAYOUT = [
    (MIXTRAL, "ep2_dp_reshardable", "ep2"),
    (DEEPSEEK, "tp2ep2etp1_dp_reshardable", "tp2_ep2_etp1"),
    (MIXTRAL, "ep2_te_norm_keys", "ep2"),
    (MIXTRAL, "ep2_nodistopt_legacy", "ep2_gathered_not_sharded"),
    (MIXTRAL, "single_fully_reshardable", "single"),
    (MIXTRAL, "single_legacy", "single"),
    (MIXTRAL, "tp2ep2etp2_dp_reshardable", "tp2_ep2_etp2"),
    (MIXTRAL, "tp2ep2etp2_legacy", "tp2_ep2_etp2"),
    (DEEPSEEK, "ep2_dp_reshardable", "ep2"),
    (DEEPSEEK, "pp2ep2_legacy", "pp2_ep2"),
    (DEEPSEEK, "single_fully_reshardable", "single"),
]


@pytest.mark.parametrize("model,form,layout", mark_slow(OWN_LAYOUT, OWN_LAYOUT[:2]))
def test_megatrons_runs_resume_at_their_own_layout(pool, tmp_path, archives, model, form, layout):
    processes, flags = LAYOUTS[layout]
    load = f"--load {archives(model, form)} --data-cache-path {tmp_path}"
    check(model, pool.run(train, processes, model, f"{flags} {load}"), first=6)


@pytest.mark.parametrize("model,form,layout", mark_slow(FORMS, FORMS[:3]))
def test_megatrons_checkpoints_resume_at_other_layouts(
    pool, tmp_path, archives, model, form, layout
):
    """Checkpoints with optimizer resume at EP 2 instead of 1 and the reverse, which Megatron-LM
    does not support.
    """
    processes, flags = LAYOUTS[layout]
    load = f"--load {archives(model, form)} --data-cache-path {tmp_path}"
    check(model, pool.run(train, processes, model, f"{flags} {load}"), first=6)


# Options that the golden models do not have: a dense layer, groups, the bias of the router, losses
# by sequence, loss by token.
OTHER = (
    "--moe-layer-freq [0]+[1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 1e-2 2e-2 "
    "--moe-z-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate --calculate-per-token-loss "
    "--no-load-rng"
)

# Sinks, biases of experts and router, clamped gates, a window in every second layer.
GPT_OSS = (
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 0.5 --softmax-type "
    "learnable "
    "--window-size 9,0 --window-attn-skip-freq 2 --init-method-std 0.2 --no-load-rng"
)
OTHER_THAN_GPT_OSS = ("--swiglu", "--disable-bias-linear")
CURVES = [(OTHER, "cp2_ep2"), (GPT_OSS, "tp2_ep2_etp2")]
CURVES += [(OTHER, layout) for layout in ("ep2", "tp2_ep2_etp1", "pp2_ep2")]
CURVES += [
    (GPT_OSS, layout)
    for layout in ("tp2", "tp2_ep2_etp1", "tp2_ep2_etp2_gathered", "cp2_ep2", "pp2_ep2")
]
CURVES += [(GPT_OSS, "pp2_ep2_recomputed")]


@pytest.mark.parametrize("options,layout", mark_slow(CURVES, CURVES[:2]))
def test_layout_equivalence_with_every_option(pool, tmp_path, options, layout):
    """A single process saves after five iterations; the layout runs from there and from the start."""
    cache = f"--data-cache-path {tmp_path / 'cache'}"
    save = f"--save {tmp_path / 'saved'} --save-interval 5"
    _, losses, norms, experts = pool.run(
        train, 1, "mixtral_fp32", f"{options} {ZERO} {cache} {save}"
    )[0]
    processes, flags = LAYOUTS[layout]
    flags = f"{flags} {options} {cache}"
    whole = pool.run(train, processes, "mixtral_fp32", flags)[0]
    rest = pool.run(
        train, processes, "mixtral_fp32", f"{flags} --load {tmp_path / 'saved'} --ckpt-step 5"
    )[0]
    assert len(rest[1]) == RESUMED_RUN - 5
    for ours, first in ((whole, 0), (rest, 5)):
        assert ours[1] == pytest.approx(losses[first:], abs=5e-6)
        assert ours[2] == pytest.approx(norms[first:], rel=1e-4)
        for mine, theirs in zip(ours[3], experts[first:], strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:  # the load of the busiest expert among them, over all ranks
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
    saved = open_checkpoint(tmp_path / "saved")
    if options == GPT_OSS:
        for name in (
            "self_attention.core_attention.softmax_offset",
            "mlp.router.bias",
            *(f"mlp.experts.experts.linear_fc{number}.bias" for number in (1, 2)),
        ):
            moment = read_whole(saved, f"optimizer.state.exp_avg.decoder.layers.1.{name}")
            assert moment.count_nonzero() > 0, name
        return
    bias = read_whole(saved, "decoder.layers.1.mlp.router.expert_bias")
    assert bias.abs().max() > 0
    assert torch.allclose(bias / 1e-3, (bias / 1e-3).round(), atol=1e-3)
