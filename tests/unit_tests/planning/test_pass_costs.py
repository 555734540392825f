"""Layers measured without memory compared with the tensors that autograd keeps, and with published
formulas.
"""

from dataclasses import replace

import pytest
import torch

from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_block import TransformerLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planning.pass_costs import Part, PassCosts
from megatron.training.config.parsing import parse_args
from pretrain_gpt import model_provider
from tests.support.torch_versions import of_current_torch

SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32}
GATED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LATENT = GATED | {
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
GPT_OSS = {
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable",
}
UP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
WHOLE_QUERIES = {"q_lora_rank": None, "v_head_dim": 24}
SEQ = 32
BATCH = 2
LAYER = Part(range(1))
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    "--max-position-embeddings 8 --train-iters 1 --lr 1 --mock-data --vocab-size 8 "
    "--tokenizer-type NullTokenizer"
)


def config(**changes):
    return TransformerConfig(**(SIZES | PLAIN | changes))


def measure(
    model,
    device_type="cpu",
    part=LAYER,
    vocab_size=128,
    compile=False,
    triton_kernels=True,
    **parallel,
):
    """Return the cost of a part of a model, on one rank of a layout."""
    base = parse_args(FLAGS.split(), 1)
    config = replace(
        base,
        model=replace(model, vocab_size=vocab_size),
        parallel=ParallelConfig(**parallel),
        data=replace(base.data, seq_length=SEQ),
        training=replace(base.training, micro_batch_size=BATCH),
        distributed=replace(base.distributed, compile=compile, triton_kernels=triton_kernels),
    )
    ps = ParallelState.for_rank(config.parallel, config.parallel.replica_size)
    return PassCosts(config, ps, model_provider, device_type).measure(part)


def saved_bytes(model):
    """Return the bytes of the storages that a layer keeps in the graph, with its input and without
    parameters and tables.
    """
    layer = TransformerLayer(model, Placement(Axis(), TensorParallelRng(0, 0)))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(SEQ, BATCH, model.hidden_size, dtype=model.params_dtype, requires_grad=True)
    layer(x)  # the tables exist from now on
    lasting = {t.untyped_storage().data_ptr() for t in layer.parameters()}
    if layer.self_attention.rotary is not None:
        rotary = layer.self_attention.rotary(SEQ, model.params_dtype, x.device)
        lasting |= {t.untyped_storage().data_ptr() for t in rotary if isinstance(t, torch.Tensor)}
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in kept.values())


