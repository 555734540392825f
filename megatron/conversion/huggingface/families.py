"""The model families of transformers as tables: rows for parameters, rules for config fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.attention_rules import (
    COMMON_WINDOW,
    FULL_ATTENTION,
    NO_GROUPS,
    QUERY_SCALAR,
    QWEN3_MOE_WINDOW,
    alternating_windows,
    heads,
    qwen_windows,
)
from megatron.conversion.huggingface.config_fields import (
    ConfigFields,
    Json,
    refusal_of_transformers,
    transformers_defaults,
)
from megatron.conversion.huggingface.expert_rules import (
    AUXILIARY_LOSS,
    EXPERT_LAYERS,
    EXPERTS_PER_TOKEN,
    NORMALIZED_WEIGHTS,
    SIGMOID_NORMALIZATION,
    SWITCHED_NORMALIZATION,
    deepseek_experts,
)
from megatron.conversion.huggingface.parameters import Row
from megatron.conversion.huggingface.rope_rules import TWO_ROPES, rope
from megatron.conversion.huggingface.rules import (
    BIASED_PARTS,
    COMMON_RULES,
    GELU,
    Rule,
    always,
    biases,
    copied,
    dropout,
    feed_forward,
    fixed,
    implied,
    nullable,
    opposite,
    written,
)
from megatron.conversion.model_space.source import MODEL_ARGUMENTS
from megatron.core.dist_checkpointing.format.schema import (
    Check,
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

# Fields that describe files, tokens, generation or speed. None of them changes the logits.
HARMLESS = """
    _name_or_path name_or_path _commit_hash architectures model_type transformers_version
    use_cache return_dict output_attentions output_hidden_states output_scores torchscript
    use_bfloat16 gradient_checkpointing is_decoder attn_implementation _attn_implementation
    _attn_implementation_internal _attn_implementation_autoset experts_implementation
    output_router_logits chunk_size_feed_forward tie_last_hidden_states return_dict_in_generate
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task
    task_specific_params classifier_dropout pretraining_tp summary_type summary_use_proj
    summary_activation summary_proj_to_labels summary_first_dropout max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p min_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss
