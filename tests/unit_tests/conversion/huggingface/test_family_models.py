"""Models of transformers compute the same here, and exported models compute the same there."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.expert_families import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.model import model_config
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.core.models import GPTModel
from megatron.core.run_checkpoint.keys import is_trained
from tests.support.compare import read_whole
from tests.support.memory_source import random_source

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
QWEN = SIZES | {"moe_intermediate_size": 20, "num_experts": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 1.5,
    "beta_slow": 0.25,
}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.0,
}
WHOLE_QUERIES = {
    "q_lora_rank": None,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
DENSE = {k: v for k, v in SIZES.items() if k != "num_experts_per_tok"}
OPT_LACKS = {"intermediate_size", "num_key_value_heads"}
GEMMA = DENSE | {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MODELS = {
    "olmo2": transformers.Olmo2Config(**DENSE),
    "gemma2": transformers.Gemma2Config(
        **GEMMA, attn_logit_softcapping=0.7, final_logit_softcapping=2.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA, sliding_window_pattern=2, rope_parameters=TWO_ROPES
    ),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=4, router_aux_loss_coef=0.0),
    "deepseek_v3": transformers.DeepseekV3Config(
        **LATENT, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "deepseek_v2": transformers.DeepseekV2Config(
        **LATENT | {"routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy"},
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2_lite": transformers.DeepseekV2Config(
        **LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.0}
    ),
    "deepseek_v3_whole_queries": transformers.DeepseekV3Config(**LATENT | WHOLE_QUERIES),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        sliding_window=9,
        swiglu_limit=0.5,
        router_aux_loss_coef=0.0,
        rope_parameters=YARN | {"truncate": False},
    ),
    "afmoe": transformers.AfmoeConfig(
        **SIZES,
        head_dim=16,
        moe_intermediate_size=20,
        num_experts=4,
        num_dense_layers=1,
        num_shared_experts=1,
        global_attn_every_n_layers=2,
        sliding_window=7,
        mup_enabled=True,
        route_scale=2.5,
    ),
    "flex_olmo": transformers.FlexOlmoConfig(**SIZES, num_experts=4, router_aux_loss_coef=0.0),
    "olmo": transformers.OlmoConfig(**DENSE, clip_qkv=0.3),
    "nanochat": transformers.NanoChatConfig(**DENSE, final_logit_softcapping=2.0),
    "opt": transformers.OPTConfig(
        **{name: DENSE[name] for name in DENSE.keys() - OPT_LACKS},
        ffn_dim=40,
        dropout=0.0,
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **QWEN, shared_expert_intermediate_size=28, norm_topk_prob=False
    ),
    "qwen2_moe_mixed": transformers.Qwen2MoeConfig(
        **QWEN, shared_expert_intermediate_size=28, mlp_only_layers=[1]
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**QWEN, head_dim=16, norm_topk_prob=True),
    "qwen3_moe_every_second": transformers.Qwen3MoeConfig(
        **QWEN, head_dim=8, decoder_sparse_step=2, rope_parameters=YARN
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a model of each kind with transformers, and compute its logits."""
    result = {}
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(5))
    for name, config in MODELS.items():
        torch.manual_seed(11)
        # Its SDPA path leaves softcaps out in some versions.
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases, too
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if name == "opt":
                model.model.decoder.embed_positions.weight[:2] = 0.0  # before the first position
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer), alpha=0.1)
            logits = model(tokens).logits
        directory = tmp_path_factory.mktemp("saved") / name
        model.save_pretrained(directory)
        result[name] = (directory, model, logits)
    return tokens, result


def loaded(source):
    model = GPTModel(
        model_config(source.args, 96, source.description), make_vocab_size_divisible_by=1
    )
    with torch.no_grad():
        for key, entry in model.sharded_state_dict().items():
            entry.local.copy_(read_whole(source, key))
    return model


def positions(tokens):
    return torch.arange(tokens.shape[1]).expand(len(tokens), -1)


