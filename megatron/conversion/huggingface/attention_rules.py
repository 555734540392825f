"""Rules for attention: heads, windows and the scale of the scores."""

from __future__ import annotations

from megatron.conversion.huggingface.config_fields import HARMLESS, ConfigFields, Json
from megatron.conversion.huggingface.rules import Rule, unsupported
from megatron.conversion.huggingface.stored_parameters import CODEGEN_BLOCKS
from megatron.conversion.huggingface.window_rules import LAYER_TYPES
from megatron.core.safe_files.schema import COUNT, boolean, number, optional, record
from megatron.core.transformer.transformer_config import TransformerConfig


def _make_groups(groups: int, count: int) -> Json:
    """Return the arguments for key/value heads of a model with `count` query heads."""
    return {"num_query_groups": groups, "group_query_attention": groups != count}


def heads(always_written: bool = True, free_width: bool = True) -> Rule:
    """Map the number of key/value heads and the width of a head.

    Null means one key/value head per query head, and hidden_size / heads as the width. That width
    is written only if `always_written`. Without `free_width` no other width is accepted.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        # Without key/value heads every query head has its own.
        count = args["num_attention_heads"]
        groups = args.get("num_query_groups") or hf_config.get("num_key_value_heads") or count
        result = _make_groups(groups, count)
        width = hf_config.get("head_dim")
        if width is not None:
            if not free_width and width * count != args["hidden_size"]:
                supported = (
                    f"hidden_size / num_attention_heads = {args['hidden_size']} / {count} is"
                )
                raise unsupported("head_dim", width, supported)
            result["kv_channels"] = width
        return result

    def write(config: TransformerConfig) -> Json:
        result = {"num_key_value_heads": config.query_groups}
        is_implied = config.head_dim * config.num_attention_heads == config.hidden_size
        if always_written or (free_width and not is_implied):
            result["head_dim"] = config.head_dim
        return result

    return Rule({"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels"}, read, write)


def _read_no_groups(hf_config: ConfigFields, args: Json) -> Json:
    groups = hf_config.stated.get("num_key_value_heads")
    count = args["num_attention_heads"]
    if groups not in (None, count):
        raise unsupported("num_key_value_heads", groups, f"num_attention_heads = {count} is")
    return {"group_query_attention": False}


def _write_no_groups(config: TransformerConfig) -> Json:
    return {"num_key_value_heads": config.num_attention_heads}


def _check_codegen_heads(hf_config: ConfigFields, args: Json) -> Json:
    count = args["num_attention_heads"]
    if count % CODEGEN_BLOCKS:
        raise unsupported("n_head", count, f"a multiple of {CODEGEN_BLOCKS} is")
    return {}


CODEGEN_HEADS = Rule({}, _check_codegen_heads)
NO_GROUPS = Rule({"num_key_value_heads": "num_query_groups"}, _read_no_groups, _write_no_groups)


def _implied_head_dim(*fields: str) -> Rule:
    """Accept only the sum of other fields as `head_dim`."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        width = hf_config.stated.get("head_dim")
        implied_width = sum(map(hf_config.first, fields))
        if width not in (None, implied_width):
            raise unsupported("head_dim", width, f"{' + '.join(fields)} = {implied_width} is")
        return {}

    return Rule({"head_dim": COUNT}, read)


# transformers takes the rotary frequencies of this width.
LATENT_HEAD_DIM = _implied_head_dim("qk_rope_head_dim")
# Mistral 4 states the width of a whole head, and the rotated fraction of it.
WHOLE_HEAD_DIM = _implied_head_dim("qk_nope_head_dim", "qk_rope_head_dim")


def _read_query_scalar(hf_config: ConfigFields, args: Json) -> Json:
    return {"softmax_scale": hf_config.first("query_pre_attn_scalar") ** -0.5}


def _write_query_scalar(config: TransformerConfig) -> Json:
    # transformers accepts whole numbers only.
    return {"query_pre_attn_scalar": round(config.score_scale**-2)}


QUERY_SCALAR = Rule({"query_pre_attn_scalar": number(1)}, _read_query_scalar, _write_query_scalar)


def _read_attention_multiplier(hf_config: ConfigFields, args: Json) -> Json:
    factor = hf_config.first("attention_multiplier")
    if factor is None:
        head_dim = args.get("kv_channels") or args["hidden_size"] // args["num_attention_heads"]
        factor = head_dim**-0.5
    return {"softmax_scale": factor}


def _write_attention_multiplier(config: TransformerConfig) -> Json:
    return {"attention_multiplier": config.score_scale}


ATTENTION_MULTIPLIER = Rule(
    {"attention_multiplier": number(0)}, _read_attention_multiplier, _write_attention_multiplier
)


def _read_multi_query(hf_config: ConfigFields, args: Json) -> Json:
    count = args["num_attention_heads"]
    return _make_groups(1 if hf_config.first("multi_query") else count, count)


def _write_multi_query(config: TransformerConfig) -> Json:
    return {"multi_query": config.query_groups == 1}


# One key/value head for all query heads, or one for each.
MULTI_QUERY = Rule({"multi_query": boolean}, _read_multi_query, _write_multi_query)


