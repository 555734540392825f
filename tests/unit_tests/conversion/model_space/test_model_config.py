"""The model that arguments describe: its tensors, and spellings of the same model."""

import dataclasses

import pytest

from megatron.conversion.deepspeed.training_state import list_unsupported_parts
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.model_space.model import (
    compute_model_signature,
    model_config,
    model_parameters,
    model_tensors,
)
from megatron.core.models import GPTModel
from megatron.core.transformer.transformer_config import (
    TransformerConfig,
    select_architecture_fields,
)
from tests.support.memory_source import BLOOM_ARGS, GPT_ARGS, LLAMA_ARGS

LLAMA_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (32,),
    "self_attention.linear_qkv.weight": (64, 32),
    "self_attention.linear_proj.weight": (32, 32),
    "mlp.linear_fc1.layer_norm_weight": (32,),
    "mlp.linear_fc1.weight": (96, 32),
    "mlp.linear_fc2.weight": (32, 48),
}
BLOOM_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (32,),
    "self_attention.linear_qkv.layer_norm_bias": (32,),
    "self_attention.linear_qkv.weight": (96, 32),
    "self_attention.linear_qkv.bias": (96,),
    "self_attention.linear_proj.weight": (32, 32),
    "self_attention.linear_proj.bias": (32,),
    "mlp.linear_fc1.layer_norm_weight": (32,),
    "mlp.linear_fc1.layer_norm_bias": (32,),
    "mlp.linear_fc1.weight": (128, 32),
    "mlp.linear_fc1.bias": (128,),
    "mlp.linear_fc2.weight": (32, 128),
    "mlp.linear_fc2.bias": (32,),
}
MODELS = {
    "llama": (
        LLAMA_ARGS,
        LLAMA_LAYER,
        {
            "embedding.word_embeddings.weight": (67, 32),
            "decoder.final_layernorm.weight": (32,),
            "output_layer.weight": (67, 32),
        },
    ),
    "bloom": (
        BLOOM_ARGS,
        BLOOM_LAYER,
        {
            "embedding.word_embeddings.weight": (67, 32),
            "embedding.word_embeddings_layernorm.weight": (32,),
            "embedding.word_embeddings_layernorm.bias": (32,),
            "decoder.final_layernorm.weight": (32,),
            "decoder.final_layernorm.bias": (32,),
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_models(name: str) -> None:
    args, layer, others = MODELS[name]
    expected = others | {
        f"decoder.layers.{i}.{key}": shape for i in range(2) for key, shape in layer.items()
    }
    assert model_tensors(model_config(args, 67, "test")) == expected


@pytest.mark.parametrize("args", [LLAMA_ARGS, BLOOM_ARGS, GPT_ARGS | {"qk_layernorm": True}])
def test_layers_of_a_kind_have_the_same_parameters(args: dict) -> None:
    config = model_config(args, 67, "test")
    state = GPTModel(config).sharded_state_dict()
    assert list(model_tensors(config).items()) == [
        (key, entry.global_shape) for key, entry in state.items()
    ]


def test_impossible_sizes_are_refused() -> None:
    huge = {
        "hidden_size": 2**31 - 1,
        "num_attention_heads": 1,
        "kv_channels": 2**31 - 1,
        "ffn_hidden_size": 2**31 - 1,
    }
    with pytest.raises(ValueError, match="no model has these sizes"):
        model_tensors(model_config(GPT_ARGS | huge, 2**31 - 1, "demo"))


def test_sharding_of_parameters() -> None:
    """Compare with the rules of DeepSpeed's and Megatron-LM's files."""
    parameters = model_parameters(model_config(LLAMA_ARGS | {"num_layers": 1}, 67, "test"))
    layer = {p.name.removeprefix("decoder.layers.0."): p for p in parameters}
    assert {name: layer[name].info.sharding.dim for name in LLAMA_LAYER} == {
        "self_attention.linear_qkv.layer_norm_weight": None,
        "self_attention.linear_qkv.weight": 0,
        "self_attention.linear_proj.weight": 1,
        "mlp.linear_fc1.layer_norm_weight": None,
        "mlp.linear_fc1.weight": 0,
        "mlp.linear_fc2.weight": 1,
    }
    assert {name for name, p in layer.items() if p.info.sharding.blocks == 2} == {
        "mlp.linear_fc1.weight"
    }
    vocabulary = {p.name for p in parameters if p.group.embedding}
    assert vocabulary == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_every_field_declares_its_effect() -> None:
    """Fields without effect change neither the weights nor the logits."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert names - {field.name for field in select_architecture_fields()} == {
        "vocab_size",  # the tokenizer's, or the rows of the stored embedding
        "group_query_attention",  # num_query_groups decides
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "bf16",
        "fp16",
        "transformer_impl",
        "norm_impl",
        "bias_swiglu_fusion",
        "rope_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "fp4",
        "fp4_recipe",
        "fp8",
        "fp8_recipe",
        "fp8_margin",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_param_gather",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "tp_comm_overlap",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_overlap_cfg",
        "tp_comm_bulk_dgrad",
        "tp_comm_bulk_wgrad",
        "tp_comm_bootstrap_backend",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "moe_router_bias_update_rate",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "mtp_loss_scaling_factor",
        "apply_wd_to_qk_layernorm",
        "moe_router_force_load_balancing",
        "moe_z_loss_coeff",
        "moe_pad_expert_input_to_capacity",
        "moe_token_dispatcher_type",
    }


def test_spellings_of_the_same_model_are_equal() -> None:
    def same(a: dict, b: dict) -> bool:
        return compute_model_signature(model_config(a, 67, "a")) == compute_model_signature(
            model_config(b, 67, "b")
        )

    assert same(
        GPT_ARGS,
        GPT_ARGS | {"kv_channels": 8, "ffn_hidden_size": 128, "bf16": True, "hidden_dropout": 0.3},
    )
    assert same(
        LLAMA_ARGS, LLAMA_ARGS | {"rope_scaling_factor": 3.0, "max_position_embeddings": 99}
    )
    assert not same(LLAMA_ARGS, LLAMA_ARGS | {"use_rope_scaling": True})
    assert not same(GPT_ARGS, GPT_ARGS | {"bias_gelu_fusion": False})
    assert same(GPT_ARGS, GPT_ARGS | {"bias_gelu_fusion": False, "openai_gelu": True})


def test_missing_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="demo lacks hidden_size: give --hidden-size"):
        model_config({"num_layers": 2, "num_attention_heads": 4}, 67, "demo")
    learned = {name: value for name, value in GPT_ARGS.items() if name != "max_position_embeddings"}
    with pytest.raises(ValueError, match="--max-position-embeddings"):
        model_tensors(model_config(learned, 67, "demo"))


@pytest.mark.parametrize("option", ["quick_geglu", "rotary_interleaved"])
def test_models_unknown_to_megatron_deepspeed_are_refused(option: str) -> None:
    config = model_config(
        LLAMA_ARGS | {"swiglu": option != "quick_geglu", option: True}, 67, "demo"
    )
    with pytest.raises(
        ValueError, match=f"--{option.replace('_', '-')}: Megatron-DeepSpeed has no such model"
    ):
        list_unsupported_parts(config)


@pytest.mark.parametrize(
    "splits",
    [
        {"pipeline_model_parallel_layout": "Et|t|t|tttL"},
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        {},
    ],
)
def test_uneven_pipeline_stages_are_in_the_arguments(splits: dict) -> None:
    """Files per rank are read with the layout that their arguments record."""
    layout = Layout.of(6 if splits else 8, 2, 2, 2, splits)
    again = Layout.from_args(
        {"num_layers": sum(map(len, sum(layout.stages, ()))), **layout.arguments()}
    )
    assert again == layout


def test_layout_arguments_keep_their_order() -> None:
    """The order is part of the bytes of a legacy file, as it is pickled with the arguments."""
    arguments = Layout.of(4, 2, 2).arguments()
    assert list(arguments)[:9] == [
        "tensor_model_parallel_size",
        "context_parallel_size",
        "expert_tensor_parallel_size",
        "expert_model_parallel_size",
        "pipeline_model_parallel_size",
        "transformer_pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ]


def test_choices_that_do_not_define_the_model_may_be_unknown():
    """Megatron-LM has more of them."""
    args = LLAMA_ARGS | {"moe_token_dispatcher_type": "flex", "fp8_recipe": "custom"}
    signature = compute_model_signature(model_config(args, 67, "test"))
    assert signature == compute_model_signature(model_config(LLAMA_ARGS, 67, "test"))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("softmax_type", "entmax", "--softmax-type: 'entmax' is not one of vanilla, "),
        ("norm_placement", "sandwich", "--norm-placement: 'sandwich' is not one of pre, "),
        ("rotary_percent", 1.5, "--rotary-percent must be at most 1, got 1.5"),
    ],
)
def test_stored_values_are_checked_like_flags(name, value, message):
    with pytest.raises(ValueError, match=message):
        model_config(LLAMA_ARGS | {name: value}, 67, "test")