@of_current_torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GATED,
        GATED | GROUPED,
        GATED | {"qk_layernorm": True},
        LATENT,
        LATENT | {"qk_layernorm": True},
        LATENT | WHOLE_QUERIES,
        LATENT | UP_AGAIN,
        GATED | {"swiglu": False, "geglu": True, "norm_placement": "both"},
        GATED | {"norm_placement": "post"},
        GATED | GROUPED | GPT_OSS,
        GATED | GROUPED | {"attention_output_gate": True},
        GATED | GROUPED | {"clip_qkv": 1.0},
        GATED | {"norm_weights": False},
        {"norm_weights": False, "relu": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_layer_bytes_match_autograd(changes, bf16):
    model = config(**changes, bf16=bf16)
    assert measure(model).kept == pytest.approx(saved_bytes(model), rel=0.01)


@of_current_torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GATED | GROUPED,
        GATED | {"qk_layernorm": True},
        LATENT,
        LATENT | WHOLE_QUERIES,
        {"recompute_granularity": "selective"},
        {"hidden_dropout": 0.1},
        {"hidden_dropout": 0.1, "attention_dropout": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_layer_bytes_with_dropout_on_a_cpu_match_autograd(changes, bf16):
    model = config(**({"attention_dropout": 0.1, "bf16": bf16} | changes))
    assert measure(model).kept == pytest.approx(saved_bytes(model), rel=0.01)


@of_current_torch
def test_windows_with_dropout_on_a_cpu_keep_no_mask():
    model = config(**GATED, attention_dropout=0.1, window_size=(8, 0))
    assert measure(model).kept == pytest.approx(saved_bytes(model), rel=0.01)


def test_experts_match_autograd():
    """All rows of a rank are kept, whichever experts they go to."""
    model = config(**GATED, num_experts=4, moe_ffn_hidden_size=32)
    assert measure(model).kept == pytest.approx(saved_bytes(model), rel=0.01)


def test_sequence_parallelism_halves_all_activations():
    """Korthikanti et al. 2022: with it all of a layer's activations are divided by the number of
    ranks.
    """
    model = config()
    one_rank = measure(model).kept
    two_ranks = measure(model, tensor_model_parallel_size=2).kept
    shards = measure(model, tensor_model_parallel_size=2, sequence_parallel=True).kept
    assert shards * 2 == pytest.approx(one_rank, abs=8)
    assert one_rank / 2 < two_ranks < one_rank


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_collectives(sequence_parallel):
    """Shoeybi et al. 2019: two all-reduces in each direction; Korthikanti et al. 2022: a gather and
    a scatter each, and the inputs gathered again in backward.
    """
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    whole = SEQ * BATCH * 64 * 4
    expected = {("tp", "all_reduce"): 4 * whole}
    if sequence_parallel:
        expected = {("tp", "all_gather"): 6 * whole, ("tp", "reduce_scatter"): 4 * whole}
    assert measure(config(), **layout).sent == expected


def test_recomputed_layers_keep_their_input():
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    model = config(**full, recompute_num_layers=2)
    residual = SEQ * BATCH * 64 * 4
    group = measure(model, part=Part(range(2), recompute=True))
    layer = measure(config())
    assert group.kept == residual
    # Backward runs a whole group again.
    assert group.temporary >= 2 * layer.kept - residual


def test_attention_on_cuda_keeps_no_scores():
    """Flash attention and the memory-efficient kernel keep one number per row, with dropout, too.

    Dropout keeps the generator's state besides.
    """
    for bf16 in (False, True):
        plain = config(bf16=bf16)
        dropped = config(bf16=bf16, attention_dropout=0.1)
        on_cpu = measure(plain).kept
        assert measure(plain, "cuda").kept == pytest.approx(on_cpu, abs=64)
        assert measure(dropped, "cuda").kept == pytest.approx(on_cpu, abs=64)


def test_dropout_on_cuda_keeps_booleans():
    dropped = config(hidden_dropout=0.1)
    num_elements = SEQ * BATCH * 64
    without_masks = measure(config(), "cuda").kept
    assert measure(dropped, "cuda").kept == without_masks + 2 * num_elements


def test_compiled_layers_without_kernels_keep_rotated_heads_twice():
    """The values are a view of the output of the projection, which is kept as a whole."""
    model = config(**GATED, bf16=True)
    rotated = 2 * SEQ * BATCH * 64 * 2
    eager = measure(model, "cuda").kept
    assert measure(model, "cuda", compile=True).kept == eager
    assert measure(model, "cuda", compile=True, triton_kernels=False).kept == eager + rotated


def test_logits_are_kept_once_and_split():
    head = Part(post_process=True)
    whole = measure(config(bf16=True), part=head, vocab_size=1024).kept
    layout = {"tensor_model_parallel_size": 2}
    split = measure(config(bf16=True), part=head, vocab_size=1024, **layout).kept
    logits = SEQ * BATCH * 1024 * 2
    assert whole - split == pytest.approx(logits / 2, rel=0.01)
    assert logits < whole < 1.2 * logits


def test_parts_are_measured_once(monkeypatch):
    chunks = []

    def count_chunks(config, spec):
        chunks.append(spec)
        return model_provider(config, spec)

    base = parse_args(FLAGS.split(), 1)
    model = config(vocab_size=128)
    data = replace(base.data, seq_length=SEQ)
    run = replace(base, model=model, data=data, training=replace(base.training, micro_batch_size=1))
    for _ in range(2):
        costs = PassCosts(run, ParallelState.for_rank(run.parallel), count_chunks, "cpu")
        assert costs.measure(Part(range(0, 1))) == costs.measure(Part(range(2, 3)))
    assert len(chunks) == 1


def test_a_measurement_draws_no_random_numbers():
    before = torch.get_rng_state()
    measure(config(hidden_dropout=0.2, attention_dropout=0.2))
    assert torch.equal(torch.get_rng_state(), before)
