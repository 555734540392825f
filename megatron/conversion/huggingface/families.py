"""The model families of transformers as tables: rows for parameters, rules for config fields, with
their inverses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.parameters import Row
from megatron.conversion.huggingface.rules import (
    AUXILIARY_LOSS,
    COMMON_RULES,
    DEEPSEEK_V2_EXPERTS,
    DEEPSEEK_V3_EXPERTS,
    EXPERT_LAYERS,
    FULL_ATTENTION,
    GELU,
    NO_GROUPS,
    QUERY_SCALAR,
    QWEN_WINDOW,
    TWO_ROPES,
    Json,
    Rule,
    alternating_windows,
    always,
    biases,
    copied,
    feed_forward,
    fixed,
    heads,
    implied,
    nullable,
    opposite,
    rope,
    sliding_window,
)
from megatron.conversion.model_space.source import MODEL_ARGUMENTS
from megatron.core.dist_checkpointing.format.schema import (
    format_value,
    optional,
    record,
    sequence,
    text,
)
from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    TransformerConfig,
    compute_model_signature,
)

# Fields that describe files, tokens, generation or speed; none of them changes the logits.
HARMLESS = """
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


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Rows for parameters that no model of the family has do no harm: `obstacles` compares whole
    models.
    """

    model_type: str
    architecture: str  # the class with the language model head
    rows: Mapping[str, Row]
    rules: tuple[Rule, ...]
    harmless: str = ""  # fields of this family that change nothing
    layers: str = "model.layers."  # the names of layers begin with it
    whole_heads: bool = (
        False  # transformers insists that heads divide hidden_size, whatever head_dim is
    )

    @property
    def prefix(self) -> str:
        """Of the base model's names; files of the base model alone lack it."""
        return self.layers.partition(".")[0] + "."

    def read_config(
        self, hf: Json, args: Mapping[str, Any], ignored: Collection[str] = ()
    ) -> dict[str, Any]:
        """Arguments of the model in `hf`; `args` were given by the user and win.

        Raises ValueError for a field that is not known, missing or of an unsupported value.
        """
        # A field that nobody reads may still change the model, so all must be known before any is
        # used.
        rules = COMMON_RULES + self.rules
        checks = {field: check for rule in rules for field, check in rule.fields.items()}
        known = {*HARMLESS.split(), *self.harmless.split(), *ignored, *checks}
        unknown = sorted(
            name for name, value in hf.items() if value is not None and name not in known
        )
        if unknown:
            listed = ", ".join(
                f"{escape_control_chars(name)} = {format_value(hf[name])}" for name in unknown
            )
            raise ValueError(
                f"config.json has fields that are not supported and may change what the model computes: {listed}. "
                f"If they do not, convert it with --hf-ignore-fields {escape_control_chars(' '.join(unknown))}"
            )
        typed = {
            name: MODEL_ARGUMENTS[check] if isinstance(check, str) else check
            for name, check in checks.items()
        }
        record({f"{name}?": optional(check) for name, check in typed.items()})(hf, "config.json")
        result = dict(args)
        for rule in rules:
            result = {**rule.read(hf, result), **result}
        return result

    def write_config(self, config: TransformerConfig) -> Json:
        fields = {
            name: value
            for rule in COMMON_RULES + self.rules
            for name, value in rule.write(config).items()
        }
        return {"architectures": [self.architecture], "model_type": self.model_type} | fields

    def obstacles(self, config: TransformerConfig) -> list[str]:
        """What of the model this family cannot express: config.json is written, read back and
        compared.
        """
        wanted = compute_model_signature(config)
        # Written fields are read back as if from a file. GPT-2 requires a length, which not every
        # model has.
        usual = {"kv_channels": config.hidden_size // config.num_attention_heads}
        args = usual | self.read_config(
            {"n_positions": 0} | self.write_config(config), {}, ("n_positions",)
        )
        try:
            got = compute_model_signature(TransformerConfig(**(args | LOCAL_BACKEND_FIELDS)))
        except ValueError as error:  # what the family implies does not go with this model
            differing = [
                f"{name} = {wanted[name]}"
                for name in wanted
                if args.get(name, wanted[name]) != wanted[name]
            ]
            return [*str(error).splitlines(), *differing]
        if self.whole_heads and config.hidden_size % config.num_attention_heads:
            got["num_attention_heads"] = None
        return [f"{name} = {wanted[name]}" for name in wanted if wanted[name] != got[name]]


_NO_BIAS = implied(add_bias_linear=False)
_SIZE_RULES: tuple[Rule, ...] = (
    copied("num_layers", "num_hidden_layers"),
    copied("hidden_size", "hidden_size"),
    copied("num_attention_heads", "num_attention_heads"),
    copied("ffn_hidden_size", "intermediate_size"),
    copied("max_position_embeddings", "max_position_embeddings", default=None),
    copied("attention_dropout", "attention_dropout", default=0.0),
    implied(normalization="RMSNorm", position_embedding_type="rope"),
)
_GATED_RMS_RULES: tuple[Rule, ...] = (
    *_SIZE_RULES,
    fixed("hidden_act", "silu", "swish", written=True),
    opposite("untie_embeddings_and_output_weights", "tie_word_embeddings", False),
    implied(swiglu=True),
)
_LLAMA_RULES = (
    *_GATED_RMS_RULES,
    copied("norm_epsilon", "rms_norm_eps", default=1e-6),
    rope(),
    implied(hidden_dropout=0.0),
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    rows.LLAMA_ROWS,
    (*_LLAMA_RULES, heads(None), biases("attention_bias", "mlp_bias"), FULL_ATTENTION),
    whole_heads=True,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    rows.LLAMA_ROWS,
    (*_LLAMA_RULES, heads(8), _NO_BIAS, sliding_window(4096)),
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    rows.PHI3_ROWS,
    (
        *_GATED_RMS_RULES,
        copied("norm_epsilon", "rms_norm_eps", default=1e-5),
        rope(partial=True),
        copied("hidden_dropout", "resid_pdrop", "embd_pdrop", default=0.0, write_all=True),
        heads(None, always=False),
        _NO_BIAS,
        sliding_window(None),
    ),
    "original_max_position_embeddings",  # of a scaled rope
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    rows.LLAMA_ROWS,
    (
        *_LLAMA_RULES,
        heads(32, always=False),
        implied(add_bias_linear=False, add_qkv_bias=True),
        QWEN_WINDOW,
        fixed("use_mrope", False),
    ),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    rows.QWEN3_ROWS,
    (
        *_LLAMA_RULES,
        heads(32, 128),
        biases("attention_bias"),
        QWEN_WINDOW,
        implied(qk_layernorm=True),
    ),
)
_OLMO_RULES = (
    *_GATED_RMS_RULES,
    copied("norm_epsilon", "rms_norm_eps", default=1e-5),
    rope(),
    implied(hidden_dropout=0.0),
    heads(None, always=False),
    _NO_BIAS,
    *always(attention_bias=False),
    implied(qk_layernorm=True, qk_layernorm_across_heads=True),
)
OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", rows.OLMO2_ROWS, (*_OLMO_RULES, implied(norm_placement="post"))
)
_GEMMA_RULES = (
    *_SIZE_RULES,
    copied("norm_epsilon", "rms_norm_eps", default=1e-6),
    opposite("untie_embeddings_and_output_weights", "tie_word_embeddings", True),
    *always(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
    fixed("use_bidirectional_attention", False),
    heads(4, 256),
    _NO_BIAS,
    QUERY_SCALAR,
    implied(
        geglu=True,
        norm_placement="both",
        apply_layernorm_1p=True,
        scale_embeddings=True,
        hidden_dropout=0.0,
    ),
)
_OF_GEMMA = "cache_implementation hidden_act"
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    rows.GEMMA_ROWS,
    (
        *_GEMMA_RULES,
        rope(),
        alternating_windows(2),
        nullable("attn_logit_softcapping", 50.0),
        nullable("final_logit_softcapping", 30.0),
    ),
    _OF_GEMMA,
    whole_heads=True,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    rows.GEMMA_ROWS,
    (
        *_GEMMA_RULES,
        TWO_ROPES,
        alternating_windows(6),
        nullable("final_logit_softcapping", None),
        implied(qk_layernorm=True),
    ),
    f"{_OF_GEMMA} attn_logit_softcapping",  # which its attention does not read
    whole_heads=True,
)
_GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _experts(count: Rule, width: str, **default: Any) -> tuple[Rule, ...]:
    """`count` is the rule of their number, `width` the field of their inner width."""
    chosen = copied("moe_router_topk", "num_experts_per_tok")
    return chosen, AUXILIARY_LOSS, count, copied("moe_ffn_hidden_size", width, **default)


