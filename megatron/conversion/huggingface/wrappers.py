"""All multimodal models of transformers whose language model is supported.

Before you add a wrapper, confirm in its modeling code and with a test that it computes the same
function of text as a family of this program: all sections of a rope have equal positions, tokens
attend only to earlier ones, and hidden states and logits are those of the language model.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.conversion.huggingface import dense_families as dense
from megatron.conversion.huggingface import expert_families as experts
from megatron.conversion.huggingface import latent_families as latent
from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.attention_rules import heads
from megatron.conversion.huggingface.common_rules import GATED_RULES, RMS_NORM
from megatron.conversion.huggingface.config_fields import Json
from megatron.conversion.huggingface.expert_rules import (
    AUXILIARY_LOSS,
    EXPERT_LAYERS,
    EXPERTS_PER_TOKEN,
    NORMALIZED_WEIGHTS,
)
from megatron.conversion.huggingface.families import FAMILIES
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.rope_rules import rope, with_sections
from megatron.conversion.huggingface.rules import ATTENTION, biases, copied, fixed, implied
from megatron.conversion.huggingface.window_rules import FULL_ATTENTION
from megatron.conversion.huggingface.wrapper import TEXT_CONFIG, Prefixes, Wrapper
from megatron.core.terminal import escape_control_chars

# ---- Language models that only wrappers have ----

# Tokens of images, which some releases repeat among the fields of the language model.
_TOKENS = """
    image_token_id image_start_token_id image_end_token_id video_token_id video_start_token_id
    video_end_token_id vision_token_id vision_start_token_id vision_end_token_id"""
_SECTIONED_ROPE = with_sections(rope(spelled_out=True))
_QWEN3_RULES = (
    *GATED_RULES,
    *RMS_NORM,
    _SECTIONED_ROPE,
    heads(),
    biases(attention_bias=ATTENTION),
    implied(qk_layernorm=True),
    FULL_ATTENTION,
)


def _adapt(family: Family, model_type: str) -> Family:
    """Return `family` under another `model_type`, with a rope in sections."""
    rules = []
    for rule in family.rules:
        rules.append(with_sections(rule) if "rope_scaling" in rule.fields else rule)
    harmless = f"{family.harmless} {_TOKENS}"
    return replace(family, model_type=model_type, rules=tuple(rules), harmless=harmless)


# Its wrapper does not cap the logits.
GEMMA3 = replace(dense.GEMMA3, rules=(fixed("final_logit_softcapping", None), *dense.GEMMA3.rules))
QWEN2_VL = _adapt(dense.QWEN2, "qwen2_vl_text")
QWEN2_5_VL = _adapt(dense.QWEN2, "qwen2_5_vl_text")
QWEN3_VL = Family(
    "qwen3_vl_text",
    "Qwen3VLForConditionalGeneration",
    rows.QWEN3_ROWS,
    _QWEN3_RULES,
    harmless=_TOKENS,
)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe_text",
    "Qwen3VLMoeForConditionalGeneration",
    rows.QWEN3_VL_MOE_ROWS,
    (
        *_QWEN3_RULES,
        EXPERTS_PER_TOKEN,
        AUXILIARY_LOSS,
        copied("num_experts", "num_experts", "num_local_experts"),
        copied("moe_ffn_hidden_size", "moe_intermediate_size"),
        NORMALIZED_WEIGHTS,
        fixed("norm_topk_prob", True),
        EXPERT_LAYERS,
    ),
    harmless=_TOKENS,
)
GLM4V = Family(
    "glm4v_text",
    "Glm4vForConditionalGeneration",
    rows.GLM4_ROWS,
    (
        *GATED_RULES,
        *RMS_NORM,
        with_sections(rope(partial=True, spelled_out=True)),
        heads(always_written=False),
        fixed("attention_bias", True),
        implied(
            add_bias_linear=False,
            add_qkv_bias=True,
            rotary_interleaved=True,
            norm_placement="both",
        ),
        FULL_ATTENTION,
    ),
    harmless=_TOKENS,
)
_GLM4_MOE = _adapt(experts.GLM4_MOE, "glm4v_moe_text")
GLM4V_MOE = replace(
    _GLM4_MOE,
    rules=(implied(qk_layernorm=False), fixed("use_qk_norm", False), *_GLM4_MOE.rules),
    harmless=f"{_GLM4_MOE.harmless} router_aux_loss_coef",
)
HUNYUAN_VL = _adapt(dense.HUNYUAN_V1_DENSE, "hunyuan_vl_text")

# ---- Wrappers ----

_OLD = Prefixes("language_model.model.", "language_model.")
_NEW = Prefixes("model.language_model.")
_BARE = Prefixes("model.")
_TEXT_MODEL = Prefixes("model.text_model.")
# Language models of wrappers for any of them. Their results must not be scaled or capped after the
# head, because these wrappers leave that out.
_ANY = (
    *(dense.LLAMA, dense.MISTRAL, dense.MINISTRAL3, dense.QWEN2, dense.QWEN3, dense.PHI3),
    *(dense.SMOLLM3, dense.OLMO2, dense.EXAONE4, dense.SEED_OSS),
    *(experts.QWEN3_MOE, experts.MIXTRAL, experts.GPT_OSS, latent.DEEPSEEK_V3, latent.MISTRAL4),
)


def _list_language_models(default: Family) -> tuple[Family, ...]:
    """Return the language models of a wrapper with this default."""
    return default, *(family for family in _ANY if family is not default)


_QWEN_FIELDS = (
    *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)
WRAPPERS = (
    Wrapper("gemma3", (GEMMA3,), (_OLD, _NEW)),
    Wrapper("mistral3", _list_language_models(dense.MISTRAL), (_OLD, _NEW)),
    Wrapper("qwen3_vl", (QWEN3_VL,), (_NEW,)),
    Wrapper("qwen3_vl_moe", (QWEN3_VL_MOE,), (_NEW,)),
    Wrapper("qwen2_5_vl", (QWEN2_5_VL,), (_NEW, _BARE), _QWEN_FIELDS),
    Wrapper("qwen2_vl", (QWEN2_VL,), (_NEW, _BARE), _QWEN_FIELDS),
    Wrapper("qwen3_5", (dense.QWEN3_5,), (_NEW,)),
    Wrapper("qwen3_5_moe", (experts.QWEN3_5_MOE,), (_NEW,)),
    Wrapper("llava", _list_language_models(dense.LLAMA), (_OLD, _NEW)),
    Wrapper("llava_next", _list_language_models(dense.LLAMA), (_OLD, _NEW)),
    Wrapper("llava_onevision", _list_language_models(dense.QWEN2), (_OLD, _NEW)),
    Wrapper("internvl", _list_language_models(dense.QWEN2), (_OLD, _NEW)),
    Wrapper("glm4v", (GLM4V,), (_NEW,)),
    Wrapper("glm46v", (GLM4V, GLM4V_MOE), (_NEW,)),
    Wrapper("glm4v_moe", (GLM4V_MOE,), (_NEW,)),
    Wrapper("kimi_k25", (latent.DEEPSEEK_V3,), (_OLD,)),
    Wrapper("hunyuan_vl", (HUNYUAN_VL,), (_NEW, _BARE)),
    Wrapper("idefics3", _list_language_models(dense.LLAMA), (_TEXT_MODEL,)),
    Wrapper("smolvlm", _list_language_models(dense.LLAMA), (_TEXT_MODEL,)),
    Wrapper("exaone4_5", (dense.EXAONE4,), (_NEW,)),
    Wrapper("ovis2", _list_language_models(dense.QWEN2), (_NEW,)),
    Wrapper("llava_next_video", _list_language_models(dense.LLAMA), (_OLD, _NEW)),
    Wrapper("video_llava", _list_language_models(dense.LLAMA), (_OLD, _NEW)),
    Wrapper("vipllava", _list_language_models(dense.LLAMA), (_OLD, _NEW)),
    Wrapper("idefics2", _list_language_models(dense.MISTRAL), (_TEXT_MODEL,)),
    Wrapper("lighton_ocr", _list_language_models(dense.QWEN3), (_NEW,)),
    Wrapper("got_ocr2", _list_language_models(dense.QWEN2), (_OLD, _NEW)),
    Wrapper("deepseek_vl", _list_language_models(dense.LLAMA), (_NEW,)),
    Wrapper("aria", (experts.ARIA_TEXT,), (_OLD, _NEW)),
    Wrapper("qwen2_audio", _list_language_models(dense.QWEN2), (_OLD, _NEW)),
)

# Wrappers that are not supported -> the reason.
_DIFFERING = {
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision"), "transformers leaves out the scaling of its logits"
    ),
    "ernie4_5_vl_moe": "experts of text and images share tensors",
    "paligemma": "tokens of a prompt see later ones",
    "mllama": "cross-attention to images",
}


def find_wrapper(hf: Json) -> Wrapper | None:
    """Return the wrapper that config.json names; None for a language model.

    Raises ValueError for any other multimodal model.
    """
    model_type = hf.get("model_type")
    for wrapper in WRAPPERS:
        if model_type == wrapper.model_type:
            return wrapper
    is_family = any(model_type in (family.model_type, *family.aliases) for family in FAMILIES)
    if is_family or not isinstance(model_type, str) or hf.get(TEXT_CONFIG) is None:
        return None
    supported = ", ".join(wrapper.model_type for wrapper in WRAPPERS)
    reason = f" ({_DIFFERING[model_type]})" if model_type in _DIFFERING else ""
    raise ValueError(
        f"config.json: the multimodal model_type {escape_control_chars(model_type)!r} is not "
        f"supported{reason}; supported are {supported}"
    )


def find_text_family(model_type: str | None) -> Family | None:
    """Return the family that only wrappers have with this `model_type`, None for any other."""
    for wrapper in WRAPPERS:
        for family in wrapper.families:
            if family not in FAMILIES and family.model_type == model_type:
                return family
    return None


def remove_wrapper_prefix(name: str) -> str:
    """Return the language model's own name of a tensor that any wrapper may contain."""
    for prefixes in (_OLD, _NEW, _TEXT_MODEL):
        name = prefixes.remove(name)
    return name
