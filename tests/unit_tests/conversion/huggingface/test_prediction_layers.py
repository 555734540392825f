"""Layers for multi-token prediction in the files of DeepSeek-V3 and GLM-4.5."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.model import model_config
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.models import GPTModel
from tests.support.compare import assert_same, read_all
from tests.support.memory_source import LLAMA_ARGS, MemorySource, random_source
from tests.unit_tests.conversion.filled_model import fill
from tests.unit_tests.conversion.huggingface.test_export_plan import export, read_files

LAYERS = 3
VOCAB = 67
EXPERTS = LLAMA_ARGS | {
    "num_layers": LAYERS,
    "mtp_num_layers": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 20,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 20,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "max_position_embeddings": 64,
}
LATENT = EXPERTS | {
    "group_query_attention": False,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "rope_type": "rope",
    "qk_layernorm": True,
    "latent_norm_epsilon": 1e-6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
}
MODELS = {"deepseek_v3": LATENT, "glm4_moe": EXPERTS | {"rotary_percent": 0.5}}


def make_source(model_type: str) -> MemorySource:
    source = random_source(MODELS[model_type], VOCAB, optimizer=False)
    for key in source.values:
        if key.endswith("expert_bias"):
            source.values[key] = source.values[key].float()
    return source


@pytest.fixture(params=MODELS)
def exported(request, tmp_path):
    source = make_source(request.param)
    assert write_huggingface(source, tmp_path / "hf") == []
    return request.param, source, tmp_path / "hf"


def test_files_have_every_tensor_and_copies(exported):
    model_type, source, directory = exported
    fields = json.loads((directory / "config.json").read_text())
    assert fields["model_type"] == model_type
    assert fields["num_nextn_predict_layers"] == 2

    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for layer in (LAYERS, LAYERS + 1):
        prefix = f"model.layers.{layer}."
        assert torch.equal(tensors[f"{prefix}embed_tokens.weight"], embedding)
        assert torch.equal(tensors[f"{prefix}shared_head.head.weight"], tensors["lm_head.weight"])

        # The tensors of an ordinary layer, and six more
        last_prefix = f"model.layers.{LAYERS - 1}."
        expected = set()
        for key in tensors:
            if key.startswith(last_prefix):
                expected.add(prefix + key.removeprefix(last_prefix))
        for name in ("embed_tokens", "enorm", "hnorm", "eh_proj"):
            expected.add(f"{prefix}{name}.weight")
        for name in ("shared_head.norm", "shared_head.head"):
            expected.add(f"{prefix}{name}.weight")
        assert {key for key in tensors if key.startswith(prefix)} == expected

    source_again = open_checkpoint(directory)
    assert source_again.unused == []
    assert source_again.args["mtp_num_layers"] == 2
    assert_same(read_all(source_again), read_all(source))


@torch.no_grad()
def test_losses_equal_layers_of_transformers(exported):
    """The layers of the files are run by transformers as further layers of the model."""
    _, source, directory = exported
    config = transformers.AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = LAYERS + 2
    if hasattr(config, "mlp_layer_types") and config.mlp_layer_types is not None:
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse", "sparse"]
    peer, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"]

    # Run the ordinary layers.
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(-1, dims=1)
    layers = peer.model.layers
    peer.model.layers = layers[:LAYERS]
    peer.config.num_hidden_layers = LAYERS
    hidden = peer.model(tokens).last_hidden_state

    # Run each further layer between the tensors that transformers does not read.
    tensors = load_file(directory / "model.safetensors")
    positions = torch.arange(12).expand(2, -1)
    rope = peer.model.rotary_emb(hidden, positions)
    mask = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    expected = []
    for depth in (1, 2):
        prefix = f"model.layers.{LAYERS + depth - 1}."

        def norm(x, name, prefix=prefix):
            return torch.rms_norm(x, x.shape[-1:], tensors[f"{prefix}{name}.weight"], 1e-5)

        shifted = torch.nn.functional.pad(tokens[:, depth:], (0, depth))
        embedding = tensors[f"{prefix}embed_tokens.weight"][shifted]
        inputs = torch.cat((norm(embedding, "enorm"), norm(hidden, "hnorm")), dim=-1)
        projected = inputs @ tensors[f"{prefix}eh_proj.weight"].t()
        layer = layers[LAYERS + depth - 1]
        output = layer(
            projected,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rope,
        )
        if isinstance(output, tuple):
            output = output[0]
        hidden = norm(output, "shared_head.norm")
        logits = hidden @ tensors[f"{prefix}shared_head.head.weight"].t()
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-depth].flatten(0, 1),
            labels[:, depth:].flatten(),
            reduction="sum",
        )
        expected.append(losses)

    # Compare with our model.
    imported = open_checkpoint(directory)
    model = GPTModel(model_config(imported.args, VOCAB, "test")).eval()
    fill(model, imported)
    output = model(tokens, positions, labels=labels)
    torch.testing.assert_close(output.mtp_totals, torch.stack(expected), rtol=1e-4, atol=1e-3)
    assert output.mtp_num_tokens.tolist() == [22.0, 20.0]


def test_layers_that_transformers_leaves_out_are_not_required(exported):
    _, _, directory = exported
    file = directory / "model.safetensors"
    tensors = load_file(file)
    further = tuple(f"model.layers.{layer}." for layer in (LAYERS, LAYERS + 1))
    kept = {key: value for key, value in tensors.items() if not key.startswith(further)}
    save_file(kept, file)
    source = open_checkpoint(directory)

    assert source.unused == []
    assert source.args["mtp_num_layers"] is None

    # An incomplete layer is an error.
    save_file(kept | {f"{further[0]}eh_proj.weight": tensors[f"{further[0]}eh_proj.weight"]}, file)
    with pytest.raises(ValueError, match=r"lack model\.layers\.3\."):
        open_checkpoint(directory)


def test_different_copy_is_refused_unless_the_layers_are_left_out(exported):
    _, _, directory = exported
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.4.embed_tokens.weight"][5, 3] += 1
    save_file(tensors, file)

    with pytest.raises(ValueError, match=r"model\.layers\.4\.embed_tokens\.weight differs from"):
        open_checkpoint(directory)

    source = open_checkpoint(directory, read_options=ReadOptions(args={"mtp_num_layers": 0}))
    assert source.args["mtp_num_layers"] == 0
    assert "model.layers.3.eh_proj.weight" in source.unused


def test_export_during_training_equals_a_conversion(exported, tmp_path):
    _, source, directory = exported
    assert read_files(export(source, tmp_path)) == read_files(directory)


def test_families_without_these_layers_are_refused():
    source = random_source(LLAMA_ARGS | {"mtp_num_layers": 1}, optimizer=False)
    with pytest.raises(ValueError, match="has mtp_num_layers = None instead of 1"):
        write_huggingface(source, None)