_NUMBER = ("num_experts", "num_local_experts")
_QWEN_EXPERT_RULES = (
    *_experts(copied("num_experts", *_NUMBER, default=None), "moe_intermediate_size", default=None),
    # Weights of the chosen experts that sum to 1 are those of a softmax over the chosen ones alone.
    opposite("moe_router_pre_softmax", "norm_topk_prob", False),
    EXPERT_LAYERS,
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    rows.MIXTRAL_ROWS,
    (
        *_LLAMA_RULES,
        *_experts(copied("num_experts", "num_local_experts", default=None), "intermediate_size"),
        heads(8),
        _NO_BIAS,
        sliding_window(None),
        fixed("router_jitter_noise", 0.0),
    ),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    rows.LLAMA_ROWS,
    (
        *QWEN2.rules,
        *_QWEN_EXPERT_RULES,
        copied(
            "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=None
        ),
        implied(moe_shared_expert_gate=True),
        fixed("qkv_bias", True),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", rows.QWEN3_ROWS, (*QWEN3.rules, *_QWEN_EXPERT_RULES)
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    rows.LLAMA_ROWS,
    (
        *_OLMO_RULES,
        *_experts(copied("num_experts", *_NUMBER, default=64), "intermediate_size"),
        opposite("moe_router_pre_softmax", "norm_topk_prob", False),
        fixed("clip_qkv", None),
    ),
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    rows.GPT_OSS_ROWS,
    (
        *_SIZE_RULES,
        *_experts(copied("num_experts", *_NUMBER[::-1], default=128), "intermediate_size"),
        copied("norm_epsilon", "rms_norm_eps", default=1e-5),
        opposite("untie_embeddings_and_output_weights", "tie_word_embeddings", False),
        rope(150000.0, _GPT_OSS_SCALING),
        heads(8, 64),
        alternating_windows(2, 128),
        copied("activation_func_clamp_value", "swiglu_limit", default=7.0),
        fixed("swiglu_alpha", 1.702),
        fixed("hidden_act", "silu", "swish", written=True),
        fixed("attention_bias", True, written=True),
        implied(
            quick_geglu=True, glu_linear_offset=1.0, add_bias_linear=True, softmax_type="learnable"
        ),
        implied(hidden_dropout=0.0),
    ),
    "experts_per_token initial_context_length",  # others of the same meaning are read
)
_DEEPSEEK_RULES = (
    *_GATED_RMS_RULES,
    # The norms within attention have this epsilon whatever the field says.
    fixed("rms_norm_eps", 1e-6, written=True),
    implied(
        norm_epsilon=1e-6, hidden_dropout=0.0, add_bias_linear=False, multi_latent_attention=True
    ),
    implied(qk_layernorm=True, moe_router_dtype="fp32"),
    rope(),
    NO_GROUPS,
    nullable("q_lora_rank", 1536),
    copied("kv_lora_rank", "kv_lora_rank", default=512),
    copied("qk_head_dim", "qk_nope_head_dim", default=128),
    copied("qk_pos_emb_head_dim", "qk_rope_head_dim", default=64),
    copied("v_head_dim", "v_head_dim", default=128),
    fixed("moe_layer_freq", 1),
)
# Widths that follow from others; layers that predict later tokens, which transformers leaves out;
# training.
_OF_DEEPSEEK = """
    head_dim qk_head_dim num_nextn_predict_layers num_mtp_layers aux_loss_alpha seq_aux ep_size auto_map"""
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_DEEPSEEK_RULES,
        copied("num_experts", "n_routed_experts", "num_local_experts", default=64),
        copied("moe_ffn_hidden_size", "moe_intermediate_size", default=1407),
        copied("moe_router_topk", "num_experts_per_tok"),
        DEEPSEEK_V2_EXPERTS,
        *always(attention_bias=False, mlp_bias=False, norm_topk_prob=False),
        fixed("scoring_func", "softmax"),
        implied(moe_router_score_function="softmax", moe_router_pre_softmax=True),
    ),
    _OF_DEEPSEEK,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_DEEPSEEK_RULES,
        copied("num_experts", "n_routed_experts", "num_local_experts", default=256),
        copied("moe_ffn_hidden_size", "moe_intermediate_size", default=2048),
        copied("moe_router_topk", "num_experts_per_tok", default=8),
        DEEPSEEK_V3_EXPERTS,
        *always(attention_bias=False, rope_interleave=True, norm_topk_prob=True),
        fixed("scoring_func", "sigmoid"),
        implied(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    ),
    _OF_DEEPSEEK,
)
_LAYER_NORM_RULES: tuple[Rule, ...] = (
    copied("num_layers", "n_layer", "num_hidden_layers"),
    copied("num_attention_heads", "n_head", "num_attention_heads"),
    copied("norm_epsilon", "layer_norm_epsilon", default=1e-5),
    opposite("untie_embeddings_and_output_weights", "tie_word_embeddings", True),
    implied(normalization="LayerNorm", add_bias_linear=True, group_query_attention=False),
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    rows.GPT2_ROWS,
    (
        *_LAYER_NORM_RULES,
        copied("hidden_size", "n_embd", "hidden_size"),
        copied("max_position_embeddings", "n_positions", "max_position_embeddings", "n_ctx"),
        feed_forward("n_inner", free=True),
        GELU,
        copied("attention_dropout", "attn_pdrop", default=0.1),
        copied("hidden_dropout", "resid_pdrop", "embd_pdrop", default=0.1, write_all=True),
        *always(
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            reorder_and_upcast_attn=False,
        ),
        implied(position_embedding_type="learned_absolute"),
    ),
    layers="transformer.h.",
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    rows.BLOOM_ROWS,
    (
        *_LAYER_NORM_RULES,
        copied("hidden_size", "hidden_size", "n_embed"),
        copied("max_position_embeddings", "seq_length", default=None),
        feed_forward("n_inner", free=False),
        copied("attention_dropout", "attention_dropout", default=0.0),
        copied("hidden_dropout", "hidden_dropout", default=0.0),
        fixed("apply_residual_connection_post_layernorm", False, written=True),
        # Its GELU is the tanh approximation.
        implied(position_embedding_type="alibi", embedding_layernorm=True, bias_gelu_fusion=True),
    ),
    """slow_but_exact offset_alibi attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion skip_bias_add
    skip_bias_add_qkv""",
    layers="transformer.h.",
)
FAMILIES = (
    *(LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, OLMO2, GEMMA2, GEMMA3),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3),
    *(GPT2, BLOOM),
)