def logits_of(source, tokens):
    with torch.no_grad():
        return loaded(source).eval()(tokens, positions(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(saved, name):
    tokens, models = saved
    directory, _, expected = models[name]
    source = open_checkpoint(directory)
    assert source.unused == []
    assert source.args["hf_model_type"] == MODELS[name].model_type
    torch.testing.assert_close(logits_of(source, tokens), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith(("mixtral", "qwen"))]
)
def test_gradients_equal_transformers(saved, tmp_path, name):
    """Compare the gradient of every parameter.

    Those of transformers are read as if they were the weights of a model.
    """
    tokens, models = saved
    directory, theirs, _ = models[name]
    theirs.zero_grad()
    theirs(tokens, labels=tokens).loss.backward()
    gradients = {}
    for key, parameter in theirs.named_parameters():
        value = parameter.grad if parameter.requires_grad else parameter
        gradients[key] = value.contiguous()
    gradients |= {
        key: b for key, b in theirs.named_buffers() if key.endswith("e_score_correction_bias")
    }
    save_file(gradients, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    expected = open_checkpoint(tmp_path)
    model = loaded(open_checkpoint(directory)).train()
    losses = model(tokens[:, :-1], positions(tokens[:, :-1]), labels=tokens[:, 1:])
    losses.mean().backward()
    for key, entry in model.sharded_state_dict().items():
        if entry.local.requires_grad:
            torch.testing.assert_close(
                entry.local.grad,
                read_whole(expected, key),
                rtol=1e-4,
                atol=2e-6,
                msg=lambda m, key=key: f"{key}: {m}",
            )


@pytest.mark.parametrize("name", MODELS)
def test_conversion_chain_keeps_weights_bitwise(saved, tmp_path, name):
    """Convert to torch_dist and legacy files, and to a directory that transformers loads."""
    tokens, models = saved
    directory, _, expected = models[name]
    source = open_checkpoint(directory)
    whole_experts = (
        {"expert_parallel": 2, "expert_tensor_parallel": 1} if name == "gpt_oss" else {}
    )  # with biases
    convert(
        directory,
        tmp_path / "legacy",
        "legacy",
        options=WriteOptions(tensor_parallel=2, **whole_experts),
    )
    convert(tmp_path / "legacy", tmp_path / "torch_dist", "torch_dist")
    convert(tmp_path / "torch_dist", tmp_path / "hf", "hf")
    assert compare(source, open_checkpoint(tmp_path / "hf")) == len(source.tensors)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_read(saved, tmp_path, name):
    """Read experts as transformers 5 has them in memory: one tensor per projection."""
    _, models = saved
    directory, model, _ = models[name]
    save_file(
        {key: value.contiguous() for key, value in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    fused = open_checkpoint(tmp_path)
    assert fused.unused == []
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    source = open_checkpoint(directory)
    assert compare(source, fused) == len(source.tensors)
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    box = (1, 3, 2), (2, source.tensors[key].shape[1] - 4, 7)  # of two experts, across gate and up
    assert torch.equal(source.tensors[key].read(*box), fused.tensors[key].read(*box))
    assert torch.equal(read_whole(source, key)[1:3, 3:-1, 2:9], fused.tensors[key].read(*box))


def test_experts_cannot_be_written_as_universal(saved, tmp_path):
    _, models = saved
    with pytest.raises(
        ValueError, match="universal checkpoints have no name for decoder.* of --num-experts"
    ):
        convert(models["mixtral"][0], tmp_path / "out", "universal")
    assert not (tmp_path / "out").exists()


def test_families_refuse_models_they_cannot_express(saved, tmp_path):
    _, models = saved
    directory = models["mixtral"][0]
    config = model_config(open_checkpoint(directory).args, 96, "a model")
    assert choose_family(config, None) is MIXTRAL
    before_softmax = dataclasses.replace(config, moe_router_pre_softmax=True, qk_layernorm=True)
    assert choose_family(before_softmax, None) is QWEN3_MOE
    assert any("moe_shared_expert" in text for text in QWEN2_MOE.find_obstacles(config))
    sigmoid = dataclasses.replace(config, moe_router_score_function="sigmoid")
    with pytest.raises(
        ValueError, match="The closest, mixtral, has score_function = softmax instead of sigmoid"
    ):
        choose_family(sigmoid, None)
    hf = json.loads((directory / "config.json").read_text())
    for field, value in (
        ("router_jitter_noise", 0.1),
        ("quantization_config", {"quant_method": "aqlm"}),
        ("num_local_experts", -1),
        ("mlp_only_layers", "all"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(hf | {field: value}))
        with pytest.raises(ValueError, match=field):
            open_checkpoint(tmp_path)


def test_biases_without_a_place_must_be_zero(saved, tmp_path):
    """Qwen3-MoE has no biases outside attention: other models are refused before writing."""
    _, models = saved
    args = open_checkpoint(models["qwen3_moe"][0]).args | {"add_bias_linear": True}
    source = random_source(args, 96, optimizer=False)
    biases = [key for key in source.values if key.endswith(".bias") and ".mlp." in key]
    assert any(".experts.experts." in key for key in biases)
    with pytest.raises(
        ValueError,
        match=r"mlp\.router\.bias is not zero, and models of this family have no such bias",
    ):
        write_huggingface(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for key in biases:
        source.values[key].zero_()
    write_huggingface(source, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(source, tokens), model(tokens).logits, rtol=1e-4, atol=2e-5
        )


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj.bias", "mlp.router.bias", "mlp.experts.gate_up_proj_bias"]
)
def test_missing_biases_of_gpt_oss_are_refused(saved, tmp_path, name):
    """gpt-oss always has biases, even if config.json lacks the switch of other families."""
    _, models = saved
    directory = models["gpt_oss"][0]
    key = f"model.layers.1.{name}"
    tensors = load_file(directory / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != key}, tmp_path / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "attention_bias"})
    )
    with pytest.raises(ValueError, match=f"the weights lack {key}"):
        open_checkpoint(tmp_path)


def test_router_bias_stays_in_full_precision(saved, tmp_path):
    """A rounded bias would choose other experts. It has no optimizer state."""
    _, models = saved
    source = random_source(open_checkpoint(models["deepseek_v3"][0]).args, 96)
    bias = "decoder.layers.1.mlp.router.expert_bias"
    assert not is_trained(bias)
    for key in [
        key
        for key in source.values
        if key.startswith("optimizer.") and key.endswith(".expert_bias")
    ]:
        del source.values[key]
    write_torch_dist(source, tmp_path / "run")
    convert(
        tmp_path / "run",
        tmp_path / "half",
        "torch_dist",
        options=WriteOptions(dtype="bf16"),
    )
    convert(
        tmp_path / "run",
        tmp_path / "hf",
        "hf",
        options=WriteOptions(dtype="bf16", optim_sidecar=True),
    )
    tensors = load_file(tmp_path / "hf/model.safetensors")
    assert {value.dtype for name, value in tensors.items() if "e_score_correction" in name} == {
        torch.float32
    }
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    for directory in (tmp_path / "half", tmp_path / "hf"):
        assert torch.equal(read_whole(open_checkpoint(directory), bias), source.values[bias])
    assert compare(source, open_checkpoint(tmp_path / "hf")) == len(source.tensors)
    assert optimizer_key("param", bias) not in open_checkpoint(tmp_path / "hf").tensors
