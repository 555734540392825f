"""Runs with a stand-in for Transformer Engine (tests/te_stand_in) equal runs with local layers."""

import functools
import importlib
import shlex
import sys
import unittest.mock

import pytest
import torch
import torch.distributed as dist

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import read_metadata
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.parsing import parse_args
from megatron.training.operations.straggler import StragglerDetector
from pretrain_gpt import forward_step
from tests import ROOT
from tests.support import lora_runs
from tests.support.idle_experts import IDLE_EXPERTS, step_with_idle_experts
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, get_losses, train, whole

STAND_IN = str(ROOT / "tests/te_stand_in")
TE = "--transformer-impl transformer_engine "
DATA = "--mock-data --train-iters 4 --global-batch-size 4 "  # two micro-batches
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 "
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--q-lora-rank 24 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
)
WAYS = {  # processes, model, flags
    "one": (1, "llama", ""),
    "tp2_sp": (2, "llama", LAYOUTS["tp2_sp"][1]),
    "gpt2_tp2_sp": (2, "gpt2", LAYOUTS["tp2_sp"][1]),
    "tp2": (2, "gpt2", LAYOUTS["tp2"][1]),
    "pp2_interleaved": (2, "llama", LAYOUTS["pp2_interleaved"][1]),
    "dp2": (2, "llama", LAYOUTS["dp2_distributed_optimizer"][1] + "--global-batch-size 8"),
    "recompute": (1, "llama", FULL),
    "recompute_selective": (1, "llama", SELECTIVE),
    "documents": (1, "llama", "--reset-attention-mask --eod-mask-loss"),
    "window_qk_norm_1p": (1, "llama", "--window-size 5,0 --qk-layernorm --apply-layernorm-1p"),
    "latent_tp2_sp": (2, "gpt2", LATENT + LAYOUTS["tp2_sp"][1]),
    "cp2": (2, "llama", LAYOUTS["cp2"][1]),
    "cp2_gathered_window": (2, "llama", f"{LAYOUTS['cp2'][1]} --cp-comm-type all_gather "
                                        "--window-size 5,0"),
    "cp2_one_for_each_layer": (2, "llama", f"{LAYOUTS['cp2'][1]} --cp-comm-type a2a p2p all_gather "
                                           "a2a"),
    "cp2_a2a_documents": (2, "llama", f"{LAYOUTS['cp2'][1]} --cp-comm-type a2a "
                                      "--reset-attention-mask"),
    "prediction_tp2_sp": (2, "llama", "--mtp-num-layers 1 " + LAYOUTS["tp2_sp"][1]),
    "experts": (1, "llama", EXPERTS),
    "experts_tp2_ep2": (2, "llama", f"{EXPERTS} {LAYOUTS['tp2_sp'][1]} "
                                    "--expert-model-parallel-size 2 "
                        "--expert-tensor-parallel-size 1"),
}  # fmt: skip


def train_with_stand_in(rank, world_size, flags, step=forward_step, common=COMMON):
    """Train; return the outcome, the arguments of all calls of modules, and the fp8 state."""
    if STAND_IN not in sys.path:
        sys.path.insert(0, STAND_IN)
    te = importlib.import_module("transformer_engine.pytorch")
    te.forget()
    outcome = train(rank, world_size, flags, common, step)
    return outcome, [told for _, told in te.CALLS], get_fp8_state(te)


def get_fp8_state(te):
    """Return scales and histories of the first module that computed in fp8 with a state."""
    states = []
    for module, told in te.CALLS:
        if told["fp8"] and "scaling_fwd" in module.fp8_meta:
            states.append(module.fp8_meta["scaling_fwd"])
    return (states[0].scale.tolist(), states[0].amax_history.tolist()) if states else None


@functools.cache
def local(pool, world_size, flags):
    return pool.run(train, world_size, flags)


ALWAYS = {
    "gpt2_tp2_sp",
    "pp2_interleaved",
    "recompute_selective",
    "documents",
    "cp2",
    "experts_tp2_ep2",
}