# Models that one could take for one of these -> what of them is not here.
_LACKING = {
    "gemma3": "images as input; its text model alone, gemma3_text, is supported",
    "olmo": "norms without weights",
}

_NAMES = record(
    {"model_type?": optional(text(256)), "architectures?": optional(sequence(text(256), 10**5))}
)


def family_of(hf: Json) -> Family:
    """The family that config.json names; raises ValueError for any other model."""
    _NAMES(hf, "config.json")
    model_type = hf.get("model_type")
    architectures = hf.get("architectures") or []
    named = [
        f
        for f in FAMILIES
        if f.model_type == model_type or (not model_type and f.architecture in architectures)
    ]
    if not named:
        why = f" (it has {_LACKING[model_type]})" if model_type in _LACKING else ""
        supported = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported{why}; supported are {supported}"
        )
    family = named[0]
    headless = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    if architectures and not {family.architecture, headless} & set(architectures):
        raise ValueError(
            f"config.json: architecture {escape_control_chars(architectures[0])} is not "
            f"{family.architecture}: not supported"
        )
    return family


def choose_family(config: TransformerConfig, preferred: str | None) -> Family:
    """The first family that can express the model, `preferred` before the others.

    Raises ValueError with the obstacles of the closest family.
    """
    ordered = sorted(FAMILIES, key=lambda family: family.model_type != preferred)
    obstacles = {family.model_type: family.obstacles(config) for family in ordered}
    for family in ordered:
        if not obstacles[family.model_type]:
            return family
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    raise ValueError(
        "none of the supported models of transformers computes the same as this one; "
        f"{nearest} is closest, but has no {', no '.join(obstacles[nearest])}"
    )
