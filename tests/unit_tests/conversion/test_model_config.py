"""The tensors that a configuration implies, against the model itself."""

import pytest
from memory_source import BLOOM_ARGS, GPT_ARGS, LLAMA_ARGS

from megatron.conversion.model_space.model import mathematics, model_config, model_tensors
from megatron.core.models.gpt import GPTModel

VARIANTS = [
    LLAMA_ARGS,
    LLAMA_ARGS | {"qk_layernorm": True, "kv_channels": 12, "add_qkv_bias": True},
    LLAMA_ARGS | {"add_bias_linear": True, "untie_embeddings_and_output_weights": False},
    GPT_ARGS,
    GPT_ARGS | {"qk_layernorm": True, "swiglu": True, "add_bias_linear": False},
    BLOOM_ARGS,
]


@pytest.mark.parametrize("args", VARIANTS)
def test_tensors_are_those_of_the_model(args: dict) -> None:
    config = model_config(args, 67, "test")
    state = GPTModel(config).sharded_state_dict()
    assert {key: entry.global_shape for key, entry in state.items()} == model_tensors(config)


def test_spelling_does_not_matter() -> None:
    def same(a: dict, b: dict) -> bool:
        return mathematics(model_config(a, 67, "a")) == mathematics(model_config(b, 67, "b"))

    assert same(GPT_ARGS, GPT_ARGS | {"kv_channels": 8, "ffn_hidden_size": 128, "bf16": True, "hidden_dropout": 0.3})
    assert same(LLAMA_ARGS, LLAMA_ARGS | {"rope_scaling_factor": 3.0, "max_position_embeddings": 99})
    assert not same(LLAMA_ARGS, LLAMA_ARGS | {"use_rope_scaling": True})
    assert not same(GPT_ARGS, GPT_ARGS | {"bias_gelu_fusion": False})
    assert same(GPT_ARGS, GPT_ARGS | {"bias_gelu_fusion": False, "openai_gelu": True})


def test_missing_arguments_are_asked_for() -> None:
    with pytest.raises(ValueError, match="demo does not tell hidden_size: give --hidden-size"):
        model_config({"num_layers": 2, "num_attention_heads": 4}, 67, "demo")
    learned = {name: value for name, value in GPT_ARGS.items() if name != "max_position_embeddings"}
    with pytest.raises(ValueError, match="--max-position-embeddings"):
        model_tensors(model_config(learned, 67, "demo"))