@pytest.mark.parametrize(
    "way",
    [way if way in ALWAYS else pytest.param(way, marks=pytest.mark.slow) for way in WAYS],
)
def test_losses_match_the_local_backend(pool, way):
    world_size, model, flags = WAYS[way]
    flags = f"{DATA} {MODELS[model]} {flags} "
    expected = local(pool, world_size, flags)
    outcomes, told, _ = zip(*pool.run(train_with_stand_in, world_size, flags + TE), strict=True)

    assert told[0]
    assert all(call["fused"] for call in told[0])

    steps = [call["first"] for call in told[0]]
    assert steps.count(True) * 2 <= len(steps)  # some later micro-batches in every step

    for mine, theirs in zip(outcomes, expected, strict=True):
        for name in ("losses", "grad_norms"):
            ours = getattr(mine.measured, name)
            assert ours == pytest.approx(getattr(theirs.measured, name), rel=2e-5), name

    tensors = whole(expected)
    assert whole(list(outcomes)).keys() == tensors.keys()
    for key, ours in whole(list(outcomes)).items():
        torch.testing.assert_close(ours, tensors[key], rtol=2e-2, atol=2e-5, msg=key)


@pytest.mark.parametrize("layout", ["tp2_sp", pytest.param("tp2", marks=pytest.mark.slow)])
def test_adapters_train_the_same_as_on_local_layers(pool, layout):
    flags = f"{lora_runs.FLAGS} --pretrained-checkpoint {lora_runs.MODEL} {LAYOUTS[layout][1]} "
    expected = pool.run(train, 2, flags, "")
    outcomes, told, _ = zip(
        *pool.run(train_with_stand_in, 2, flags + TE, forward_step, ""),
        strict=True,
    )

    assert told[0]
    assert get_losses(list(outcomes)) == pytest.approx(get_losses(expected), rel=2e-5)

    tensors = whole(expected)
    for key, ours in whole(list(outcomes)).items():
        torch.testing.assert_close(ours, tensors[key], rtol=2e-2, atol=2e-5, msg=key)


@pytest.mark.parametrize("dora", ["", "--lora-dora"])
def test_encoded_bases_train_the_same_as_on_local_layers(pool, tmp_path, dora):
    """Transformer Engine computes attention and the final norm; encoded layers are local ones."""
    lora_runs.write_wide_model(tmp_path / "base")
    flags = (
        f"{lora_runs.WIDE_SHAPE} {lora_runs.TRAINING} {lora_runs.LORA} {dora} --adam-eps 1e-4 "
        f"--pretrained-checkpoint {tmp_path / 'base'} --lora-base-encoding nf4 "
        f"{LAYOUTS['tp2_sp'][1]} "
    )
    expected = pool.run(train, 2, flags, "")
    outcomes, _, _ = zip(
        *pool.run(train_with_stand_in, 2, flags + TE, forward_step, ""), strict=True
    )
    assert get_losses(list(outcomes)) == pytest.approx(get_losses(expected), rel=2e-5)
    tensors = whole(expected)
    for key, tensor in whole(list(outcomes)).items():
        torch.testing.assert_close(tensor, tensors[key], rtol=2e-2, atol=2e-5, msg=key)


def test_run_changes_its_backend_by_load_alone(pool, tmp_path):
    """Switch from local layers to Transformer Engine in another layout and back.

    The losses are those of a single run. A legacy checkpoint has the names of the modules of
    Transformer Engine.
    """
    model = f"{DATA} {MODELS['llama']} --train-iters 6 "
    steps = []
    expected = local(pool, 1, model)[0].measured.losses
    for exit_at, layout, impl in (
        (2, "tp2_sp", f"{TE} --ckpt-format torch"),
        (4, "dp2_distributed_optimizer", ""),
        (6, "tp2_sp", TE),
    ):
        flags = (
            f"{model} {impl} {LAYOUTS[layout][1]} --save {tmp_path} --load {tmp_path} "
            f"--exit-interval {exit_at}"
        )
        outcome = pool.run(train_with_stand_in if impl else train, 2, flags)[0]
        steps += (outcome[0] if impl else outcome).measured.losses

    assert steps == pytest.approx(expected, rel=2e-5)

    common = torch.load(
        tmp_path / "iter_0000002/mp_rank_00/model_optim_rng.pt",
        weights_only=False,
    )["model"]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in common


