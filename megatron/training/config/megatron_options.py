"""All options of Megatron-LM since 2023 (and some of its forks'): how many words each takes, and what ours are not.

An option that is no flag of ours is one of three things: without effect here, an option of a feature that the command
line does not turn on, or an error that names the feature.

A switch counts as without effect only if the mathematics and the files are the same with and without it. Old names and
old values are read as today's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
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
    "one tokenizer library of each kind": "--tokenizer-hf-use-fast",
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
    "the experts of a rank always run as one grouped product": """
        --moe-grouped-gemm --moe-use-legacy-grouped-gemm --use-grouped-gemm-for-shared-expert""",
    "an overlap or a fusion within a layer of experts, not a result": """
        --moe-shared-expert-overlap --moe-permute-fusion --moe-router-fusion --overlap-moe-expert-parallel-comm
        --high-priority-a2a-comm-stream --moe-per-layer-logging""",
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
    "--mtp-num-layers": Accepted("a model without multi-token prediction", ("0",)),
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


@dataclass(frozen=True)
class MegatronOption:
    """A row of the table: one spelling in Megatron-LM."""

    words: str  # that it takes: "0", "1", "2", "3", "+" (one or more), "*" (any number)
    defaults: tuple[str, ...]  # of the newest release first
    group: str  # of options in Megatron-LM; "fork: NAME" for those that it never had


@dataclass(frozen=True)
class Feature:
    """Something that Megatron-LM has and we do not, with the options that belong to it."""

    what: str
    options: str  # regular expression of their names, without dashes in front
    switches: str | None = None  # of those that turn it on; the others mean nothing without. None: all do


def _read_table() -> dict[str, MegatronOption]:
    text = resources.files(__package__).joinpath("megatron_lm_options.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return {name: MegatronOption(words, tuple(defaults.split(" | ")), group) for name, words, defaults, group in rows}


MEGATRON_OPTIONS = _read_table()

_FORK = "fork: "  # how the group of an option begins that Megatron-LM itself never had
NEVER = "(?!)"  # a switch that no command line of a pretraining gives

FEATURES = (
    Feature(
        "other form of mixture of experts",
        "moe-.*|expert-.*|overlap-moe-.*|overlap-dispatch-.*|ep-overlap-.*",
        None,
    ),
    Feature(
        "multi-latent attention",
        "multi-latent-attention|(q|kv)-lora-rank|qk-head-dim|qk-pos-emb-head-dim|v-head-dim|rotary-scaling-factor|"
        "mscale.*|cache-mla-latents|mla-.*",
        "multi-latent-attention",
    ),
    Feature("multi-token prediction", "mtp-.*", "mtp-num-layers"),
    Feature(
        "fp8 and fp4 arithmetic",
        "fp[48]-.*|(no|disable)-fp8-wgrad|first-last-layers-bf16|num-layers-at-(start|end)-in-bf16|keep-fp8-.*|"
        "reuse-grad-buf-for-mxfp8-.*|te-precision-config-file",
        "fp[48]-format|fp8-e4m3|fp8-hybrid|te-precision-config-file",
    ),
    Feature(
        "hierarchical or hybrid context parallelism",
        "hierarchical-context-parallel-sizes|hybrid-context-parallel|max-seqlen-per-.*",
        "hierarchical-context-parallel-sizes|hybrid-context-parallel",
    ),
    Feature(
        "fully sharded data parallelism (FSDP)",
        "use-(torch-fsdp2|megatron-fsdp|custom-fsdp)|.*fsdp.*|data-parallel-sharding-strategy|outer-dp-.*|"
        "enable-full-sharding-in-hsdp|suggested-communication-unit-size|no-gradient-reduce-div-fusion",
        "use-(torch-fsdp2|megatron-fsdp|custom-fsdp)",
    ),
    Feature(
        "Mamba and hybrid models",
        "mamba-.*|disable-mamba-.*|is-hybrid-model|hybrid-.*|gdp-.*",
        "is-hybrid-model|hybrid-(override|layer)-pattern",
    ),
    Feature(
        "experimental attention (linear, gated, sparse)",
        "experimental-attention-variant|.*dsa-.*|linear-.*|attention-output-gate",
        "experimental-attention-variant|linear-attention-freq|attention-output-gate",
    ),
    Feature(
        "reinforcement learning", "(rl|grpo|langrl|no-rl|no-langrl)-.*|perform-rl-step|refit-method", "perform-rl-step"
    ),
    Feature(
        "inference",
        "(no-)?inference-.*|mamba-inference-.*|max-tokens-to-oom|flash-decode|decode-only-cuda-graphs|"
        "(en|dis)able-chunked-prefill|use-legacy-static-engine|num-speculative-tokens|mlp-chunks-for-prefill|"
        "nccl-all-reduce-for-prefill|use-same-sampling-seed-.*|use-kitchen-attention|kitchen-.*",
        "use-kitchen-attention",
    ),
    Feature("retrieval (RETRO)", "retro-.*", "retro-(add-retriever|project-dir|workdir)"),
    Feature(
        "injection of faults", "fault-injector-.*|error-injection-.*", "fault-injector-fault-types|error-injection-rate"
    ),
    Feature("restart within the process", "inprocess-.*", "inprocess-restart"),
    Feature("distillation", "logits-.*", "logits-(save|load)-dir"),
    Feature("checkpoints that are not kept", "non-persistent-.*|replication.*", "non-persistent-save-interval"),
    Feature(
        "offloading to host memory",
        "fine-grained-.*|(delay|min|delta)-offload.*|offload-modules|activation-offload-.*|cpu-offloading-.*|"
        "optimizer-cpu-offload|optimizer-offload-.*|use-torch-optimizer-for-cpu-offload|overlap-cpu-optimizer-.*|"
        "no-pin-cpu-.*",
        "fine-grained-activation-offloading|cpu-offloading-num-layers|optimizer-cpu-offload",
    ),
    Feature("muP", "use-mup|mup-.*", "use-mup"),
    Feature("multiplied residual streams (mHC)", "enable-mhc-connections|mhc-.*", "enable-mhc-connections"),
    Feature("YaRN", "yarn-.*|no-yarn-.*", NEVER),
    Feature("logging of memory history", "record-memory-history|memory-snapshot-path", "record-memory-history"),
    Feature("the fault-tolerance package", ".*ft-package|calc-ft-timeouts|ft-.*", "enable-ft-package"),
    Feature("fine-tuning on instructions", "sft|sft-.*", "sft"),
)

# What Megatron-LM itself has renamed and refuses today.
RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}


def base_name(name: str) -> str:
    """What the spellings of a switch have in common: --x, --no-x and --disable-x."""
    return re.sub("^--(no-|disable-)?", "", name)


def arity_of(name: str) -> str:
    """How many words follow an option of Megatron-LM; "*" where it is not known."""
    if name in MEGATRON_OPTIONS:
        return MEGATRON_OPTIONS[name].words
    return "0" if base_name(name) in _bases(MEGATRON_OPTIONS) else "*"


def feature_of(name: str) -> Feature | None:
    """The feature that an option belongs to."""
    return next((feature for feature in FEATURES if re.fullmatch(feature.options, name[2:])), None)


def accepted(name: str) -> Accepted | None:
    """The row of an option that has no effect here, whichever of its spellings was given."""
    if name in ACCEPTED_WITHOUT_EFFECT:
        return ACCEPTED_WITHOUT_EFFECT[name]
    row = _bases(ACCEPTED_WITHOUT_EFFECT).get(base_name(name))
    return ACCEPTED_WITHOUT_EFFECT[row] if row is not None and arity_of(row) == "0" else None


@dataclass
class Verdict:
    """What becomes of the options that are no flags of ours."""

    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    unknown: list[str] = field(default_factory=list)


def judge(options: Iterable[tuple[str, list[str]]]) -> Verdict:
    """Options and their words: without effect, not implemented (one line for each feature), or unknown."""
    verdict = Verdict()
    by_feature: dict[Feature, list[tuple[str, list[str]]]] = {}
    by_fork: dict[str, list[str]] = {}
    for name, words in options:
        option, row, feature = MEGATRON_OPTIONS.get(name), accepted(name), feature_of(name)
        if row is not None and (not row.only or words[0] in row.only):
            verdict.ignored.append(name)
        elif option is not None and option.group.startswith(_FORK):
            by_fork.setdefault(option.group.removeprefix(_FORK), []).append(name)
        elif option is None and arity_of(name) == "*":
            verdict.unknown.append(name)
        elif _is_default(name, words):
            verdict.ignored.append(name)
        elif feature is not None:
            by_feature.setdefault(feature, []).append((name, words))
        else:
            verdict.problems.append(_not_implemented(name, words, row))
    for feature, given in by_feature.items():
        switches = [" ".join([name, *words]) for name, words in given if _turns_on(feature, name)]
        if not switches:
            verdict.ignored += [name for name, _ in given]
            continue
        more = f" (and {len(given) - len(switches)} more flags of it)" if len(given) > len(switches) else ""
        verdict.problems.append(f"{', '.join(switches)}{more}: Megatron-LM's {feature.what} is not implemented here")
    for fork, names in by_fork.items():
        listed = ", ".join(dict.fromkeys(names))
        verdict.problems.append(f"{listed}: no flag of Megatron-LM, but of a fork of it ({fork})")
    return verdict


def _not_implemented(name: str, words: list[str], row: Accepted | None) -> str:
    said = " ".join([name, *words])
    if row is not None:
        return f"{said}: not supported, only {' or '.join(row.only)} ({row.reason})"
    if name in RENAMED:
        return f"{said}: no longer a flag of Megatron-LM; it is called {RENAMED[name]} today"
    return f"{said}: this option of Megatron-LM is not implemented here"


def _turns_on(feature: Feature, name: str) -> bool:
    return feature.switches is None or re.fullmatch(feature.switches, name[2:]) is not None


def _is_default(name: str, words: list[str]) -> bool:
    """Whether an option says what Megatron-LM, and so we, do without it."""
    option = MEGATRON_OPTIONS.get(name)
    if option is None or option.words == "0":  # a switch; given as --no-x where Megatron-LM has --x alone, it is off
        return option is None
    return len(words) == 1 and any(_same(words[0], default) for default in option.defaults)


def _same(word: str, default: str) -> bool:
    try:
        return float(word) == float(default)
    except ValueError:
        return word == default and word != "None"


@functools.cache
def _bases_of(names: tuple[str, ...]) -> dict[str, str]:
    return {base_name(name): name for name in names}


def _bases(table: dict[str, MegatronOption] | dict[str, Accepted]) -> dict[str, str]:
    """Base name -> spelling in the table, of its switches."""
    return _bases_of(
        tuple(name for name in table if name not in MEGATRON_OPTIONS or MEGATRON_OPTIONS[name].words == "0")
    )
