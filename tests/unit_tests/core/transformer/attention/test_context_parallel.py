"""A sequence split over ranks has the losses and gradients of the whole one, for every mask."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.placement import ContextParallel, Placement, compute_local_positions
from megatron.core.transformer.transformer_block import TransformerLayer
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ = 32
BATCH = 2
LLAMA = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "ffn_hidden_size": 48,
    "vocab_size": 53,
    "group_query_attention": True,
    "num_query_groups": 4,
    "max_position_embeddings": SEQ,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
CASES = {  # changed fields of the model, and whether documents are masked
    "causal, rope, groups": ({}, False),
    "window": ({"window_size": (5, 0)}, False),
    "documents": ({}, True),
    "window, documents": ({"window_size": (9, 0)}, True),
    "alibi": ({"position_embedding_type": "alibi"}, False),
    "alibi, documents": ({"position_embedding_type": "alibi", "scale_alibi": True}, True),
    "learned, biases": (
        {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False,
         "add_bias_linear": True, "group_query_attention": False}, False,
    ),
    "qk norm, recomputed attention": ({"qk_layernorm": True, "recompute_granularity": "selective"}, False),
    "softcap, window in every second layer": (
        {"attn_logit_softcapping": 0.1, "window_size": (5, 0), "window_attn_skip_freq": 2, "rotary_base_local": 50.0,
         "norm_placement": "both"}, False,
    ),
    "softcap, documents, norm across heads": (
        {"attn_logit_softcapping": 0.1, "qk_layernorm": True, "qk_layernorm_across_heads": True}, True,
    ),
    "norm per head": ({"qk_layernorm": True, "qk_layernorm_per_head": True}, False),
    "sinks, window in every second layer": (
        {"softmax_type": "learnable", "window_size": (5, 0), "window_attn_skip_freq": 2}, False,
    ),
    "no rope in every second layer": ({"no_rope_freq": 2, "residual_multiplier": 0.3}, False),
    "gate, limited values": ({"attention_output_gate": True, "clip_qkv": 0.05}, False),
    "off-by-one, documents, recomputed attention": (
        {"softmax_type": "off-by-one", "recompute_granularity": "selective"}, True,
    ),
    "recomputed layers": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, False,
    ),
}  # fmt: skip
COMM_TYPES = ["p2p", "all_gather", "a2a"]
MIXED = ["a2a", "p2p"]  # one per layer

slow = pytest.mark.slow


def batch(documents):
    tokens = torch.randint(53, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    whole = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(SEQ).expand(BATCH, SEQ),
        "weights": torch.linspace(0.5, 2.0, SEQ).expand(BATCH, SEQ),
    }
    if documents:  # of 11 tokens, which end inside of chunks
        whole["documents"] = torch.stack((torch.arange(SEQ), torch.arange(5, SEQ + 5))) // 11
    return whole


def compute_losses_and_gradients(rank, world_size, cases, tp, comm_type):
    """Return for each case this rank's positions, its losses, all gradients, and its TP rank.

    Gradients are those of the whole batch, by the name of the parameter.
    """
    parallel = ParallelConfig(
        tp,
        1,
        context_parallel_size=world_size // tp,
        cp_comm_type=comm_type,
        sequence_parallel=tp > 1,
    )
    ps = ParallelState.create(parallel) if world_size > 1 else ParallelState.for_rank(parallel)
    positions = compute_local_positions(SEQ, ps.cp.rank, ps.cp.size)
    return {case: (positions, *run_case(case, ps), ps.tp.rank) for case in cases}


def run_case(case, ps):
    """Return losses and gradients of one case."""
    changes, documents = CASES[case]
    cp = ContextParallel.from_parallel_state(ps)
    model = GPTModel(
        TransformerConfig(**(LLAMA | changes)),
        tp=ps.tp,
        cp=cp,
        sequence_parallel=ps.config.sequence_parallel,
        make_vocab_size_divisible_by=4,
        rng=TensorParallelRng(11, ps.tp.rank),
    )
    model.initialize(seed=3)
    local_batch = cp.select_local(batch(documents))
    losses = model(
        local_batch["tokens"],
        local_batch["position_ids"],
        labels=local_batch["labels"],
        documents=local_batch.get("documents"),
    )
    (losses * local_batch["weights"]).sum().backward()

    for param in model.parameters():
        axes = [ps.dp_cp, ps.tp] if param_info(param).partial_grad else [ps.dp_cp]
        for axis in axes:
            if axis.size > 1:
                dist.all_reduce(param.grad, group=axis.group)
    return losses.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def whole_sequences():
    return compute_losses_and_gradients(0, 1, CASES, 1, "p2p")


def assert_close(got, expected, name):
    torch.testing.assert_close(
        got,
        expected,
        atol=1e-5,
        rtol=1e-5,
        msg=lambda message: f"{name}: {message}",
    )


@pytest.mark.parametrize("comm_type", [*COMM_TYPES, MIXED])
@pytest.mark.parametrize(
    ("cp", "stride"),
    [(2, 2), (4, 2), *(pytest.param(cp, 1, marks=slow) for cp in (2, 4))],
)
def test_losses_and_gradients_equal_those_of_whole_sequences(
    pool, whole_sequences, comm_type, cp, stride
):
    all_positions = []
    # Each case has two of the four types at CP 2, and the other two at CP 4.
    first = [*COMM_TYPES, MIXED].index(comm_type) + cp // 2
    cases = list(CASES)[first % stride :: stride]
    for results in pool.run(compute_losses_and_gradients, cp, cases, 1, comm_type):
        for case, (positions, losses, gradients, _) in results.items():
            _, expected_losses, expected, _ = whole_sequences[case]
            assert_close(losses, expected_losses[:, positions], case)
            for name, gradient in expected.items():
                assert_close(gradients[name], gradient, f"{case}: {name}")
        all_positions += positions.tolist()

    assert sorted(all_positions) == list(range(SEQ))


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_tensor_and_sequence_parallelism(pool, whole_sequences, comm_type):
    """With TP2 x CP2 activations are [s / 4, b, h], and each TP rank has its part of gradients."""
    cases = [
        "causal, rope, groups",
        "alibi, documents",
        "learned, biases",
        "norm per head",
        "sinks, window in every second layer",
    ]
    tp_only = pool.run(compute_losses_and_gradients, 2, cases, 2, comm_type)

    for results in pool.run(compute_losses_and_gradients, 4, cases, 2, comm_type):
        for case, (positions, losses, gradients, tp_rank) in results.items():
            assert_close(losses, whole_sequences[case][1][:, positions], case)
            for name, gradient in tp_only[tp_rank][case][2].items():
                assert_close(gradients[name], gradient, f"{case}: {name}")


def measure_saved_bytes(rank, world_size, comm_type):
    """Return the bytes that the graph of a layer keeps, without parameters and tables."""
    parallel = ParallelConfig(context_parallel_size=world_size, cp_comm_type=comm_type)
    ps = ParallelState.create(parallel)
    # As many groups as heads, since older versions of torch keep a copy for each head.
    config = TransformerConfig(**LLAMA | {"num_query_groups": 8})
    layer = TransformerLayer(
        config,
        Placement(ps.tp, TensorParallelRng(0, 0), ContextParallel.from_parallel_state(ps)),
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(64 // world_size, BATCH, 32, requires_grad=True)
    layer(x)  # creates the tables
    rotary = layer.self_attention.rotary(len(x), x.dtype, x.device)
    permanent = set()
    for tensor in (*layer.parameters(), rotary.cos, rotary.sin):
        permanent.add(tensor.untyped_storage().data_ptr())
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in permanent:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    y.sum().backward()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_saved_activations_are_split(pool, comm_type):
    """Each of 4 ranks keeps a quarter of the activations.

    With a2a the output of attention is kept twice: before and after the exchange.
    """
    (expected,) = pool.run(measure_saved_bytes, 1, comm_type)
    if comm_type == "a2a":
        expected += 64 * BATCH * 32 * 4
    assert pool.run(measure_saved_bytes, 4, comm_type) == [expected / 4] * 4