FP8 = (
    f"{TE} --bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max "
    "--fp8-margin 1 "
)


def train_with_idle_experts(rank, world_size, flags):
    return train(rank, world_size, flags, forward_step=step_with_idle_experts)


@pytest.mark.parametrize("engine", [TE, pytest.param(FP8, marks=pytest.mark.slow)])
def test_a_rank_without_tokens(pool, engine):
    """The stand-in refuses grouped products without any rows."""
    flags = (
        f"{DATA}{MODELS['llama']}{EXPERTS}{IDLE_EXPERTS}--expert-model-parallel-size 2 "
        "--moe-ffn-hidden-size 32 --use-distributed-optimizer "
    )
    outcome, calls, _ = pool.run(train_with_stand_in, 2, flags + engine, step_with_idle_experts)[1]
    assert any(call["fp8"] for call in calls) == (engine == FP8)

    local_flags = flags + ("--bf16" if engine == FP8 else "")
    expected = pool.run(train_with_idle_experts, 2, local_flags)[1]
    tolerance = 2e-2 if engine == FP8 else 2e-5
    for name in ("losses", "grad_norms"):
        ours = getattr(outcome.measured, name)
        assert ours == pytest.approx(getattr(expected.measured, name), rel=tolerance), name


@pytest.mark.parametrize(
    ("layout", "prediction"),
    [
        ("tp2_sp", "--mtp-num-layers 1"),
        pytest.param("tp2_sp", "", marks=pytest.mark.slow),
        pytest.param("pp2", "", marks=pytest.mark.slow),
    ],
)
def test_fp8_scales_are_restored_and_optional(pool, tmp_path, layout, prediction):
    """Losses are bitwise equal after a resume in the same layout; other recipes load
    weights only.
    """
    model = f"{DATA} {MODELS['llama']} {LAYOUTS[layout][1]} {prediction} "
    model += "--ffn-hidden-size 64 "
    flags = f"{model} {FP8} --first-last-layers-bf16 --save {tmp_path} --save-interval 2 "
    straight, told, scales = zip(*pool.run(train_with_stand_in, 2, flags), strict=True)

    assert scales[0] is not None
    assert scales[0][0][0] > 1.0
    assert len(scales[0][1]) == 4

    in_fp8 = [call["fp8"] for call in told[0]]
    assert 0 < sum(in_fp8) < len(in_fp8)  # except for the first and the last layer

    steps = [call["first"] for call in told[0] if call["fp8"]]
    assert steps.count(True) * 2 == len(steps)  # weights are quantized in one micro-batch of two

    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    objects = read_metadata(tmp_path / "iter_0000002").objects
    assert "decoder.layers.1.mlp.linear_fc1._extra_state/shard_0_1" in objects

    if prediction:
        # Layers for multi-token prediction are in fp8, although they come last.
        assert "mtp.layers.0.eh_proj._extra_state/shard_0_1" in objects
        assert any(
            name.startswith("mtp.layers.0.transformer_layer.mlp.linear_fc1._e") for name in objects
        )

    convert(tmp_path, tmp_path / "converted", "legacy")  # works without Transformer Engine

    def resumed(more):
        tracker.write_text("2")
        return pool.run(train_with_stand_in, 2, f"{model} {more} --load {tmp_path}")

    again, _, same_scales = zip(*resumed(f"{FP8} --first-last-layers-bf16"), strict=True)
    last = get_losses(straight)[2:]
    assert get_losses(again) == last
    assert same_scales == scales

    for other in ("--bf16", f"{FP8} --fp8-amax-history-len 2"):
        assert get_losses([outcome for outcome, *_ in resumed(other)]) == pytest.approx(
            last,
            abs=0.02,
        ), other