# Layers of Falcon. Its old architecture has one norm if attention and MLP are parallel, and one
# key/value head or one per query head.


def _read_falcon_layers(hf_config: ConfigFields, args: Json) -> Json:
    count = args["num_attention_heads"]
    norms = hf_config.get("num_ln_in_parallel_attn")
    is_new = bool(hf_config.first("new_decoder_architecture"))
    is_parallel = bool(hf_config.first("parallel_attn"))
    # Falcon 40B and later have query groups and up to two norms, Falcon 7B and 1B neither.
    if is_new:
        if not is_parallel:
            raise unsupported("parallel_attn", False, "True is with new_decoder_architecture")
        groups = hf_config.get("num_kv_heads") or count
        norms = 2 if norms is None else norms
        accepted: tuple[int, ...] = (1, 2)
    else:
        groups = 1 if hf_config.first("multi_query") else count
        norms = 1 if norms is None else norms
        accepted = (1,)
        stated = hf_config.stated.get("num_kv_heads")
        if groups != 1 and stated not in (None, groups):
            raise unsupported("num_kv_heads", stated, f"num_attention_heads = {count} is")
    if norms not in accepted:
        raise unsupported("num_ln_in_parallel_attn", norms, f"{accepted[-1]} is")
    return _make_groups(groups, count) | {
        "parallel_residual": is_parallel,
        "share_parallel_norm": is_parallel and norms == 1,
    }


def _write_falcon_layers(config: TransformerConfig) -> Json:
    if not config.parallel_residual:
        return {
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "multi_query": config.query_groups == 1,
        }
    return {
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "num_kv_heads": config.query_groups,
        "num_ln_in_parallel_attn": 1 if config.share_parallel_norm else 2,
    }


FALCON_LAYERS = Rule(
    {
        "new_decoder_architecture": boolean,
        "parallel_attn": boolean,
        "multi_query": boolean,
        "num_kv_heads": "num_query_groups",
        "num_ln_in_parallel_attn": COUNT,
    },
    _read_falcon_layers,
    _write_falcon_layers,
)


def _read_alibi(hf_config: ConfigFields, args: Json) -> Json:
    if not hf_config.first("alibi"):
        return {}
    return {"position_embedding_type": "alibi", "scale_alibi": True}


def _write_alibi(config: TransformerConfig) -> Json:
    return {"alibi": config.position_embedding_type == "alibi"}


# ALiBi instead of RoPE, whose rule follows. Its biases are scaled like the scores.
SWITCHED_ALIBI = Rule({"alibi": boolean}, _read_alibi, _write_alibi)


_INDEXED_KINDS = ("indexed_attention", "deepseek_sparse_attention")


def _read_indexed_layers(hf_config: ConfigFields, args: Json) -> Json:
    unsupported_types = set(hf_config.first("layer_types") or ()) - set(_INDEXED_KINDS)
    if unsupported_types:
        raise unsupported("layer_types", sorted(unsupported_types), f"{_INDEXED_KINDS[0]} is")
    return {}


# Layers whose indexer chooses the tokens to attend to.
INDEXED_LAYERS = Rule(LAYER_TYPES, _read_indexed_layers)


# Attention of MPT, which config.json describes in a dictionary.

# The only values that transformers computes.
_MPT_CONSTANTS = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
_MPT_FIELDS = record(
    {
        "attn_pdrop?": optional(number(0, 1)),
        "softmax_scale?": optional(number(1e-9)),
        "clip_qkv?": optional(number(0)),
    }
)
_MPT_NAMES = {"attn_pdrop", "softmax_scale", "clip_qkv", *_MPT_CONSTANTS}
# The choice of a kernel, and fields that transformers adds to every configuration.
_MPT_HARMLESS = {"attn_impl", "dtype", "is_encoder_decoder", *HARMLESS.split()}


def _read_mpt_attention(hf_config: ConfigFields, args: Json) -> Json:
    stated = hf_config.stated.get("attn_config") or {}
    for name, value in stated.items():
        if name not in _MPT_NAMES | _MPT_HARMLESS and value is not None:
            raise unsupported(f"attn_config.{name}", value, f"{', '.join(sorted(_MPT_NAMES))} are")
        if name in _MPT_CONSTANTS and value != _MPT_CONSTANTS[name]:
            raise unsupported(f"attn_config.{name}", value, f"{_MPT_CONSTANTS[name]} is")
    return {
        "attention_dropout": float(stated.get("attn_pdrop") or 0.0),
        "softmax_scale": stated.get("softmax_scale"),
        "clip_qkv": stated.get("clip_qkv") or None,  # 0 means no limit
    }


def _write_mpt_attention(config: TransformerConfig) -> Json:
    fields: Json = {"alibi": True, "softmax_scale": config.score_scale}
    if config.clip_qkv is not None:
        fields["clip_qkv"] = config.clip_qkv
    return {"attn_config": fields}


MPT_ATTENTION = Rule({"attn_config": _MPT_FIELDS}, _read_mpt_attention, _write_mpt_attention)
