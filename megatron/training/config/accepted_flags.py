"""Flags of Megatron-LM that job scripts carry and that change nothing here, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accepted:
    """A flag that is read and dropped."""

    reason: str
    values: bool = False  # it takes one
    only: tuple[str, ...] = ()  # the values that mean nothing here; others are an error. (): any


_FUSION = "a switch between fused and plain kernels; the mathematics is the same"
_FP32_SOFTMAX = "attention and cross entropy accumulate in fp32 in any case"
_FP32_GRADS = "gradients are accumulated and reduced in fp32 in any case"
_ONE_MODEL = "there is one implementation of the model"
_ANY_FORMAT = "found out from the files"
_RESHARDABLE = "every checkpoint can be resharded"
_ALWAYS_LOGGED = "always logged"
_NO_RERUN = "results are not computed twice"
_NCCL = "tuning of NCCL through its environment variables is left alone"
_ONE_PROCESS_GROUP = "groups are created as they are needed"

ACCEPTED_WITHOUT_EFFECT: dict[str, Accepted] = {
    # Kernels
    "--attention-backend": Accepted("scaled_dot_product_attention picks the kernel", True),
    "--use-flash-attn": Accepted("scaled_dot_product_attention picks the kernel"),
    "--transformer-impl": Accepted("there is no Transformer Engine implementation", True, only=("local",)),
    "--optimizer-impl": Accepted("apex is not used: torch has fused Adam kernels", True, only=("torch",)),
    "--use-mcore-models": Accepted(_ONE_MODEL),
    "--no-masked-softmax-fusion": Accepted(_FUSION),
    "--no-bias-swiglu-fusion": Accepted(_FUSION),
    "--no-bias-dropout-fusion": Accepted(_FUSION),
    "--no-rope-fusion": Accepted(_FUSION),
    "--cross-entropy-loss-fusion": Accepted(_FUSION),
    "--cross-entropy-fusion-impl": Accepted(_FUSION, True),
    "--no-persist-layer-norm": Accepted(_FUSION),
    "--no-gradient-accumulation-fusion": Accepted(_FUSION),
    "--disable-jit-fuser": Accepted(_FUSION),
    "--attention-softmax-in-fp32": Accepted(_FP32_SOFTMAX),
    "--accumulate-allreduce-grads-in-fp32": Accepted(_FP32_GRADS),
    "--apply-query-key-layer-scaling": Accepted("scaling by the layer number cancels out of the softmax"),
    "--no-query-key-layer-scaling": Accepted("it is not done"),
    "--no-position-embedding": Accepted("--position-embedding-type says it"),
    "--empty-unused-memory-level": Accepted("the allocator keeps its memory", True),
    # Communication
    "--no-async-tensor-model-parallel-allreduce": Accepted("an overlap, not a result"),
    "--tp-comm-overlap": Accepted("an overlap, not a result"),
    "--no-overlap-p2p-communication": Accepted("an overlap, not a result"),
    "--overlap-param-gather-with-optimizer-step": Accepted("an overlap, not a result"),
    "--microbatch-group-size-per-virtual-pipeline-stage": Accepted("groups have the size of the pipeline", True),
    "--ddp-average-in-collective": Accepted("gradients are summed, and divided in fp32"),
    "--overlap-p2p-communication-warmup-flush": Accepted("an overlap, not a result"),
    "--no-align-grad-reduce": Accepted("an overlap, not a result"),
    "--no-align-param-gather": Accepted("an overlap, not a result"),
    "--align-param-gather": Accepted("an overlap, not a result"),
    "--defer-embedding-wgrad-compute": Accepted("an overlap, not a result"),
    "--ddp-pad-buckets-for-high-nccl-busbw": Accepted(_NCCL),
    "--use-nccl-ub": Accepted(_NCCL),
    "--nccl-communicator-config-path": Accepted(_NCCL, True),
    "--disable-gloo-process-groups": Accepted(_ONE_PROCESS_GROUP),
    "--use-ring-exchange-p2p": Accepted(_NCCL),
    "--local-rank": Accepted("taken from the environment", True),
    "--local_rank": Accepted("taken from the environment", True),
    "--lazy-mpu-init": Accepted("groups are created once, at the start", True),
    "--context-parallel-size": Accepted("there is no context parallelism", True, only=("1",)),
    "--expert-model-parallel-size": Accepted("the model has no experts", True, only=("1",)),
    "--expert-tensor-parallel-size": Accepted("the model has no experts", True, only=("1",)),
    "--num-distributed-optimizer-instances": Accepted("one instance spans data parallelism", True, only=("1",)),
    # Initialization
    "--use-cpu-initialization": Accepted("initial weights do not depend on device or layout in any case"),
    # Data
    "--dataloader-fast-cache-load": Accepted("cached indices are always loaded without a barrier"),
    "--dataloader-defer-npy-index-mmap": Accepted("indices are mapped when they are needed"),
    # Checkpoints
    "--dist-ckpt-format": Accepted("--ckpt-format says it", True, only=("torch_dist",)),
    "--auto-detect-ckpt-format": Accepted(_ANY_FORMAT),
    "--use-persistent-ckpt-worker": Accepted("writers live as long as the run"),
    "--dist-ckpt-optim-fully-reshardable": Accepted(_RESHARDABLE),
    "--distrib-optim-fully-reshardable-mem-efficient": Accepted("nothing is gathered to save"),
    "--ckpt-convert-update-legacy-dist-opt-format": Accepted(_RESHARDABLE),
    # Logging and supervision
    "--log-throughput": Accepted(_ALWAYS_LOGGED),
    "--log-loss-scale-to-tensorboard": Accepted(_ALWAYS_LOGGED),
    "--log-learning-rate-to-tensorboard": Accepted(_ALWAYS_LOGGED),
    "--log-batch-size-to-tensorboard": Accepted(_ALWAYS_LOGGED),
    "--log-world-size-to-tensorboard": Accepted(_ALWAYS_LOGGED),
    "--no-manual-gc-eval": Accepted("evaluation collects no garbage"),
    "--log-progress": Accepted("consumed samples are in every log line"),
    "--no-barrier-with-level-1-timing": Accepted("timers put no barriers"),
    "--use-pytorch-profiler": Accepted("it is the only profiler"),
    "--logging-level": Accepted("one level of messages", True),
    "--rerun-mode": Accepted(_NO_RERUN, True),
    "--no-one-logger": Accepted("there is no such service"),
    "--enable-one-logger": Accepted("there is no such service"),
    "--check-weight-hash-across-dp-replicas-interval": Accepted("replicas are updated from the same bits", True),
}

# Flags that are another way to say `field = value`.
OTHER_NAMES: dict[str, tuple[str, object]] = {
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--use-dist-ckpt": ("ckpt_format", "torch_dist"),
}


def check_value(name: str, value: str) -> None:
    """ValueError if `value` of an accepted flag asks for something that is not there."""
    row = ACCEPTED_WITHOUT_EFFECT[name]
    if row.only and value not in row.only:
        raise ValueError(f"{name} {value}: not supported, only {' or '.join(row.only)} ({row.reason})")
