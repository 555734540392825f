"""Encoded weights have the products and gradients of decoded ones, and the bytes of bitsandbytes."""

import math
import types
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.dist_checkpointing.mapping import Box, ShardedTensor
from megatron.core.models import GPTModel
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.adapters import base_encodings, encoded_weight
from megatron.training.adapters.adapted_layers import reset_magnitudes
from megatron.training.adapters.encoded_layers import count_frozen_bytes, index_encoded_layers
from megatron.training.adapters.frozen_weights import allocate_weight, store_elements
from megatron.training.adapters.targets import add_adapters
from megatron.training.config.lora_options import LoraConfig
from tests.support.live_tensors import LiveTensors
from tests.support.quantized import GOLDEN, decode_case, list_cases, open_case_components

CASES = list_cases()

DENSE = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=128,
    max_position_embeddings=16,
    vocab_size=40,
    position_embedding_type="rope",
    swiglu=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
EXPERTS = replace(
    DENSE,
    num_experts=4,
    moe_ffn_hidden_size=128,
    moe_shared_expert_intermediate_size=64,
    add_bias_linear=False,
)
ENCODED = LoraConfig(lora_rank=3, lora_alpha=12.0, lora_base_encoding="nf4")
NF4 = base_encodings.ENCODINGS["nf4"]
TOKENS = torch.arange(20).view(2, 10) * 7 % 40


def build(config, lora):
    """Return a model with values of the same seed; adapters change its outputs."""
    model = GPTModel(config)
    add_adapters(model, lora, TensorParallelRng(0, 0))
    model.initialize(1)
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if name.endswith("lora_B"):
            param.data.normal_(0, 0.1, generator=generator)
    return model


def build_both(config, lora=ENCODED):
    """Return a model with encoded weights, and one with the decoded values."""
    plain = build(config, replace(lora, lora_base_encoding=None))
    encoded = build(config, lora)
    layers = index_encoded_layers([encoded])
    for name, param in plain.named_parameters():
        layer = layers.get(encoded.get_parameter(name))
        if layer is not None:
            layer.store_rows(0, param.detach().flatten(0, -2))
            param.data.copy_(layer.decode_weight())
    for model in (encoded, plain):
        reset_magnitudes(model)
    return encoded, plain


def compute_loss(model):
    positions = torch.arange(10).expand(2, 10)
    return model(TOKENS, positions, labels=TOKENS.roll(-1, 1)).mean()


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [(DENSE, 8), (EXPERTS, 12)],
    ids=["dense", "experts"],
)
@pytest.mark.parametrize(
    ("encoding", "targets"),
    [("nf4", ["linear_qkv", "linear_fc1", "linear_fc2"]), ("fp8", ["q_proj"])],
)
@pytest.mark.parametrize("dora", [False, True])
def test_gradients_are_those_of_decoded_weights(config, num_layers, encoding, targets, dora):
    """Bitwise, with and without adapters on a layer."""
    lora = replace(ENCODED, lora_targets=targets, lora_base_encoding=encoding, lora_dora=dora)
    models = build_both(config, lora)
    losses = []
    for model in models:
        loss = compute_loss(model)
        loss.backward()
        losses.append(loss.item())

    encoded, plain = models
    assert losses[0] == losses[1]
    assert len(index_encoded_layers([encoded])) == num_layers

    num_gradients = 0
    for name, param in plain.named_parameters():
        if param.grad is not None:
            assert torch.equal(encoded.get_parameter(name).grad, param.grad), name
            num_gradients += param.grad.norm() > 0

    assert num_gradients >= 2 * len(targets)


def test_memory_is_that_of_the_encoding():
    """Neither the model nor tensors saved for the backward pass contain decoded weights."""
    encoded, plain = build_both(DENSE)
    layers = index_encoded_layers([encoded])
    num_elements = sum(weight.numel() for weight in layers)
    assert all(weight.is_meta for weight in layers)

    saved = num_elements * 4 - num_elements // 2 - num_elements // 64 * 4
    assert count_frozen_bytes(plain) - count_frozen_bytes(encoded) == saved

    kept = []
    for model in (encoded, plain):
        compute_loss(model)  # makes tables
        with LiveTensors() as live:
            loss = compute_loss(model)
            kept.append(live.live)  # with the weights, of which there are views
        del loss

    assert kept[1] - kept[0] == saved