"""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Rows for parameters that the family's models lack are harmless: `find_obstacles` compares whole
    models.
    """

    model_type: str
    architecture: str  # the class with the language model head
    rows: Mapping[str, Row]
    rules: tuple[Rule, ...]
    harmless: str = ""  # fields of this family that do not change the logits
    layers: str = "model.layers."  # names of layers start with it
    aliases: tuple[str, ...] = ()  # other values of `model_type` for the same models

    @property
    def prefix(self) -> str:
        """Prefix of the base model's names, which files of the base model alone do not have."""
        return self.layers.partition(".")[0] + "."

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        return COMMON_RULES + self.rules

    def read_config(
        self, hf: Json, args: Mapping[str, Any], ignored: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the model arguments in the config.json `hf`; `args` of the user take precedence.

        Raises ValueError for a field that is unknown, missing or has an unsupported value.
        """
        self.check_fields(hf, ignored)
        found = ConfigFields(hf, transformers_defaults(self.model_type))
        result = dict(args)
        for rule in self.all_rules:
            result = {**rule.read(found, result), **result}
        return result

    def check_fields(self, hf: Json, ignored: Collection[str] = ()) -> None:
        """Raise ValueError for a field that is unknown or has a value of the wrong type."""
        checks = self._collect_checks()
        # An unknown field may change the model: reject unknown fields before reading any.
        known = {*HARMLESS.split(), *self.harmless.split(), *ignored, *checks}
        unknown = []
        for name, value in hf.items():
            if value is not None and name not in known:
                unknown.append(name)
        if unknown:
            unknown.sort()
            listed = []
            for name in unknown:
                listed.append(f"{escape_control_chars(name)} = {format_value(hf[name])}")
            raise ValueError(
                "config.json has fields that are not supported and may change what the model "
                f"computes: {', '.join(listed)}. If they do not, convert it with "
                f"--hf-ignore-fields {escape_control_chars(' '.join(unknown))}"
            )
        check_all = record({f"{name}?": optional(check) for name, check in checks.items()})
        check_all(hf, "config.json")

    def _collect_checks(self) -> dict[str, Check]:
        """Return the check of each field that a rule reads."""
        checks: dict[str, Check] = {}
        for rule in self.all_rules:
            for field, check in rule.fields.items():
                if isinstance(check, str):  # the name of an argument
                    check = MODEL_ARGUMENTS[check]
                checks[field] = check
        return checks

    def write_config(
        self, config: TransformerConfig, imported: Mapping[str, Any] | None = None
    ) -> Json:
        """Return the config.json of a model.

        `imported` contains fields of the config.json that the model came from. Those that the
        arguments do not determine are repeated, as long as they still describe the model.
        """
        fields: Json = {"architectures": [self.architecture], "model_type": self.model_type}
        imported = imported or {}
        for rule in self.all_rules:
            fields |= rule.write(config)
            repeated = {name: imported[name] for name in rule.repeated if name in imported}
            if repeated and self._describes(rule, repeated, config):
                fields |= repeated
        return fields

    def _describes(self, rule: Rule, fields: Json, config: TransformerConfig) -> bool:
        """Return whether the rule reads the arguments of this model from the fields."""
        found = ConfigFields(fields, transformers_defaults(self.model_type))
        arguments = rule.read(found, {})
        return all(getattr(config, name) == value for name, value in arguments.items())

    def repeated_fields(self, hf: Json) -> Json:
        """Return the fields that `write_config` repeats, with defaults for missing ones."""
        found = ConfigFields(hf, transformers_defaults(self.model_type))
        fields: Json = {}
        for rule in self.rules:
            if found.states(*rule.repeated):
                fields |= {name: found.first(name) for name in rule.repeated}
        return fields

    def switched_biases(self) -> list[tuple[str, str]]:
        """Return the switches of biases with the part of a layer that each is for, e.g. ".mlp."."""
        switches = []
        for rule in self.rules:
            for name in rule.repeated:
                if name in BIASED_PARTS:
                    switches.append((name, BIASED_PARTS[name]))
        return switches

    def find_obstacles(self, config: TransformerConfig) -> list[str]:
        """Return the properties of a model that this family cannot express.

        config.json is written, read back as if from a file, and compared.
        """
        if config.window_size is not None and not any(config.window_pattern):
            # A window that no layer has. transformers has no such model.
            config = replace(
                config, window_size=None, window_attn_skip_freq=None, rotary_base_local=None
            )
        wanted = compute_model_signature(config)

        # Write and read config.json.
        fields = self.write_config(config)
        usual = {"kv_channels": config.hidden_size // config.num_attention_heads}
        try:
            args = usual | self.read_config(fields, {})
        except ValueError as error:  # a value that the family does not have
            return [str(error), *_list_differences(wanted, {})]

        # Compare the model that it describes.
        try:
            found = compute_model_signature(TransformerConfig(**(args | LOCAL_BACKEND_FIELDS)))
        except ValueError as error:  # the model contradicts the family
            return [*str(error).splitlines(), *_list_differences(wanted, wanted | args)]
        obstacles = _list_differences(wanted, found)
        if not obstacles:
            refusal = refusal_of_transformers(self.model_type, fields)
            if refusal is not None:
                obstacles.append(f"a config.json that transformers accepts ({refusal})")
        return obstacles


_MISSING = object()


def _list_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a line for each value of `wanted` that is missing or different in `found`."""
    lines = []
    for name, value in wanted.items():
        if found.get(name, _MISSING) != value:
            lines.append(f"{name} = {value}")
    return lines


_NO_BIAS = implied(add_bias_linear=False)
_UNTIED = opposite("untie_embeddings_and_output_weights", "tie_word_embeddings")
_RMS_EPSILON = copied("norm_epsilon", "rms_norm_eps")
_SIZE_RULES: tuple[Rule, ...] = (
    copied("num_layers", "num_hidden_layers", required=True),
    copied("hidden_size", "hidden_size", required=True),
    copied("num_attention_heads", "num_attention_heads", required=True),
    copied("ffn_hidden_size", "intermediate_size", required=True),
    copied("max_position_embeddings", "max_position_embeddings"),
    copied("attention_dropout", "attention_dropout"),
    implied(normalization="RMSNorm", position_embedding_type="rope"),
)
_SILU = fixed("hidden_act", "silu", "swish", written=True)
_GATED_RMS_RULES: tuple[Rule, ...] = (*_SIZE_RULES, _SILU, _UNTIED, implied(swiglu=True))
_LLAMA_RULES = (*_GATED_RMS_RULES, _RMS_EPSILON, rope(), implied(hidden_dropout=0.0))
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    rows.LLAMA_ROWS,
    (*_LLAMA_RULES, heads(), biases("attention_bias", "mlp_bias"), FULL_ATTENTION),
)
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    rows.ARCEE_ROWS,
    (
        *_SIZE_RULES,
        fixed("hidden_act", "relu2", written=True),
        _UNTIED,
        _RMS_EPSILON,
        rope(),
        heads(),
        biases("attention_bias", "mlp_bias"),
        FULL_ATTENTION,
        implied(swiglu=False, squared_relu=True, hidden_dropout=0.0),
    ),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    rows.LLAMA_ROWS,
    (*_LLAMA_RULES, heads(), _NO_BIAS, COMMON_WINDOW),
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    rows.PHI3_ROWS,
    (
        *_GATED_RMS_RULES,
        _RMS_EPSILON,
        # Its only scaling is longrope, which the model does not have.
        rope(("default",), partial=True),
        dropout("resid_pdrop", "embd_pdrop"),
        heads(always_written=False),
        _NO_BIAS,
        COMMON_WINDOW,
    ),
    harmless="original_max_position_embeddings",  # of longrope
)
_QWEN2_RULES = (
    *_LLAMA_RULES,
    heads(always_written=False),
    implied(add_bias_linear=False, add_qkv_bias=True),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    rows.LLAMA_ROWS,
    (*_QWEN2_RULES, qwen_windows(in_first_layers=False), fixed("use_mrope", False)),
)
_QWEN3_RULES = (*_LLAMA_RULES, heads(), biases("attention_bias"), implied(qk_layernorm=True))
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    rows.QWEN3_ROWS,
    (*_QWEN3_RULES, qwen_windows(in_first_layers=False)),
)
_OLMO_RULES = (
    *_LLAMA_RULES,
    _NO_BIAS,
    *always(attention_bias=False),
    implied(qk_layernorm=True, qk_layernorm_across_heads=True),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    rows.OLMO2_ROWS,
    (*_OLMO_RULES, heads(always_written=False), implied(norm_placement="post")),
)
_GEMMA1_RULES = (
    *_SIZE_RULES,
    _RMS_EPSILON,
    _UNTIED,
    *always(attention_bias=False),
    fixed("use_bidirectional_attention", False, None),
    heads(),
    _NO_BIAS,
    implied(geglu=True, apply_layernorm_1p=True, scale_embeddings=True, hidden_dropout=0.0),
)
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    rows.LLAMA_ROWS,
    (
        *_GEMMA1_RULES,
        rope(),
        # The official releases call the tanh approximation "gelu".
        fixed("hidden_act", "gelu_pytorch_tanh", "gelu", written=True),
        fixed("hidden_activation", "gelu_pytorch_tanh"),
        FULL_ATTENTION,
    ),
)
_GEMMA_RULES = (
    *_GEMMA1_RULES,
    *always(hidden_activation="gelu_pytorch_tanh"),
    QUERY_SCALAR,
    implied(norm_placement="both"),
)
_GEMMA_HARMLESS = "cache_implementation hidden_act"
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    rows.GEMMA_ROWS,
    (
        *_GEMMA_RULES,
        rope(),
        alternating_windows(2),
        nullable("attn_logit_softcapping"),
        nullable("final_logit_softcapping"),
    ),
    harmless=_GEMMA_HARMLESS,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    rows.GEMMA_ROWS,
    (
        *_GEMMA_RULES,
        TWO_ROPES,
        alternating_windows(6, free=True),
        nullable("final_logit_softcapping"),
        implied(qk_layernorm=True),
    ),
    # Its attention does not read the first of these, and its configuration not the second.
    harmless=f"{_GEMMA_HARMLESS} attn_logit_softcapping _sliding_window_pattern",
)


