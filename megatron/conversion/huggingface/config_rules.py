"""Rules between fields of `config.json` and model arguments, each with its inverse.

Both generations are read: transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x (`rope_parameters`,
`dtype`). The 4.x form is written, because both generations load it. A field that no rule knows is refused unless it is
in `HARMLESS`: an ignored field may be a different model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.conversion.model_space.model import flag_name
from megatron.conversion.model_space.source import LAYERS, SIZE
from megatron.core.dist_checkpointing.format.schema import (
    boolean,
    number,
    optional,
    printable,
    record,
    sequence,
    shown,
    text,
)
from megatron.core.transformer.transformer_config import TransformerConfig

Json = dict[str, Any]
_SIZES = """vocab_size num_hidden_layers n_layer hidden_size n_embd n_embed num_attention_heads n_head
    num_key_value_heads head_dim intermediate_size n_inner max_position_embeddings n_positions n_ctx seq_length
    sliding_window max_window_layers original_max_position_embeddings num_experts num_local_experts num_experts_per_tok
    moe_intermediate_size shared_expert_intermediate_size decoder_sparse_step"""
_NUMBERS = """initializer_range rms_norm_eps layer_norm_epsilon attention_dropout hidden_dropout attn_pdrop resid_pdrop
    embd_pdrop rope_theta partial_rotary_factor router_aux_loss_coef router_jitter_noise"""
_SWITCHES = "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob qkv_bias"
_TEXTS = "model_type torch_dtype dtype activation_function hidden_act"
_ROPE_NUMBERS = """rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor
    original_max_position_embeddings"""
_ROPE = record(
    {f"{name}?": optional(text(256)) for name in ("rope_type", "type")}
    | {f"{name}?": optional(number()) for name in _ROPE_NUMBERS.split()}
)
# What the fields that rules read may be.
CONFIG = record(
    {
        **{f"{name}?": optional(SIZE) for name in _SIZES.split()},
        **{f"{name}?": optional(LAYERS) for name in ("num_hidden_layers", "n_layer")},
        **{f"{name}?": optional(number()) for name in _NUMBERS.split()},
        **{f"{name}?": optional(boolean) for name in _SWITCHES.split()},
        **{f"{name}?": optional(text(256)) for name in _TEXTS.split()},
        **{f"{name}?": optional(sequence(text(256), 10**5)) for name in ("architectures", "layer_types")},
        "mlp_only_layers?": optional(sequence(SIZE, 10_000)),
        **{f"{name}?": optional(_ROPE) for name in ("rope_scaling", "rope_parameters")},
    }
)
REQUIRED = object()  # a field without a default: it defines the model


class Rule(Protocol):
    """Some fields of config.json and the arguments that say the same."""

    @property
    def fields(self) -> tuple[str, ...]: ...

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        """Add to `args` what `hf` says; arguments that are there already were given by the user and stay."""
        ...

    def write(self, config: TransformerConfig) -> Json:
        """The fields for this model."""
        ...


@dataclass(frozen=True)
class Copy:
    """One field, one argument; the first name is written, all are read."""

    argument: str
    fields: tuple[str, ...]
    default: Any = REQUIRED

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        values = [hf[field] for field in self.fields if hf.get(field) is not None]
        if values:
            args.setdefault(self.argument, values[0])
        elif self.default is not REQUIRED:
            args.setdefault(self.argument, self.default)
        elif self.argument not in args:
            raise ValueError(f"config.json has no {self.fields[0]!r}: give {flag_name(self.argument)}")

    def write(self, config: TransformerConfig) -> Json:
        value = getattr(config, self.argument)
        return {} if value is None else {self.fields[0]: value}


@dataclass(frozen=True)
class Fixed:
    """A field that must have one value: with any other the model computes something else."""

    field: str
    value: Any
    written: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        value = hf.get(self.field)
        if value is not None and value != self.value:
            raise ValueError(f"config.json: {self.field} = {value!r} is not supported, only {self.value!r} is")

    def write(self, config: TransformerConfig) -> Json:
        return {self.field: self.value} if self.written else {}


@dataclass(frozen=True)
class Implied:
    """An argument that the family implies; there is no field for it."""

    argument: str
    value: Any
    fields: tuple[str, ...] = ()

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        args.setdefault(self.argument, self.value)

    def write(self, config: TransformerConfig) -> Json:
        return {}


@dataclass(frozen=True)
class FeedForward:
    """`n_inner` of GPT-2, null for 4h; BLOOM has 4h always."""

    field: str
    free: bool

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        size, inner = 4 * args["hidden_size"], hf.get(self.field)
        if inner not in (None, size) and not self.free:
            raise ValueError(f"config.json: {self.field} = {inner!r} is not supported, only 4 * hidden_size = {size}")
        args.setdefault("ffn_hidden_size", inner or size)

    def write(self, config: TransformerConfig) -> Json:
        return {self.field: config.ffn_size} if self.free else {}


@dataclass(frozen=True)
class QueryGroups:
    """Null means one key/value head per query head; `default` is what a missing field means."""

    default: int | None
    fields: tuple[str, ...] = ("num_key_value_heads",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        groups = hf.get(self.fields[0], self.default) or args["num_attention_heads"]
        args.setdefault("num_query_groups", groups)
        args.setdefault("group_query_attention", args["num_query_groups"] != args["num_attention_heads"])

    def write(self, config: TransformerConfig) -> Json:
        return {self.fields[0]: config.query_groups}


@dataclass(frozen=True)
class HeadDim:
    """Null means hidden_size / heads, a missing field `default`; `always` writes the implied value too."""

    default: int | None = None
    always: bool = True
    fields: tuple[str, ...] = ("head_dim",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        head_dim = hf.get(self.fields[0], self.default)
        if head_dim is not None:
            args.setdefault("kv_channels", head_dim)

    def write(self, config: TransformerConfig) -> Json:
        implied = config.head_dim * config.num_attention_heads == config.hidden_size
        return {} if implied and not self.always else {self.fields[0]: config.head_dim}


_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
_ERF_GELU = ("gelu", "gelu_python")


@dataclass(frozen=True)
class Gelu:
    """Which GELU: `gelu_new` is the tanh approximation, `gelu` the exact one."""

    fields: tuple[str, ...] = ("activation_function",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        name = hf.get(self.fields[0]) or "gelu_new"
        if name not in _TANH_GELU + _ERF_GELU:
            raise ValueError(f"config.json: {self.fields[0]} = {name!r} is not supported, only gelu_new and gelu are")
        args.setdefault("swiglu", False)
        args.setdefault("bias_gelu_fusion", name in _TANH_GELU)

    def write(self, config: TransformerConfig) -> Json:
        return {self.fields[0]: "gelu_new" if config.tanh_gelu else "gelu"}


@dataclass(frozen=True)
class GatedSilu:
    fields: tuple[str, ...] = ("hidden_act",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        name = hf.get(self.fields[0]) or "silu"
        if name not in ("silu", "swish"):
            raise ValueError(f"config.json: {self.fields[0]} = {name!r} is not supported, only silu is")
        args.setdefault("swiglu", True)

    def write(self, config: TransformerConfig) -> Json:
        return {self.fields[0]: "silu"}


@dataclass(frozen=True)
class Tied:
    default: bool
    fields: tuple[str, ...] = ("tie_word_embeddings",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        tied = hf.get(self.fields[0])
        args.setdefault("untie_embeddings_and_output_weights", not (self.default if tied is None else tied))

    def write(self, config: TransformerConfig) -> Json:
        return {self.fields[0]: not config.untie_embeddings_and_output_weights}


@dataclass(frozen=True)
class Biases:
    """Biases of attention and MLP are one argument in the model: one alone is read as both, the other being zero."""

    fields: tuple[str, ...] = ("attention_bias", "mlp_bias")

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        args.setdefault("add_bias_linear", any(hf.get(field) for field in self.fields))
        args.setdefault("add_qkv_bias", False)

    def write(self, config: TransformerConfig) -> Json:
        return {field: config.add_bias_linear for field in self.fields}


_LLAMA3 = {  # field of the scaling dictionary -> argument
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position_embeddings",
}


@dataclass(frozen=True)
class Rope:
    """Base and scaling; of the scalings only llama3 is known, all five numbers are kept."""

    partial: bool = False  # a part of each head may be rotated
    fields: tuple[str, ...] = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        kind = rope.pop("rope_type", None) or rope.get("type") or "default"
        rope.pop("type", None)
        theta = rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
        if hf.get("rope_theta") not in (None, theta):  # 4.x would take the one, 5.x the other
            raise ValueError(f"config.json has rope_theta = {hf['rope_theta']} and {theta}: remove the wrong one")
        fraction = rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
        if kind not in ("default", "llama3"):
            raise ValueError(f"config.json: rope type {kind!r} is not supported, only default and llama3 are")
        if self.partial:
            args.setdefault("rotary_percent", float(fraction))
        elif fraction != 1.0:
            raise ValueError(f"config.json: partial_rotary_factor = {fraction} is not supported, only 1.0 is")
        args.setdefault("rotary_base", float(theta))
        args.setdefault("use_rope_scaling", kind == "llama3")
        if kind == "llama3":
            self._read_llama3(hf, rope, args)
        unknown = [name for name, value in rope.items() if value is not None and name not in _LLAMA3]
        if unknown or (kind == "default" and any(rope.get(name) is not None for name in _LLAMA3)):
            raise ValueError(f"config.json: rope type {kind!r} with {sorted(rope)} is not understood")

    def _read_llama3(self, hf: Mapping[str, Any], rope: Mapping[str, Any], args: dict[str, Any]) -> None:
        for field, argument in _LLAMA3.items():
            value = rope.get(field)
            if value is None and field == "original_max_position_embeddings":
                value = hf.get("max_position_embeddings")  # as transformers does
            if value is None and argument not in args:
                raise ValueError(f"config.json: rope scaling llama3 has no {field!r}: give {flag_name(argument)}")
            args.setdefault(argument, value)

    def write(self, config: TransformerConfig) -> Json:
        scaling = {"rope_type": "llama3"} | {field: getattr(config, name) for field, name in _LLAMA3.items()}
        part = {"partial_rotary_factor": config.rotary_percent} if self.partial else {}
        return {"rope_theta": config.rotary_base, "rope_scaling": scaling if config.use_rope_scaling else None, **part}


@dataclass(frozen=True)
class MistralWindow:
    """Every layer has the window or none has; transformers counts the token itself, `window_size` does not."""

    default: int | None = 4096  # what a missing field means to transformers
    fields: tuple[str, ...] = ("sliding_window", "layer_types")

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        window = hf.get("sliding_window", self.default)
        kinds = set(hf.get("layer_types") or ())
        if kinds - {"sliding_attention" if window else "full_attention"}:
            raise ValueError(f"config.json: layer_types {sorted(kinds)} is not supported with sliding_window {window}")
        args.setdefault("window_size", (window - 1, 0) if window else None)

    def write(self, config: TransformerConfig) -> Json:
        return {"sliding_window": config.window_size[0] + 1 if config.window_size else None}


@dataclass(frozen=True)
class QwenWindow:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window`; here all or none."""

    fields: tuple[str, ...] = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        layers = args["num_layers"]
        window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
        first = hf.get("max_window_layers", 28) if window else layers
        implied = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
        kinds = set(hf.get("layer_types") or implied)
        if kinds == {"full_attention"}:
            args.setdefault("window_size", None)
        elif kinds == {"sliding_attention"} and window:
            args.setdefault("window_size", (window - 1, 0))
        else:
            raise ValueError(
                f"config.json: layer_types {sorted(kinds)} with sliding_window = {window}, max_window_layers = {first} "
                f"of {layers} layers: all must have the window, or none"
            )

    def write(self, config: TransformerConfig) -> Json:
        if config.window_size is None:
            return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
        return {"use_sliding_window": True, "sliding_window": config.window_size[0] + 1, "max_window_layers": 0}