def test_nf4_has_the_bytes_of_bitsandbytes():
    folder = GOLDEN / "bitsandbytes_nf4"
    tensors = load_file(folder / "model.safetensors")
    expected = load_file(folder / "expected.safetensors")["matrix.weight"]
    weight = NF4.encode(expected)

    assert list(NF4.values) == tensors["matrix.weight.quant_map"].tolist()
    assert torch.equal(weight.packed.view(-1, 1), tensors["matrix.weight"])
    assert torch.equal(weight.scales.view(-1), tensors["matrix.weight.absmax"])
    assert torch.equal(weight.decode(expected.dtype), expected)


def test_nf4_rounds_to_the_nearest_value(monkeypatch):
    """The bytes are equal also in blocks of zeros, and with several runs of blocks per matrix."""
    values = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    values[2, 64:] = 0.0
    scales = values.view(-1, 64).abs().amax(1).view(6, 2)
    grid = torch.tensor(NF4.values) * scales.repeat_interleave(64, 1).unsqueeze(-1)
    distances = (grid - values.unsqueeze(-1)).abs()
    nearest = distances.amin(-1)
    for max_blocks in (1 << 18, 5):
        monkeypatch.setattr(base_encodings, "_MAX_BLOCKS", max_blocks)
        monkeypatch.setattr(encoded_weight, "_MAX_ELEMENTS", max_blocks * 64)
        decoded = NF4.encode(values).decode(torch.float32)
        differences = (decoded - values).abs()
        torch.testing.assert_close(differences, nearest, atol=1e-7, rtol=0)
        assert not decoded[2, 64:].any()


def test_fp8_rounds_elements_to_e4m3():
    values = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    fp8 = base_encodings.ENCODINGS["fp8"]
    weight = fp8.encode(values)
    decoded = weight.decode(torch.float32)
    blocks = values.view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    assert torch.equal(weight.scales.view(-1, 1), largest / 448)
    rounding = torch.maximum(blocks.abs() / 16, largest / 448 / 1024)
    assert ((decoded.view(-1, 64) - blocks).abs() <= rounding * 1.001).all()


def test_columns_must_be_whole_blocks():
    with pytest.raises(ValueError, match=r"linear_fc2 has 96 columns on a rank, .* multiple of 64"):
        build(replace(DENSE, ffn_hidden_size=96), ENCODED)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_kept_encodings_have_the_values_of_the_library(name, num_ranks):
    """Bitwise in the dtypes of all runs, also for columns that begin and end inside of groups."""
    folder = GOLDEN / name
    components = open_case_components(folder)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for key, tensor in decode_case(folder, dtype).items():
            expected = tensor.read_all()
            *_, rows, columns = expected.shape
            for rank in range(num_ranks):
                start = columns * rank // num_ranks
                stop = columns * (rank + 1) // num_ranks
                box = expected[..., start:stop].contiguous()
                weight = keep_box(components, key, start, box)
                assert torch.equal(weight.decode(dtype), box), (key, dtype)


def keep_box(components, key, start, box):
    """Return some columns of a matrix, or of a stack of matrices, in the encoding of the files."""
    entry = ShardedTensor(key, (), box.dtype, (Box((*(0,) * (box.dim() - 1), start), box),), box)
    layer = types.SimpleNamespace(frozen=box, weight=box, encoding=None)
    assert allocate_weight(layer, entry, components)
    store_elements(layer, entry, components)
    return layer.frozen


def test_memory_of_kept_encodings():
    """Bytes per weight are those of the files; zero points take a byte."""
    expected = {
        "awq": 0.5 + 3 / 32,
        "gptq_2": 0.25 + 3 / 32,
        "compressed_int4_group": 0.5 + 2 / 32,
        "compressed_mxfp4": 0.5 + 1 / 32,
        "compressed_nvfp4": 0.5 + 1 / 16 + 4 / 64,
        "bitsandbytes_nf4": 0.5 + 4 / 64,
    }
    for name, bytes_per_weight in expected.items():
        components = open_case_components(GOLDEN / name)
        ((key, tensor),) = decode_case(GOLDEN / name, torch.float32).items()
        weight = keep_box(components, key, 0, tensor.read_all())
        assert weight.nbytes == bytes_per_weight * math.prod(tensor.shape), name
