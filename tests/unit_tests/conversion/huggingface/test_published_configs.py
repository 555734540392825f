"""config.json files with the fields of well-known published models, and the published sizes."""

import math
from typing import Any

import pytest

from megatron.conversion.huggingface.families import find_family
from megatron.conversion.huggingface.stored_parameters import stored_parameters
from megatron.conversion.model_space.model import (
    compute_model_signature,
    model_config,
    model_tensors,
)

LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
COMMON = {
    "initializer_range": 0.02,
    "use_cache": True,
    "transformers_version": "4.40.0",
    "torch_dtype": "bfloat16",
}
LLAMA_LIKE = COMMON | {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK_V2 = {  # the Lite model
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "GPT-2": (
        124_439_808,
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
    ),
    "Llama-2-7B": (
        6_738_415_616,
        LLAMA_LIKE
        | {
            "_name_or_path": "meta-llama/Llama-2-7b-hf",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        LLAMA_LIKE
        | {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        LLAMA_LIKE
        | {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        LLAMA_LIKE
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        LLAMA_LIKE
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "OLMo-2-0425-1B": (
        1_484_916_736,
        LLAMA_LIKE
        | {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "olmo2",
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 100277,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
    "OLMo-1B": (
        1_176_764_416,
        LLAMA_LIKE
        | {
            "architectures": ["OlmoForCausalLM"],
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 2048,
            "model_type": "olmo",
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 1,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 50304,
        },
    ),
    "OPT-125M": (
        125_239_296 - 2 * 768,  # the positions before the first one
        {
            "_name_or_path": "facebook/opt-125m",
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "eos_token_id": 2,
            "ffn_dim": 3072,
            "hidden_size": 768,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "model_type": "opt",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 1,
            "prefix": "</s>",
            "torch_dtype": "float16",
            "use_cache": True,
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        },
    ),
    "Gemma-2-2B": (
        2_614_341_888,
        COMMON
        | {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
    ),
    "Gemma-3-1B": (
        999_885_952,
        COMMON
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "OLMoE-1B-7B-0924": (
        6_919_161_856,
        LLAMA_LIKE
        | {
            "architectures": ["OlmoeForCausalLM"],
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
        },
    ),
    "BLOOM-560M": (
        559_214_592,
        {
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["BloomForCausalLM"],
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "model_type": "bloom",
            "n_embed": 1024,
            "n_inner": None,
            "n_layer": 24,
            "num_attention_heads": 16,
            "offset_alibi": 100,
            "pad_token_id": 3,
            "pretraining_tp": 1,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "unk_token_id": 0,
            "use_cache": True,
            "vocab_size": 250880,
        },
    ),
    "DeepSeek-V2-Lite": (15_706_484_224, DEEPSEEK_V2 | {"topk_method": "greedy"}),
    "DeepSeek-V2": (
        235_741_434_880,
        DEEPSEEK_V2
        | {
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
    ),
    "DeepSeek-V3": (
        671_026_419_200,
        DEEPSEEK_V2
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
            "rope_scaling": DEEPSEEK_V2["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "vocab_size": 129280,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_published_sizes(name: str) -> None:
    size, hf = PUBLISHED[name]
    family = find_family(hf)
    config = model_config(family.read_config(hf, {}), hf["vocab_size"], name)
    shapes = model_tensors(config)
    of_model = {key: shape for key, shape in shapes.items() if not key.startswith("mtp.")}
    assert sum(map(math.prod, of_model.values())) == size
    places = stored_parameters(
        model_tensors(config), family.rows, family.layers, config, lambda name: False
    )
    assert {place.key for place in places} == set(model_tensors(config))
    assert not family.find_obstacles(config)
    again = model_config(
        family.read_config(family.write_config(config), {}), hf["vocab_size"], name
    )
    assert compute_model_signature(again) == compute_model_signature(config)


def test_fields_of_published_configs() -> None:
    def read(name: str) -> dict[str, Any]:
        return find_family(PUBLISHED[name][1]).read_config(PUBLISHED[name][1], {})

    llama = read("Llama-3.2-1B")
    assert llama["use_rope_scaling"]
    assert llama["rope_scaling_factor"] == 32.0
    assert llama["rotary_base"] == 5e5
    assert llama["rope_original_max_position_embeddings"] == 8192
    assert llama["bf16"]
    assert read("Llama-2-7B")["rotary_base"] == 1e4
    assert not read("Llama-2-7B")["group_query_attention"]
    assert read("Mistral-7B-v0.1")["window_size"] == (4095, 0)
    assert read("Qwen2.5-0.5B")["window_size"] is None
    assert read("Qwen2.5-0.5B")["add_qkv_bias"]
    gemma = model_config(read("Gemma-3-1B"), 262144, "Gemma 3")
    assert gemma.get_window(4) == (511, 0)
    assert gemma.get_window(5) is None
    assert gemma.rotary_base_local == 1e4
    assert read("Gemma-2-2B")["softmax_scale"] == 1 / 16
    assert read("Gemma-2-2B")["final_logit_softcapping"] == 30.0
    assert read("Qwen3-0.6B")["kv_channels"] == 128
    assert read("Qwen3-0.6B")["qk_layernorm"]
    assert read("BLOOM-560M")["ffn_hidden_size"] == 4096
    assert read("BLOOM-560M")["embedding_layernorm"]
    assert read("GPT-2")["hidden_dropout"] == 0.1
    assert read("GPT-2")["bias_gelu_fusion"]


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}
SOME_SCALE = {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (
            DEEPSEEK_V2,
            {"norm_topk_prob": True},
            "norm_topk_prob = True is not supported, only False is",
        ),
        (
            DEEPSEEK_V2,
            {"topk_method": "noaux_tc"},
            "topk_method = 'noaux_tc' .* greedy and group_limited_greedy are",
        ),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        (
            DEEPSEEK,
            {"first_k_dense_replace": 10**9},
            "first_k_dense_replace = 1000000000 .* at most num_hidden_",
        ),
        (
            DEEPSEEK,
            {"rope_scaling": SOME_SCALE},
            "mscale",
        ),
        (
            PUBLISHED["Gemma-3-1B"][1],
            {"rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters has a field 'rope_theta'",
        ),
    ],
)
def test_unsupported_values_are_refused(
    model: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    hf = model | fields
    with pytest.raises(ValueError, match=message):
        find_family(hf).read_config(hf, {})


def test_null_means_none_or_the_default() -> None:
    nulls = dict.fromkeys(
        ("n_group", "n_shared_experts", "routed_scaling_factor", "first_k_dense_replace")
    )
    hf = DEEPSEEK | nulls
    read = find_family(hf).read_config(hf, {})
    assert read["moe_router_num_groups"] is None
    assert read["moe_shared_expert_intermediate_size"] == 0
    assert read["moe_layer_freq"] == 1
    assert read["moe_router_topk_scaling_factor"] == 1.0
    hf = PUBLISHED["Qwen2.5-0.5B"][1] | {
        "use_sliding_window": True,
        "num_hidden_layers": 30,
        "max_window_layers": None,
    }
    assert find_family(hf).read_config(hf, {})["window_attn_skip_freq"] == [0] * 28 + [1] * 2