def _experts(counts: tuple[str, ...], width: str) -> tuple[Rule, ...]:
    """Return the rules of `counts`, the fields of the number of experts, and of their `width`."""
    number = copied("num_experts", *counts)
    return EXPERTS_PER_TOKEN, AUXILIARY_LOSS, number, copied("moe_ffn_hidden_size", width)


_QWEN_EXPERT_RULES = (
    *_experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
    SWITCHED_NORMALIZATION,
    EXPERT_LAYERS,
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    rows.MIXTRAL_ROWS,
    (
        *_LLAMA_RULES,
        *_experts(("num_local_experts", "num_experts"), "intermediate_size"),
        NORMALIZED_WEIGHTS,
        heads(),
        _NO_BIAS,
        COMMON_WINDOW,
        fixed("router_jitter_noise", 0.0),
    ),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    rows.LLAMA_ROWS,
    (
        *_QWEN2_RULES,
        qwen_windows(in_first_layers=True),
        *_QWEN_EXPERT_RULES,
        copied("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
        implied(moe_shared_expert_gate=True),
        fixed("qkv_bias", True),
        fixed("use_mrope", False),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    rows.QWEN3_ROWS,
    (*_QWEN3_RULES, QWEN3_MOE_WINDOW, *_QWEN_EXPERT_RULES),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    rows.LLAMA_ROWS,
    (
        *_OLMO_RULES,
        heads(free_width=False),  # its norms of queries and keys have hidden_size weights
        *_experts(("num_experts", "num_local_experts"), "intermediate_size"),
        SWITCHED_NORMALIZATION,
        fixed("clip_qkv", None),
    ),
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    rows.GPT_OSS_ROWS,
    (
        *_SIZE_RULES,
        *_experts(("num_local_experts", "num_experts"), "intermediate_size"),
        NORMALIZED_WEIGHTS,
        _RMS_EPSILON,
        _UNTIED,
        rope(spelled_out=True),
        heads(),
        alternating_windows(2),
        copied("activation_func_clamp_value", "swiglu_limit"),
        fixed("swiglu_alpha", 1.702),
        _SILU,
        fixed("attention_bias", True, written=True),
        implied(
            quick_geglu=True,
            glu_linear_offset=1.0,
            add_bias_linear=True,
            softmax_type="learnable",
            hidden_dropout=0.0,
        ),
    ),
    harmless="experts_per_token initial_context_length",  # repeat fields that are read
)
_DEEPSEEK_RULES = (
    *_GATED_RMS_RULES,
    # The norms within attention always have this epsilon, not that of the field.
    fixed("rms_norm_eps", 1e-6, written=True),
    implied(
        norm_epsilon=1e-6,
        hidden_dropout=0.0,
        add_bias_linear=False,
        multi_latent_attention=True,
        qk_layernorm=True,
        moe_router_dtype="fp32",
    ),
    rope(),
    NO_GROUPS,
    nullable("q_lora_rank"),
    copied("kv_lora_rank", "kv_lora_rank"),
    copied("qk_head_dim", "qk_nope_head_dim"),
    copied("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    copied("v_head_dim", "v_head_dim"),
    copied("num_experts", "n_routed_experts", "num_local_experts"),
    copied("moe_ffn_hidden_size", "moe_intermediate_size"),
    fixed("moe_layer_freq", 1),
)
# Widths that follow from others, layers that predict later tokens (transformers leaves them out),
# and options of training.
_DEEPSEEK_HARMLESS = """
    head_dim qk_head_dim num_nextn_predict_layers num_mtp_layers aux_loss_alpha seq_aux ep_size
    auto_map"""
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_DEEPSEEK_RULES,
        EXPERTS_PER_TOKEN,
        deepseek_experts(("greedy", "group_limited_greedy"), best=1),
        *always(attention_bias=False, mlp_bias=False, norm_topk_prob=False),
        fixed("scoring_func", "softmax"),
        implied(moe_router_score_function="softmax", moe_router_pre_softmax=True),
    ),
    harmless=_DEEPSEEK_HARMLESS,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_DEEPSEEK_RULES,
        copied("moe_router_topk", "num_experts_per_tok"),
        deepseek_experts(("noaux_tc",), best=2),
        SIGMOID_NORMALIZATION,
        *always(attention_bias=False, rope_interleave=True),
        fixed("scoring_func", "sigmoid"),
        implied(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        # transformers assumes one such layer where this is missing.
        written(num_nextn_predict_layers=0),
    ),
    harmless=_DEEPSEEK_HARMLESS,
    aliases=("kimi_k2",),
)
_LAYER_NORM_RULES: tuple[Rule, ...] = (
    copied("num_layers", "n_layer", "num_hidden_layers", required=True),
    copied("num_attention_heads", "n_head", "num_attention_heads", required=True),
    copied("norm_epsilon", "layer_norm_epsilon"),
    _UNTIED,
    implied(normalization="LayerNorm", add_bias_linear=True, group_query_attention=False),
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    rows.GPT2_ROWS,
    (
        *_LAYER_NORM_RULES,
        copied("hidden_size", "n_embd", "hidden_size", required=True),
        copied("max_position_embeddings", "n_positions", "max_position_embeddings", "n_ctx"),
        feed_forward("n_inner", free=True),
        GELU,
        copied("attention_dropout", "attn_pdrop"),
        dropout("resid_pdrop", "embd_pdrop"),
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
        copied("hidden_size", "hidden_size", "n_embed", required=True),
        copied("max_position_embeddings", "seq_length"),
        feed_forward("n_inner", free=False),
        copied("attention_dropout", "attention_dropout"),
        copied("hidden_dropout", "hidden_dropout"),
        fixed("apply_residual_connection_post_layernorm", False, written=True),
        # Its GELU is the tanh approximation.
        implied(position_embedding_type="alibi", embedding_layernorm=True, bias_gelu_fusion=True),
    ),
    harmless="""
        slow_but_exact offset_alibi attention_softmax_in_fp32 masked_softmax_fusion
        bias_dropout_fusion skip_bias_add skip_bias_add_qkv""",
    layers="transformer.h.",
)
# In order of preference for an export: the first that can express a model is taken.
FAMILIES = (
    *(LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, OLMO2, GEMMA2, GEMMA3),
    *(GEMMA, ARCEE),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3),
    *(GPT2, BLOOM),
)

