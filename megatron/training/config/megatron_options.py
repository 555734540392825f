"""Options of Megatron-LM and its forks that are not flags here, and how each is handled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FlagValues = dict[str, Any]
"""Field name -> value, for the flags on the command line."""


@dataclass
class CommandLine:
    """A parsed command line."""

    flag_values: FlagValues = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # accepted without effect
    # Accepted, although the memory that they save elsewhere is needed here.
    unsaved_memory: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # flags that something equivalent replaces
    replacements: list[str] = field(default_factory=list)  # flags that win over the given ones
    # Flags with their values that --ignore-unknown-flags drops.
    dropped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    # Fields whose value is unknown because of a problem.
    malformed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class OtherName:
    """An alias for other flags.

    If `wins`, it overrides them; otherwise explicit flags take precedence.
    """

    values: dict[str, Any]
    takes: str | None = None  # the field that gets the value of the alias
    wins: bool = True
    note: str = ""  # the difference, if it is more than a name
    # The only values that are supported, and the values of fields for each of them.
    by_value: dict[str, dict[str, Any]] | None = None
    # Fields that get the value of another field, unless they are given.
    copies: dict[str, str] = field(default_factory=dict)


_RECOMPUTE_ALL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

_FSDP = OtherName(
    {"use_distributed_optimizer": True},
    note="replaced by --use-distributed-optimizer, with the same results but more memory: "
    "every rank keeps all parameters and gradients of its stage (plan_run.py reports how much)",
)

_PATCHED_TOKENIZERS = (
    "LLamaTokenizer",
    "LLama2Tokenizer",
    "LLama3Tokenizer",
    "MistralTokenizer",
    "MixtralTokenizer",
    "Qwen2Tokenizer",
    "Qwen3Tokenizer",
    "DeepSeekV2Tokenizer",
)
"""Values of Pai-Megatron-Patch that load the directory --load with transformers' AutoTokenizer."""

OTHER_NAMES: dict[str, OtherName] = {
    "--use-torch-fsdp2": _FSDP,
    "--use-megatron-fsdp": _FSDP,
    "--use-custom-fsdp": _FSDP,
    "--use-rotary-position-embeddings": OtherName({"position_embedding_type": "rope"}),
    "--recompute-activations": OtherName({"recompute_granularity": "selective"}),
    "--fp8-e4m3": OtherName({"fp8": "e4m3"}),
    "--fp8-hybrid": OtherName({"fp8": "hybrid"}),
    "--use-dist-ckpt": OtherName({"ckpt_format": "torch_dist"}, wins=False),
    "--verify-integrity": OtherName({"ckpt_verify": True}),
    "--embed-layernorm": OtherName({"embedding_layernorm": True}),
    "--checkpoint-activations": OtherName(_RECOMPUTE_ALL, wins=False),
    "--activations-checkpoint-method": OtherName(
        _RECOMPUTE_ALL, takes="recompute_method", wins=False
    ),
    "--activations-checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--encoder-num-layers": OtherName({}, takes="num_layers"),
    "--encoder-seq-length": OtherName({}, takes="seq_length"),
    "--padded-vocab-size": OtherName({}, takes="vocab_size"),
    "--tp": OtherName({}, takes="tensor_model_parallel_size"),
    "--pp": OtherName({}, takes="pipeline_model_parallel_size"),
    "--cp": OtherName({}, takes="context_parallel_size"),
    "--ep": OtherName({}, takes="expert_model_parallel_size"),
    "--mbs": OtherName({}, takes="micro_batch_size"),
    "--gbs": OtherName({}, takes="global_batch_size"),
    # Options of forks: BigCode's, and Pai-Megatron-Patch's.
    "--attention-head-type": OtherName(
        {},
        by_value={
            "multihead": {"group_query_attention": False},
            "multiquery": {"group_query_attention": True, "num_query_groups": 1},
        },
    ),
    "--patch-tokenizer-type": OtherName(
        {},
        wins=False,
        by_value=dict.fromkeys(_PATCHED_TOKENIZERS, {"tokenizer_type": "HuggingFaceTokenizer"}),
        copies={"tokenizer_model": "load"},
        note="replaced by --tokenizer-type HuggingFaceTokenizer with the directory --load as "
        "--tokenizer-model, unless these are given",
    ),
    "--use-packed-seq-params": OtherName(
        {"reset_attention_mask": True, "create_attention_mask_in_dataloader": True},
        note="replaced by --reset-attention-mask: documents of a sequence do not see each other",
    ),
    "--no-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
    "--disable-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
}

# Field -> values of older releases, forks and other libraries -> the value here.
OLD_VALUES: dict[str, dict[str, str]] = {
    "optimizer": {"dist_muon": "muon"},
    "moe_token_dispatcher_type": {"flex": "alltoall"},  # via DeepEP or HybridEP
    "cp_comm_type": {"a2a+p2p": "p2p"},
    "ckpt_format": {"fsdp_dtensor": "torch_dist"},
    "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
    "lr_wsd_decay_style": {"1-sqrt": "minus_sqrt"},
    "position_embedding_type": {"rotary": "rope", "absolute": "learned_absolute"},
}

NOTES_OF_OLD_VALUES = {
    ("cp_comm_type", "a2a+p2p"): "p2p is used: other messages, the same results",
    ("ckpt_format", "fsdp_dtensor"): "torch_dist is written, which every layout reads",
}
"""(field, value of OLD_VALUES) -> the difference, if it is more than a name."""