@pytest.mark.parametrize(
    "layout",
    ["tp2_sp", pytest.param("pp2_interleaved", marks=pytest.mark.slow)],
)
def test_first_fp8_scales_are_those_of_the_first_batch(pool, layout):
    """With scale 1, gradients of the first iteration are below the smallest numbers of e5m2."""
    world_size, more = LAYOUTS[layout]
    flags = f"--mock-data --train-iters 1 --lr-warmup-iters 0 {MODELS['llama']} {more} "
    flags += "--ffn-hidden-size 64 --bf16 --init-method-std 0.005 --hidden-dropout 0.1 "
    gradients = []
    for engine in (TE, f"{FP8} --fp8-amax-history-len 8"):
        outcomes = pool.run(train_with_stand_in, world_size, f"{flags} {engine}")
        gradients.append(whole([outcome for outcome, *_ in outcomes]))
    for layer in ("0.self_attention.linear_qkv", "3.mlp.linear_fc2"):
        key = f"optimizer.state.exp_avg.decoder.layers.{layer}.weight"
        expected, gradient = (tensors[key] for tensors in gradients)
        assert (gradient - expected).norm() < 0.15 * expected.norm(), key


def count_measured_iterations(rank, world_size, flags):
    """Train, and return how many iterations the detector of slow ranks measured from their start."""
    original = StragglerDetector.before_iteration
    with unittest.mock.patch.object(
        StragglerDetector,
        "before_iteration",
        autospec=True,
        side_effect=original,
    ) as before_iteration:
        train_with_stand_in(rank, world_size, flags)
    return before_iteration.call_count


def test_all_iterations_are_observed_after_the_first_scales(pool):
    flags = f"--mock-data --train-iters 3 {MODELS['llama']} {FP8} --log-straggler"
    assert pool.run(count_measured_iterations, 1, flags) == [3]


def test_prediction_layers_stay_in_bf16_next_to_fp4(pool, tmp_path):
    """As in Megatron-LM. Block scales have no state, so that losses are bitwise after a resume."""
    model = f"{DATA} {MODELS['llama']} {LAYOUTS['tp2_sp'][1]} "
    model += f"{TE} --bf16 --mtp-num-layers 1 --ffn-hidden-size 64 "
    flags = f"{model} --fp4-format e2m1 --save {tmp_path} --save-interval 2 "
    straight, told, _ = zip(*pool.run(train_with_stand_in, 2, flags), strict=True)
    # Four products of each of the four layers; eh_proj and four products of the prediction layer.
    forward = [call["fp8"] for call in told[0]][:21]
    assert forward == [True] * 16 + [False] * 5

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    flags = f"{model} --fp4-format e2m1 --load {tmp_path} "
    again, _, _ = zip(*pool.run(train_with_stand_in, 2, flags), strict=True)
    assert get_losses(again) == get_losses(straight)[2:]

    in_bf16 = pool.run(train_with_stand_in, 2, model)
    expected = get_losses([outcome for outcome, *_ in in_bf16])
    assert get_losses(straight) != expected
    assert get_losses(straight) == pytest.approx(expected, abs=0.1)


def test_recomputed_attention_does_not_change_fp8_state(pool):
    """Core attention does not use fp8, so recomputing it must not advance the histories."""
    flags = f"{DATA} {MODELS['llama']} {FP8} "
    ((kept, _, scales),) = pool.run(train_with_stand_in, 1, flags)
    ((again, _, same_scales),) = pool.run(
        train_with_stand_in,
        1,
        flags + "--recompute-granularity selective",
    )

    assert again.measured.losses == kept.measured.losses
    assert same_scales == scales


def test_loss_kernel_matches_local(pool):
    """The layout is TP2, where the vocabulary has padding."""
    flags = f"{DATA} {MODELS['llama']} {LAYOUTS['tp2_sp'][1]} --make-vocab-size-divisible-by 64 "
    fused = f"{TE} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
    expected = local(pool, 2, flags)[0].measured
    (mine, _, _), _ = pool.run(train_with_stand_in, 2, flags + fused)
    assert mine.measured.losses == pytest.approx(expected.losses, rel=2e-5)
    assert mine.measured.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5)


def user_buffers(rank, world_size, flags):
    _, told, _ = train_with_stand_in(rank, world_size, flags)
    te = importlib.import_module("transformer_engine.pytorch")
    ((shape, tp_size, modes, *others),) = te.USER_BUFFERS
    return (shape, tp_size, [mode.name for mode in modes], *others), {
        call["overlaps"] for call in told
    }