# Models that resemble a supported family -> the part that our model does not have.
_LACKING = {
    "gemma3": "images as input; its text model alone, gemma3_text, is supported",
    "olmo": "norms without weights",
}

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
        reason = ""
        if model_type in _LACKING:
            reason = f" (it has {_LACKING[model_type]})"
        supported = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported{reason}; "
            f"supported are {supported}"
        )

    # The architecture is the class with the language model head, or the base model.
    base_name = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    accepted = {family.architecture, f"{base_name}Model"}
    if architectures and accepted.isdisjoint(architectures):
        raise ValueError(
            f"config.json: architecture {escape_control_chars(architectures[0])} is not "
            f"{family.architecture}: not supported"
        )
    return family


def choose_family(config: TransformerConfig, preferred: str | None) -> Family:
    """Return the first family that can express the model, trying `preferred` before the others.

    Raises ValueError with the obstacles of the closest family.
    """
    obstacles: dict[str, list[str]] = {}
    # Sorting is stable: only the preferred family moves to the front.
    for family in sorted(FAMILIES, key=lambda family: family.model_type != preferred):
        found = family.find_obstacles(config)
        if not found:
            return family
        obstacles[family.model_type] = found
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    raise ValueError(
        "none of the supported models of transformers computes the same as this one; "
        f"{nearest} is closest, but has no {', no '.join(obstacles[nearest])}"
    )
