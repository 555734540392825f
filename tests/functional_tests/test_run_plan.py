"""Plans compared with real runs: peak of live tensors, bytes in collectives, size of a checkpoint."""

import shlex

import pytest

from megatron.planning.run_plan import RunPlan, plan_run
from tests.support.live_tensors import LiveTensors
from tests.support.torch_versions import of_current_torch
from tests.support.training_harness import (
    Measurements,
    datasets_provider,
    forward_step,
    model_provider,
    parse_args,
    pretrain,
)

COMMON = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 "
    "--group-query-attention "
    "--num-query-groups 2 --seq-length 64 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 2 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 --num-workers 0 --num-threads 1 --log-interval 1 "
    "--eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 999 --make-vocab-size-divisible-by 8 "
)
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
UNTIED = LLAMA + "--untie-embeddings-and-output-weights "
FULL = (
    "--num-layers 4 --recompute-granularity full --recompute-method {} --recompute-num-layers {} "
)
CP2 = "--context-parallel-size 2 "
TP2 = "--tensor-model-parallel-size 2 "
# Two micro-batches for each replica, or more than a pipeline has in flight
DP2 = "--global-batch-size 8 "
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 8 "
SHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 100000 "
)

LORA = "--lora-rank 8 --pretrained-checkpoint {base} "