@dataclass(frozen=True)
class NormalizedTopK:
    """Weights of the chosen experts that sum to 1 are those of a softmax over the chosen ones alone."""

    fields: tuple[str, ...] = ("norm_topk_prob",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        args.setdefault("moe_router_pre_softmax", not hf.get(self.fields[0], False))

    def write(self, config: TransformerConfig) -> Json:
        return {self.fields[0]: not config.moe_router_pre_softmax}


@dataclass(frozen=True)
class AuxiliaryLoss:
    """The weight of the load-balancing loss over a micro batch."""

    fields: tuple[str, ...] = ("router_aux_loss_coef",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        args.setdefault("moe_aux_loss_coeff", [float(hf.get(self.fields[0]) or 0.0)])
        args.setdefault("moe_router_load_balancing_type", ["aux_loss"])

    def write(self, config: TransformerConfig) -> Json:
        return {self.fields[0]: config.load_balancing.get("aux_loss", 0.0)}


@dataclass(frozen=True)
class ExpertLayers:
    """Every `decoder_sparse_step`-th layer has experts, counted from 1, but for those in `mlp_only_layers`."""

    fields: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        step, dense = hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
        pattern = [int((i + 1) % step == 0 and i not in dense) for i in range(args["num_layers"])]
        args.setdefault("moe_layer_freq", 1 if all(pattern) else pattern)

    def write(self, config: TransformerConfig) -> Json:
        dense = [number for number, on in enumerate(config.moe_layer_pattern) if not on]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class FullAttention:
    """No window in any layer."""

    fields: tuple[str, ...] = ("layer_types",)

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        kinds = set(hf.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"config.json: layer_types {sorted(kinds)} is not supported, only full_attention is")
        args.setdefault("window_size", None)

    def write(self, config: TransformerConfig) -> Json:
        return {}


@dataclass(frozen=True)
class Dropout:
    """Several fields, one argument: the first one counts, all are written."""

    argument: str
    fields: tuple[str, ...]
    default: float

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        value = hf.get(self.fields[0])
        args.setdefault(self.argument, self.default if value is None else float(value))

    def write(self, config: TransformerConfig) -> Json:
        return {field: getattr(config, self.argument) for field in self.fields}


@dataclass(frozen=True)
class Precision:
    """`dtype` (5.x) or `torch_dtype` (4.x); where both are missing the tensors tell."""

    fields: tuple[str, ...] = ("torch_dtype", "dtype")

    def read(self, hf: Mapping[str, Any], args: dict[str, Any]) -> None:
        name = str(hf.get("dtype") or hf.get("torch_dtype") or "auto").removeprefix("torch.")
        if name not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"config.json: dtype {name!r} is not supported, only float32, bfloat16 and float16 are")
        if name != "auto":
            args.setdefault("bf16", name == "bfloat16")
            args.setdefault("fp16", name == "float16")

    def write(self, config: TransformerConfig) -> Json:
        return {"torch_dtype": str(config.params_dtype).removeprefix("torch.")}


COMMON_RULES: tuple[Rule, ...] = (
    Copy("vocab_size", ("vocab_size",)),
    Copy("init_method_std", ("initializer_range",), 0.02),
    Precision(),
    Fixed("is_encoder_decoder", False),
    Fixed("add_cross_attention", False),
    Fixed("tie_encoder_decoder", False),
    Fixed("pruned_heads", {}),
    Fixed("per_layer_config", {}),
)

# Fields that describe files, tokens, generation or speed; none of them changes the logits.
_HARMLESS = """
    _name_or_path name_or_path _commit_hash architectures model_type transformers_version use_cache return_dict
    output_attentions output_hidden_states output_scores torchscript use_bfloat16 gradient_checkpointing is_decoder
    attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    experts_implementation output_router_logits chunk_size_feed_forward tie_last_hidden_states return_dict_in_generate
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    pretraining_tp summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p min_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss"""
HARMLESS = frozenset(_HARMLESS.split())


def read_config(
    hf: Mapping[str, Any], rules: tuple[Rule, ...], harmless: Collection[str], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of the model in `hf`; `args` were given by the user and win.

    Raises ValueError for a field that is not known, missing or of an unsupported value.
    """
    known = HARMLESS.union(harmless, *(rule.fields for rule in rules))
    unknown = sorted(name for name, value in hf.items() if value is not None and name not in known)
    if unknown:
        listed = ", ".join(f"{printable(name)} = {shown(hf[name])}" for name in unknown)
        raise ValueError(
            f"config.json has fields that are not supported and may change what the model computes: {listed}. "
            f"If they do not, convert it with --hf-ignore-fields {printable(' '.join(unknown))}"
        )
    result = dict(args)
    for rule in rules:
        rule.read(hf, result)
    return result


def write_config(config: TransformerConfig, rules: tuple[Rule, ...]) -> Json:
    fields: Json = {}
    for rule in rules:
        fields |= rule.write(config)
    return fields