def list_created_groups(rank, world_size, first_layer):
    """Return the process groups created by a stage whose only layer is in bf16 (0) or fp8 (1)."""
    sys.path.insert(0, STAND_IN)
    config = TransformerConfig(
        4, 32, 4, bf16=True, transformer_impl="transformer_engine", fp8="hybrid", fp8_param_gather=True,
        first_last_layers_bf16=True,
    )  # fmt: skip
    placement = Placement(Axis(), TensorParallelRng(0, 0))
    with unittest.mock.patch.object(dist, "new_group") as new_group:
        TransformerBlock(
            config,
            placement,
            layers=range(first_layer, first_layer + 1),
            post_process=False,
        )
    return [call.args[0] for call in new_group.call_args_list]


def test_single_rank_groups_are_created_collectively(pool):
    """NCCL splits them off the communicator of the world, in which every rank must participate."""
    assert pool.run(list_created_groups, 1, 0) == pool.run(list_created_groups, 1, 1) == [[[0]]]


def test_user_buffers_are_initialized(pool, tmp_path):
    config = tmp_path / "overlap.yaml"
    config.write_text("qkv_fprop: {method: ring_exchange}")
    flags = (
        f"{MODELS['llama']} {LAYOUTS['tp2_sp'][1]} --mock-data --train-iters 4 {FP8} "
        "--first-last-layers-bf16 --ffn-hidden-size 64 "
    )
    overlap = (
        "--tp-comm-overlap --no-tp-comm-bulk-dgrad --tp-comm-bootstrap-backend gloo "
        "--tp-comm-overlap-cfg "
    )
    (made, told), (other, _) = pool.run(user_buffers, 2, f"{flags} {overlap} {config}")
    assert made == other  # including the order

    shape, tp_size, modes, dtype, ub_cfgs, backend = made
    assert (shape, tp_size, dtype, backend) == ([32, 32], 2, torch.bfloat16, "gloo")
    assert ub_cfgs == {"qkv_fprop": {"method": "ring_exchange"}}
    assert modes == ["NONE", "FP8"]

    # all-gather, reduce-scatter, reduce-scatter of dgrad, bulk dgrad, bulk wgrad
    overlaps = (True, True, False, False, True)
    assert told == {(name, overlaps) for name in ("qkv", "proj", "fc1", "fc2")}


FP8_WEIGHTS = (
    f"{FP8} --fp8-param-gather --log-params-norm {LAYOUTS['dp2_distributed_optimizer'][1]} "
)


def read_tensors(directory, step):
    """Return all tensors of a checkpoint."""
    source = open_checkpoint(directory / f"iter_{step:07d}")
    return {
        key: source.tensors[key].read((0,) * len(info.shape), info.shape)
        for key, info in source.tensors.items()
    }