RUNS = {  # name -> (processes, flags)
    "one rank": (1, UNTIED),
    "bf16": (1, UNTIED + "--bf16"),
    "large vocabulary": (1, UNTIED + "--bf16 --vocab-size 4999"),
    "gpt2": (1, ""),
    "sgd": (1, UNTIED + "--optimizer sgd"),
    "window": (1, UNTIED + "--window-size 32,0"),
    "window in every second layer": (1, UNTIED + "--window-size 32,0 --window-attn-skip-freq 2"),
    "documents": (1, UNTIED + "--reset-attention-mask --seq-length 256"),
    "attention dropout": (1, UNTIED + "--attention-dropout 0.1"),
    "attention dropout, bf16": (1, UNTIED + "--attention-dropout 0.1 --seq-length 256 --bf16"),
    "attention dropout, selective": (
        1,
        UNTIED + "--attention-dropout 0.1 --recompute-granularity selective",
    ),
    "attention dropout, window, tp2": (
        2,
        UNTIED + TP2 + "--attention-dropout 0.1 --window-size 32,0",
    ),
    "attention dropout, documents": (
        1,
        UNTIED + "--attention-dropout 0.1 --reset-attention-mask",
    ),
    "both dropouts": (1, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "capped scores": (1, UNTIED + "--attn-logit-softcapping 5 --seq-length 256"),
    "capped scores, bf16": (1, UNTIED + "--attn-logit-softcapping 5 --seq-length 256 --bf16"),
    "alibi": (1, "--position-embedding-type alibi"),
    "parallel residual": (1, UNTIED + "--parallel-residual"),
    "parallel residual, bf16": (1, UNTIED + "--parallel-residual --bf16"),
    "parallel residual, one norm": (1, UNTIED + "--parallel-residual --share-parallel-norm"),
    "parallel residual, selective parts": (
        1,
        LLAMA
        + "--parallel-residual --recompute-granularity selective "
        + "--recompute-modules layernorm mlp",
    ),
    "qk norm": (1, UNTIED + "--qk-layernorm"),
    "selective": (1, UNTIED + "--recompute-granularity selective"),
    "selective parts": (
        1,
        LLAMA + "--recompute-granularity selective --recompute-modules layernorm mlp",
    ),
    "tp2 sp, selective parts": (
        2,
        UNTIED
        + TP2
        + "--sequence-parallel --recompute-granularity selective --recompute-modules mlp",
    ),
    "full, uniform": (1, UNTIED + FULL.format("uniform", 2) + "--bf16"),
    "full, block": (1, UNTIED + FULL.format("block", 3)),
    "tp2": (2, UNTIED + TP2),
    "tp2 sp": (2, UNTIED + TP2 + "--sequence-parallel --bf16"),
    "tp2 sp, full": (2, LLAMA + TP2 + "--sequence-parallel " + FULL.format("uniform", 1)),
    "tp2, block": (2, LLAMA + TP2 + FULL.format("block", 1)),
    "cp2, p2p": (2, UNTIED + CP2),
    "cp2, all_gather, window": (
        2,
        UNTIED + CP2 + "--cp-comm-type all_gather --window-size 32,0 --bf16",
    ),
    "cp2, a2a": (2, UNTIED + CP2 + "--cp-comm-type a2a"),
    "cp2, one for each layer": (
        2,
        UNTIED + CP2 + "--num-layers 4 --cp-comm-type p2p a2a all_gather a2a",
    ),
    "cp4, selective": (4, UNTIED + CP2.replace("2", "4") + "--recompute-granularity selective"),
    "pp2": (2, UNTIED + PP2),
    "pp2, tied": (2, LLAMA + PP2 + "--bf16"),
    "pp2, interleaved": (2, UNTIED + PP2 + "--num-virtual-stages-per-pipeline-rank 2"),
    "dp2": (2, UNTIED + DP2 + "--bf16"),
    "dp2, sharded": (2, UNTIED + DP2 + "--bf16 " + SHARDED),
    "mtp": (1, UNTIED + "--mtp-num-layers 2"),
    "mtp, full": (1, UNTIED + "--mtp-num-layers 1 " + FULL.format("uniform", 1)),
    "mtp, tp2": (2, UNTIED + TP2 + "--mtp-num-layers 1"),
    "mtp, tp2 sp": (2, LLAMA + TP2 + "--sequence-parallel --mtp-num-layers 1"),
    "mtp, pp2": (2, UNTIED + PP2 + "--mtp-num-layers 1 --bf16"),
    "adapters": (1, UNTIED + "--bf16 " + LORA),
    "adapters, nf4": (1, UNTIED + "--bf16 --lora-base-encoding nf4 " + LORA),
    "adapters, tp2 sp": (2, UNTIED + TP2 + "--sequence-parallel " + LORA),
    "average": (1, UNTIED + "--ema-decay 0.9"),
    "average, dp2, sharded": (2, UNTIED + DP2 + "--bf16 --ema-decay 0.9 " + SHARDED),
}
# Runs whose features are also in one of the others
SLOW = {
    "attention dropout",
    "attention dropout, bf16",
    "capped scores, bf16",
    "parallel residual, bf16",
    "tp2",
    "cp2, a2a",
    "mtp, tp2",
    "average",
}


def measure(rank, world_size, flags):
    """(peak bytes in the iterations, bytes sent per iteration by operation) of
    `pretrain_gpt.py COMMON flags`.
    """
    seen = LiveTensors()
    started = []

    def step(chunk, batch, activation):
        if not started:
            seen.reset()  # without the temporaries of building the model
        started.append(True)
        return forward_step(chunk, batch, activation)

    config = parse_args(shlex.split(COMMON + flags), world_size)
    with seen:
        pretrain(config, model_provider, datasets_provider, step)
    return seen.peak, {name: sent / 2 for name, sent in seen.sent.items()}


def plan(flags: str, world_size: int) -> RunPlan:
    config = parse_args(shlex.split(COMMON + flags), world_size)
    config.set_vocab_size(config.tokenizer.vocab_size + 1)
    return plan_run(config, world_size, model_provider, "cpu")


@of_current_torch
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]
)
def test_memory_and_traffic_match_measured_steps(pool, name, tmp_path):
    world_size, flags = RUNS[name]
    if LORA in flags:
        flags = flags.format(base=tmp_path / "base")
        pool.run(save, 1, UNTIED, str(tmp_path / "base"))
    planned = plan(flags, world_size)
    for rank, (peak, sent) in enumerate(pool.run(measure, world_size, flags)):
        stage = planned.stages[rank if len(planned.stages) > 1 else 0]
        assert stage.memory.total == pytest.approx(peak, rel=0.03)

        axes = [stage.traffic[name] for name in ("tp", "cp", "dp", "pp", "embedding")]
        for (
            operations,
            counted,
        ) in {  # with gloo the buckets go shard by shard: broadcasts and reduces
            ("allreduce_",): sum(axis.all_reduce for axis in axes),
            ("_allgather_base_", "broadcast_"): sum(axis.all_gather for axis in axes),
            ("_reduce_scatter_base_", "reduce_"): sum(axis.reduce_scatter for axis in axes),
            ("send",): sum(axis.send for axis in axes),
            ("alltoall_base_",): sum(axis.all_to_all for axis in axes),
        }.items():
            small = 0.01 * max(sent.values()) + 100  # scalars, and the loss's numbers per token
            assert counted <= sum(sent.get(name, 0) for name in operations) <= counted + small, (
                operations
            )


def save(rank, world_size, flags, directory):
    config = parse_args(shlex.split(f"{COMMON}{flags} --save {directory}"), world_size)
    measured = Measurements()
    pretrain(config, model_provider, datasets_provider, forward_step, writers=[measured])
    return measured.points.get(("save-gigabytes", 2))


@pytest.mark.parametrize(
    "flags",
    [
        UNTIED + "--bf16",
        LLAMA,
        UNTIED + "--no-save-optim --bf16",
        UNTIED + "--no-save-optim --bf16 --ema-decay 0.9",
    ],
)
def test_checkpoint_bytes_match_saved_files(pool, flags, tmp_path):
    """The files of all ranks have the planned size, apart from their headers, and the shares of
    ranks add up to it.
    """
    flags += " --hidden-size 128 --ffn-hidden-size 384"  # headers are a small part
    total, _ = pool.run(save, 2, flags, str(tmp_path))
    planned = plan(flags, 2)
    assert 0 <= total * 1e9 - planned.checkpoint_bytes <= 0.02 * planned.checkpoint_bytes
    assert 2 * planned.stages[0].checkpoint_bytes == pytest.approx(
        planned.checkpoint_bytes, rel=1e-3
    )
