"""All model families of transformers, and the choice of one for a model.

To add a family, copy a row of `dense_families`, `ungated_families`, `expert_families` or
`latent_families` and name it in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron.conversion.huggingface import dense_families as dense
from megatron.conversion.huggingface import expert_families as experts
from megatron.conversion.huggingface import latent_families as latent
from megatron.conversion.huggingface import ungated_families as ungated
from megatron.conversion.huggingface.config_fields import Json
from megatron.conversion.huggingface.family import Family, has_foreign_mixers
from megatron.conversion.model_space.foreign import format_layers
from megatron.core.safe_files.schema import optional, record, sequence, text
from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import TransformerConfig

# In order of preference for an export: the first that can express a model is taken.
FAMILIES = (
    *(dense.LLAMA, dense.MISTRAL, dense.PHI3, dense.QWEN2, dense.QWEN3, dense.OLMO2),
    *(dense.GEMMA2, dense.GEMMA3, dense.GEMMA, ungated.ARCEE),
    *(experts.MIXTRAL, experts.QWEN2_MOE, experts.QWEN3_MOE, experts.OLMOE, experts.GPT_OSS),
    *(latent.DEEPSEEK_V2, latent.DEEPSEEK_V3),
    *(ungated.GPT2, ungated.BLOOM),
    *(dense.MINISTRAL, dense.CWM, dense.SEED_OSS, dense.ERNIE4_5, dense.HELIUM, dense.OLMO3),
    *(dense.GLM, dense.GLM4, dense.VAULTGEMMA, ungated.JAIS2, ungated.NEMOTRON, ungated.PERSIMMON),
    *(dense.STABLELM, ungated.STARCODER2, ungated.GPT_BIGCODE, ungated.GPT_NEO),
    *(experts.GLM4_MOE, latent.GLM4_MOE_LITE, experts.SOLAR_OPEN, experts.DOTS1),
    *(experts.MINIMAX_M2, experts.MELLUM),
    *(dense.SMOLLM3, dense.EXAONE4, dense.GRANITE, experts.GRANITEMOE),
    *(ungated.GPT_NEOX, dense.COHERE, dense.COHERE2, ungated.FALCON),
    *(ungated.GPTJ, ungated.CODEGEN, ungated.PHI, ungated.APERTUS),
    *(dense.MINISTRAL3, dense.INTERNLM3, dense.IQUESTCODER, dense.HYPERCLOVAX, ungated.MPT),
    *(dense.GRANITE_SWA, experts.GRANITEMOE_SWA, experts.GRANITEMOESHARED),
    *(experts.GRANITEMOEHYBRID, latent.YOUTU, experts.HY_V3, experts.EXAONE_MOE),
    *(experts.ARIA_TEXT, latent.DEEPSEEK_V32, latent.GLM_MOE_DSA),
    *(dense.HUNYUAN_V1_DENSE, experts.HUNYUAN_V1_MOE, experts.ERNIE4_5_MOE),
    *(experts.QWEN3_NEXT, dense.QWEN3_5, experts.QWEN3_5_MOE, dense.LFM2, experts.LFM2_MOE),
    *(dense.BAMBA, experts.JAMBA),
    *(dense.OLMO, ungated.OPT, ungated.BIOGPT, ungated.NANOCHAT),
    *(experts.FLEX_OLMO, experts.AFMOE, experts.FLINT, latent.MISTRAL4, experts.COHERE2_MOE),
)

# Models that are not supported -> the part that our model does not have.
_LACKING = {
    # Attention
    **dict.fromkeys(("llama4", "llama4_text"), "attention in chunks, and experts of scaled inputs"),
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma4_unified_text"),
        "another head width in layers without a window, and norms of values",
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "embeddings of each layer, and AltUp"),
    "minicpm3": "latent attention that rotates halves of heads",
    "mimo_v2_flash": "values of another width than keys, and twice as many of them in windows",
    **dict.fromkeys(("laguna", "step3p5"), "another number of heads in layers with a window"),
    "beam": "residual connections that are scaled by depth",
    "longcat_flash": "two attentions in each layer, and experts without computation",
    "minimax": "lightning attention",
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), "linear attention"),
    **dict.fromkeys(("minimax_m3_vl_text", "mistral_large4_text"), "sparse indexers"),
    "axk2": "sparse indexers, and gates of norms",
    **dict.fromkeys(("deepseek_v4", "hy_v4"), "hyper-connections"),
    "diffllama": "differential attention",
    "doge": "dynamic masks",
    "jetmoe": "experts in attention",
    "zaya": "convolutions in attention",
    "lfm3": "short convolutions",
    "olmo_hybrid": "gated delta nets",
    # Norms, positions and experts
    "bitnet": "ternary weights, and norms before output projections",
    "openai-gpt": "norms on the residual stream",
    "modernbert-decoder": "a first layer without a norm, and gates with the exact GELU",
    "gpt_neox_japanese": "a bias in the last layer only",
    **dict.fromkeys(("xglm", "ctrl"), "sinusoidal positions"),
    "dbrx": "a base of RoPE that transformers 4 and 5 read differently",
    "axk1": "norms after experts only",
    "kolibri1": "a bias of experts that is added to logits instead of scores",
    "phimoe": "experts that are chosen one after the other",
    "hrm_text": "layers that are applied several times",
    **dict.fromkeys(
        ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h", "zamba", "zamba2"),
        "state space layers",
    ),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), "recurrent layers"),
}

_KNOWN_LAYERS = ("attention", "full_attention", "sliding_attention")

_NAMES = record(
    {"model_type?": optional(text(256)), "architectures?": optional(sequence(text(256), 10**5))}
)


def find_family(hf: Json) -> Family:
    """Return the family that config.json names. Raises ValueError for any other model."""
    _NAMES(hf, "config.json")
    model_type = hf.get("model_type")
    architectures = hf.get("architectures") or []
    for family in FAMILIES:
        if model_type in (family.model_type, *family.aliases):
            break
        if not model_type and family.architecture in architectures:
            break
    else:
        reason = _describe_layers(hf)
        if not reason and model_type in _LACKING:
            reason = f" (it has {_LACKING[model_type]})"
        supported = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported{reason}; "
            f"supported are {supported}"
        )

    # The architecture is the class with the language model head, or the base model.
    base_name = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    accepted = {family.architecture, f"{base_name}Model", *family.other_architectures}
    if architectures and accepted.isdisjoint(architectures):
        raise ValueError(
            f"config.json: architecture {escape_control_chars(architectures[0])} is not "
            f"{family.architecture}: not supported"
        )
    return family


def _describe_layers(hf: Json) -> str:
    """Return which layers are of a kind that our model does not have, for a message."""
    check_kinds = optional(sequence(text(256), 10**5))
    for field in ("layer_types", "layers_block_type"):
        layer_types = check_kinds(hf.get(field), f"config.json: {field}") or []
        by_kind: dict[str, list[int]] = {}
        for layer, layer_type in enumerate(layer_types):
            if layer_type not in _KNOWN_LAYERS:
                by_kind.setdefault(layer_type, []).append(layer)
        if by_kind:
            listed = []
            for layer_type, layers in by_kind.items():
                listed.append(
                    f"{escape_control_chars(layer_type)} in layers {format_layers(layers)}"
                )
            return f" (it has {' and '.join(listed)}, which the trainer does not have)"
    return ""


def choose_family(
    config: TransformerConfig,
    preferred: str | None,
    foreign: Collection[str] = (),
    imported: Mapping[str, Any] | None = None,
) -> Family:
    """Return the first family that can express the model, trying `preferred` before the others.

    `foreign` are the names of tensors that our model does not have. A model with foreign mixers can
    only be of the `preferred` family, which it was `imported` as. Raises ValueError with the
    obstacles of the closest family.
    """
    obstacles: dict[str, list[str]] = {}
    is_partial = has_foreign_mixers(config)
    # Sorting is stable: only the preferred family moves to the front.
    for family in sorted(FAMILIES, key=lambda family: family.model_type != preferred):
        if family.indexer is not None and not any(family.indexer in name for name in foreign):
            continue
        if is_partial:
            is_candidate = family.model_type == preferred
        else:
            is_candidate = not family.has_foreign_attention
        if not is_candidate:
            continue
        family_obstacles = family.find_obstacles(config, imported)
        if not family_obstacles:
            return family
        obstacles[family.model_type] = family_obstacles
    if not obstacles:
        raise ValueError(
            "a model with foreign token mixers can only be written as the family that it was read "
            f"from, and {preferred} is not supported"
        )
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    raise ValueError(
        "none of the supported models of transformers computes the same as this one. The closest, "
        f"{nearest}, has {'; '.join(obstacles[nearest])}. Write the model in another format "
        "(torch_dist, legacy or universal), or change these properties"
    )