@pytest.mark.parametrize(
    "more",
    ["", pytest.param(f"{EXPERTS} --ffn-hidden-size 48", marks=pytest.mark.slow)],
)
def test_fp8_weights_are_saved_from_main_parameters(pool, tmp_path, more):
    """A run with --fp8-param-gather resumes bitwise, and can switch to bf16 and back.

    It also loads weights without the optimizer.
    """
    model = f"--mock-data --train-iters 4 {MODELS['llama']} {more} "
    save = f"--save {tmp_path} --save-interval 2 "
    (straight, told, scales), _ = pool.run(train_with_stand_in, 2, f"{model} {FP8_WEIGHTS} {save}")

    assert all(call["fused"] for call in told)
    assert {call.get("primary") for call in told} >= {True}

    ((plain, _, _),) = pool.run(train_with_stand_in, 1, f"{model} {FP8} --log-params-norm")
    assert straight.measured.losses == pytest.approx(plain.measured.losses, abs=0.03)
    assert straight.measured.params_norms == pytest.approx(plain.measured.params_norms, rel=1e-2)

    tensors = read_tensors(tmp_path, 2)
    for key in [key for key in tensors if f"optimizer.state.param.{key}" in tensors]:
        assert torch.equal(tensors[key], tensors[f"optimizer.state.param.{key}"].bfloat16()), key

    def resumed(flags, ranks=2):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
        (outcome, _, found), *_ = pool.run(
            train_with_stand_in,
            ranks,
            f"{model} {flags} --load {tmp_path}",
        )
        return outcome.measured.losses, found

    last = straight.measured.losses[2:]
    assert resumed(FP8_WEIGHTS) == (last, scales)
    for flags in ("--bf16", TE + "--bf16", FP8):
        assert resumed(flags, ranks=1)[0] == pytest.approx(last, abs=0.03), flags

    plain = f"{model} --bf16 --save {tmp_path} --ckpt-step 2 --load {tmp_path} --exit-interval 3 "
    (bf16,) = pool.run(train, 1, plain)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    back = pool.run(train_with_stand_in, 2, f"{model} {FP8_WEIGHTS} --load {tmp_path}")[0][0]
    assert bf16.measured.losses + back.measured.losses == pytest.approx(last, abs=0.03)

    weights = pool.run(
        train_with_stand_in,
        2,
        f"{model} {FP8_WEIGHTS} --load {tmp_path} --finetune",
    )[0][0]
    (expected,) = pool.run(train, 1, f"{model} --bf16 --load {tmp_path} --finetune")
    assert weights.measured.losses == pytest.approx(expected.measured.losses, abs=0.03)

    large = f"{model} {FP8_WEIGHTS} --load {tmp_path} --finetune --init-method-std 0.5"
    # Replaced initial values do not affect the scales.
    other = pool.run(train_with_stand_in, 2, large)[0][0]
    assert other.measured.losses == weights.measured.losses


def test_missing_transformer_engine_is_reported_with_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    monkeypatch.delitem(
        sys.modules,
        "megatron.core.transformer.transformer_engine.building_blocks",
        raising=False,
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        transformer_impl="transformer_engine",
    )

    with pytest.raises(
        ValueError,
        match=r"transformer_engine.*pip install.*\[te\].*--transformer-impl local",
    ):
        select_layer_spec(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--bf16 --fp8-format hybrid --transformer-impl local",
            "--fp8-format hybrid requires --transformer-impl",
        ),
        ("--fp8-format hybrid", "--fp8-format hybrid requires --bf16"),
        ("--bf16 --fp8-format e4m3 --hidden-size 40", "--hidden-size 40 is not a multiple of 16"),
        (
            f"{TE} --bf16 --fp8-format e4m3 --tensor-model-parallel-size 2 --ffn-hidden-size 48",
            "--ffn-hidden-size 48 / --tensor-model-parallel-size 2 = 24 per rank is not a multiple of 16",
        ),
        (
            f"{TE} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --kv-channels 12",
            "4 heads x --kv-channels 12 / --tensor-model-parallel-size 1 = 48 per rank is not a multiple of 32",
        ),
        (
            f"{TE} --bf16 --fp4-format e2m1 --seq-length 8 --micro-batch-size 1",
            "= 8 tokens per rank is not a multiple of 16",
        ),
        (
            "--transformer-impl local --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
            "te requires --transf",
        ),
        (
            f"{TE} --bf16 --fp8-format hybrid --fp8-param-gather",
            "requires --use-distributed-optimizer",
        ),
        (f"{TE} --bf16 --fp8-param-gather", "--fp8-param-gather requires --fp8-format"),
        (f"{TE} --bf16 --fp8-format e4m3 --fp4-format e2m1", "are mutually exclusive"),
        (
            f"{TE} --bf16 --fp4-format e2m1 --disable-bias-linear {EXPERTS}",
            "--fp4-format e2m1 and --num-experts .* are mutually exclusive: .* no grouped ones",
        ),
        (f"{TE} --bf16 --fp8-format e4m3 --no-fp8-wgrad", "no longer has"),
        (
            f"{TE} --context-parallel-size 2 --reset-attention-mask",
            "--reset-attention-mask with --cp-comm-type p2p",
        ),
        (
            f"{TE} --context-parallel-size 2 --cp-comm-type a2a p2p a2a a2a --window-size 4,0",
            "--window-size with --cp-comm-type p2p",
        ),
    ],
)
def test_incompatible_options_are_rejected(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(shlex.split(COMMON + DATA + flags), 2 if "-size 2" in flags else 1)
