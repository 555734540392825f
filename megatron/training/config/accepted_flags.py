"""What job scripts for Megatron-LM say that needs no code here: switches without effect, old names and old values.

A switch counts as without effect only if the mathematics and the files are the same with and without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accepted:
    """A flag that is read and dropped."""

    reason: str
    only: tuple[str, ...] = ()  # the values that mean nothing here; others are an error. (): any


# Reason -> flags. Of a switch any spelling that Megatron-LM has for it (--x, --no-x, --disable-x) stands for all.
_REASONS = {
    "a switch between kernels, fused and plain; the mathematics is the same": """
        --attention-backend --flash-attention-version --use-flash-attn --use-flash-attn-v2 --use-flash-attn-triton
        --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl --no-persist-layer-norm
        --no-gradient-accumulation-fusion --disable-jit-fuser --use-te-activation-func --fused-residual-rmsnorm
        --use-transformer-engine-op-fuser --use-fused-weighted-squared-relu --use-grouped-gemm-for-dense-mlp
        --cuda-graph-impl --cuda-graph-scope --cuda-graph-modules --cuda-graph-warmup-steps --enable-cuda-graph
        --external-cuda-graph --optimizer-cuda-graph --no-clone-scatter-output-in-embedding --muon-use-syrk""",
    "there is one implementation of the model": "--use-mcore-models --use-legacy-models",
    "it opens other flags, each of which is judged by itself": "--enable-experimental",
    "it changes what Megatron-LM's own tests look at": "--test-mode",
    "with the data types at their defaults, which are the only ones here": "--use-precision-aware-optimizer",
    "attention and cross entropy accumulate in fp32 in any case": "--attention-softmax-in-fp32",
    "gradients are accumulated and reduced in fp32 unless --grad-reduce-in-bf16 says otherwise": """
        --accumulate-allreduce-grads-in-fp32 --ddp-param-name-patterns-for-fp32-local-accumulation""",
    "scaling by the layer number cancels out of the softmax": """
        --apply-query-key-layer-scaling --no-query-key-layer-scaling""",
    "--position-embedding-type says it": "--no-position-embedding",
    "memory and its reuse, not results": """
        --empty-unused-memory-level --distribute-saved-activations --mlp-chunks-for-training
        --distribute-checkpointed-activations""",
    "an overlap, not a result": """
        --no-async-tensor-model-parallel-allreduce --tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad
        --tp-comm-bootstrap-backend --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag
        --no-tp-comm-overlap-rs --no-tp-comm-split-ag --no-tp-comm-split-rs --no-overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --overlap-param-gather-with-optimizer-step --no-align-grad-reduce
        --no-align-param-gather --defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute
        --no-delay-grad-reduce --delay-param-gather --train-sync-interval --no-scatter-gather-tensors-in-pipeline""",
    "tuning of NCCL and its groups is left alone": """
        --ddp-pad-buckets-for-high-nccl-busbw --use-nccl-ub --nccl-communicator-config-path --use-ring-exchange-p2p
        --disable-gloo-process-groups --create-all-gather-group --high-priority-stream-groups --use-sharp
        --sharp-enabled-group --disable-symmetric-registration --symmetric-ar-type
        --pipeline-model-parallel-comm-backend --no-contiguous-buffers-in-local-ddp""",
    "how often the sharded optimizer is replicated is memory and traffic, not a result": """
        --num-distributed-optimizer-instances""",
    "gradients are summed, and divided in fp32": "--ddp-average-in-collective",
    "taken from the environment": "--local-rank --local_rank",
    "groups are created once, at the start": "--lazy-mpu-init",
    "--distributed-timeout-minutes holds all along": "--distributed-timeout-seconds-after-init",
    "recording of collectives for debugging": """
        --flight-recorder-dump-path --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout
        --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec --gpu-sniff-test-interval""",
    "initial weights do not depend on device or layout, and those of a checkpoint replace them": """
        --use-cpu-initialization --no-initialization --init-model-with-meta-device""",
    "dropout has one generator per rank and purpose in any case": "--te-rng-tracker --inference-rng-tracker",
    "cached indices are always loaded without a barrier, and mapped when they are needed": """
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --mmap-warmup""",
    "files are opened by their paths": "--disable-msc --enable-msc",
    "of BERT, T5 and retrieval, which pretrain_gpt.py does not train": """
        --bert-no-binary-head --mask-prob --short-seq-prob --decoder-seq-length --retriever-seq-length
        --bert-embedder-type --output-bert-embeddings --relative-attention-num-buckets
        --relative-attention-max-distance""",
    "one tokenizer library of each kind": "--legacy-tokenizer --tokenizer-hf-use-fast",
    "tokenizers are not copied into checkpoints": "--no-save-tokenizer-assets",
    "the format is found out from the files": "--auto-detect-ckpt-format",
    "writers live as long as the run": """
        --use-persistent-ckpt-worker --async-strategy --async-ckpt-cpu-priority --async-ckpt-io-priority
        --async-ckpt-use-cpu-shm""",
    "every checkpoint can be resharded, and nothing is gathered to save it": """
        --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient
        --ckpt-convert-update-legacy-dist-opt-format --ckpt-drop-redundant-extra-state""",
    "how ranks share the work of a checkpoint, not what is read or written": """
        --ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-per-rank-objects
        --ckpt-fully-parallel-save-process-group --ckpt-fully-parallel-load-process-group
        --ckpt-pg-tensors-cache-path --ckpt-pg-tensors-cache-create --no-ckpt-load-validate-sharding-integrity""",
    "always logged": """
        --log-throughput --log-progress --log-batch-size-to-tensorboard --log-world-size-to-tensorboard
        --no-log-loss-scale-to-tensorboard --no-log-learnig-rate-to-tensorboard
        --no-log-learning-rate-to-tensorboard""",
    "a measurement that is not taken here": """
        --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port --straggler-minmax-count
        --log-device-memory-used --log-energy --log-max-attention-logit --no-barrier-with-level-1-timing""",
    "traces have the contents of torch's profiler, the only one": """
        --use-pytorch-profiler --nvtx-ranges --record-shapes --pytorch-profiler-collect-shapes
        --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra""",
    "one level of messages": "--logging-level",
    "evaluation collects no garbage": "--no-manual-gc-eval",
    "results are not computed twice": "--rerun-mode",
    "replicas are updated from the same bits": "--check-weight-hash-across-dp-replicas-interval",
    "there is no such service": """
        --no-one-logger --enable-one-logger --one-logger-project --one-logger-run-name --one-logger-async
        --one-logger-entity --app-tag-run-name --app-tag-run-version --otel-enabled --otel-service-name
        --otel-span-groups --adlr-autoresume --adlr-autoresume-interval""",
}

ACCEPTED_WITHOUT_EFFECT: dict[str, Accepted] = {
    name: Accepted(reason) for reason, names in _REASONS.items() for name in names.split()
} | {
    "--muon-tp-mode": Accepted("Muon's matrices are whole over TP", ("duplicated", "distributed")),
    "--muon-scalar-optimizer": Accepted("AdamW updates what is no matrix", ("adam",)),
    "--dist-ckpt-format": Accepted("--ckpt-format says it", ("torch_dist",)),
    "--rope-type": Accepted("--position-embedding-type says it", ("rope",)),
    "--rotary-seq-len-interpolation-factor": Accepted("a factor of 1 stretches nothing", ("1",)),
    "--num-experts": Accepted("a model without experts", ("0",)),
    "--mtp-num-layers": Accepted("a model without multi-token prediction", ("0",)),
    "--expert-tensor-parallel-size": Accepted("the model has no experts", ("1",)),
    "--DDP-impl": Accepted("there is one implementation", ("local", "torch")),
    "--data-impl": Accepted("indexed data sets have one format", ("mmap", "infer")),
}


@dataclass(frozen=True)
class OtherName:
    """A flag that says what other flags say; `wins` over them, or yields where they are given, too."""

    values: dict[str, Any]
    takes: str | None = None  # the field that its own value goes to
    wins: bool = True


_RECOMPUTE_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

OTHER_NAMES: dict[str, OtherName] = {
    "--use-rotary-position-embeddings": OtherName({"position_embedding_type": "rope"}),
    "--recompute-activations": OtherName({"recompute_granularity": "selective"}),
    "--use-dist-ckpt": OtherName({"ckpt_format": "torch_dist"}, wins=False),
    "--verify-integrity": OtherName({"ckpt_verify": True}),
    "--embed-layernorm": OtherName({"embedding_layernorm": True}),
    "--checkpoint-activations": OtherName(_RECOMPUTE_ALL, wins=False),
    "--activations-checkpoint-method": OtherName(_RECOMPUTE_ALL, takes="recompute_method", wins=False),
    "--activations-checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--encoder-num-layers": OtherName({}, takes="num_layers"),
    "--encoder-seq-length": OtherName({}, takes="seq_length"),
    "--padded-vocab-size": OtherName({}, takes="vocab_size"),
    "--no-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
    "--disable-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
}

# Field -> values of older releases and of forks, and what they are called today.
OLD_VALUES: dict[str, dict[str, str]] = {
    "optimizer": {"dist_muon": "muon"},
    "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
    "position_embedding_type": {"rotary": "rope", "absolute": "learned_absolute"},
}
