"""Layers with experts: routing, losses and gradients are those of Megatron-LM and of transformers."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from megatron.conversion.model_space.model import make_local_name
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models import GPTModel
from megatron.core.module import Normal
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelConfig, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.grouped_linear import GroupedLinear, compute_grouped_product
from megatron.core.transformer.layer_pattern import parse_layer_pattern
from megatron.core.transformer.moe import TopKRouter
from megatron.core.transformer.moe.dispatch import Permutation
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import (
    choose,
    choose_by_sinkhorn,
    find_routers,
    finish_step,
    run_sinkhorn,
)
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from tests import ROOT
from tests.support.compare import assert_same
from tests.support.live_tensors import LiveTensors

GOLDEN = ROOT / "tests/golden/megatron_moe"
BASE = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "group_query_attention": True, "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "vocab_size": 288, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
QWEN = {
    "num_experts": 8, "moe_ffn_hidden_size": 16, "moe_router_topk": 4, "moe_router_pre_softmax": True,
    "moe_z_loss_coeff": 1e-3, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "bf16": True,
    "add_qkv_bias": True,
}  # fmt: skip
DEEPSEEK = {
    "num_layers": 4, "num_experts": 8, "moe_ffn_hidden_size": 16, "moe_layer_freq": [0, 1, 1, 1], "num_query_groups": 4,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4,
    "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_shared_expert_intermediate_size": 32, "rope_type": "rope",
    "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8, "qk_layernorm": True,
}  # fmt: skip
CASES = {
    "deepseek_fp32": DEEPSEEK,
    "mixtral_fp32": {},
    "drop_fp32": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "qwen2moe_bf16": QWEN,
}


def config_of(**options):
    return TransformerConfig(**(BASE | options))


class Reference:
    """What Megatron-LM computed of one micro-batch, tensors by our names."""

    def __init__(self, case):
        self.arrays = np.load(GOLDEN / case / "initial_forward.npz")
        # The model that drops tokens has the weights of the other one.
        self.weights = (
            self.arrays
            if case != "drop_fp32"
            else np.load(GOLDEN / "mixtral_fp32/initial_forward.npz")
        )

    def tensor(self, kind, name):
        name = make_local_name(name)
        arrays = self.weights if kind == "weight" else self.arrays
        if "mlp.experts." not in name:
            return torch.from_numpy(arrays[f"{kind}:{name}"])
        layer, projection = name.split("experts.")
        each = [
            key
            for key in arrays.files
            if key.startswith(f"{kind}:{layer}experts.") and key.endswith(projection)
        ]
        return torch.stack([torch.from_numpy(arrays[key]) for key in each])


@pytest.mark.parametrize("case", CASES)
def test_one_micro_batch_of_megatron(case):
    """Logits, choice and weights of every token, auxiliary losses, and all gradients."""
    config = config_of(**CASES[case])
    reference = Reference(case)
    tolerance = 2e-2 if config.bf16 else 2e-6
    model = GPTModel(config, make_vocab_size_divisible_by=32)
    for name, param in model.named_parameters():
        kind = "buffer" if name.endswith("expert_bias") else "weight"
        param.data.copy_(reference.tensor(kind, name))
    tokens, labels = (
        torch.from_numpy(reference.arrays[name]).long() for name in ("tokens", "labels")
    )
    positions = torch.arange(64).expand(2, -1)
    with torch.no_grad():
        logits = model.eval()(tokens, positions)
    expected = torch.from_numpy(reference.arrays["logits"])
    assert (logits.float() - expected).norm() < tolerance * expected.norm()
    routings = []
    of_model = find_routers([model.train()])
    for router in of_model:
        router.start_step(1.0, per_token_loss=False)
        router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    losses = model(tokens, positions, labels=labels)
    losses.mean().backward()
    finish_step(of_model)
    for router, routing in zip(of_model, routings, strict=True):
        layer = router.layer_number
        kept = 1.0 if routing.kept is None else routing.kept
        probs = torch.zeros(128, config.experts).scatter(
            1, routing.experts, routing.probs.float() * kept
        )
        expected = torch.from_numpy(reference.arrays[f"probs:decoder.layers.{layer}.mlp.router"])
        if not config.bf16:
            assert torch.equal(probs != 0, expected != 0)
            torch.testing.assert_close(probs, expected, rtol=0, atol=tolerance)
        else:  # a tie of two rounded scores may fall either way
            assert ((probs != 0) == (expected != 0)).float().mean() > 0.99
        for name in router.recorded.keys() - {"tokens_per_expert"}:
            expected_loss = reference.arrays[f"aux:{name}"][layer]
            assert router.recorded[name].item() == pytest.approx(expected_loss, rel=tolerance), name
        assert router.recorded["tokens_per_expert"].sum() == (probs != 0).sum()
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        expected = reference.tensor("grad", name)
        error = (param.grad.float() - expected).norm() / expected.norm()
        assert error < (0.05 if config.bf16 else 5e-6), name


def test_mixtral_of_transformers():
    """Logits and gradients of the same weights."""
    theirs = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=96, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
            sliding_window=None, rope_theta=10000.0, rms_norm_eps=1e-5, router_aux_loss_coef=0.0,
        )
    )  # fmt: skip
    config = config_of(
        hidden_size=32,
        moe_ffn_hidden_size=24,
        vocab_size=96,
        moe_aux_loss_coeff=0.0,
        init_method_std=0.1,
    )
    ours = GPTModel(config, make_vocab_size_divisible_by=1)
    ours.initialize(3)
    names = dict(ours.named_parameters())
    state = theirs.state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        own = f"decoder.layers.{layer}."
        q, k, v = (
            names[own + "self_attention.linear_qkv.weight"].view(2, 32, 32).split([16, 8, 8], dim=1)
        )
        state[prefix + "self_attn.q_proj.weight"].copy_(q.reshape(32, 32))
        state[prefix + "self_attn.k_proj.weight"].copy_(k.reshape(16, 32))
        state[prefix + "self_attn.v_proj.weight"].copy_(v.reshape(16, 32))
        state[prefix + "self_attn.o_proj.weight"].copy_(
            names[own + "self_attention.linear_proj.weight"]
        )
        state[prefix + "mlp.gate.weight"].copy_(names[own + "mlp.router.weight"])
        state[prefix + "mlp.experts.gate_up_proj"].copy_(
            names[own + "mlp.experts.linear_fc1.weight"]
        )
        state[prefix + "mlp.experts.down_proj"].copy_(names[own + "mlp.experts.linear_fc2.weight"])
    state["model.embed_tokens.weight"].copy_(names["embedding.word_embeddings.weight"])
    state["lm_head.weight"].copy_(names["output_layer.weight"])
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens, labels=tokens)
    losses = ours(tokens, torch.arange(32).expand(2, -1), labels=tokens.roll(-1, 1))[:, :-1]
    assert losses.mean().item() == pytest.approx(expected.loss.item(), abs=1e-6)
    expected.loss.backward()
    losses.mean().backward()
    for layer in range(2):
        for name, key in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            grad = theirs.get_parameter(f"model.layers.{layer}.mlp.experts.{name}").grad
            torch.testing.assert_close(
                names[f"decoder.layers.{layer}.mlp.experts.{key}.weight"].grad,
                grad,
                rtol=1e-4,
                atol=1e-7,
            )


@pytest.mark.parametrize("complete", [True, False])
def test_permutation(complete):
    """Sorted by key, in the order of the rows; gather and combine are transposed to each other."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, 5 if complete else 6, (7, 3), generator=generator)
    order = Permutation(keys, 5, complete)
    rows = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    expected = [
        row
        for key in range(5)
        for row in range(7)
        for column in range(3)
        if keys[row, column] == key
    ]
    gathered = order.gather(rows)
    assert torch.equal(gathered, rows[expected])
    assert order.counts.tolist() == [(keys == key).sum().item() for key in range(5)]
    plain = torch.zeros(7, 4, dtype=torch.float64).index_add(0, torch.tensor(expected), gathered)
    torch.testing.assert_close(order.combine(gathered, 7), plain)
    torch.autograd.gradcheck(lambda x: order.combine(order.gather(x).sin(), 7), rows)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
def test_grouped_product_is_torchs_own():
    x = torch.randn(9, 8)
    matrices = torch.randn(4, 8, 16)
    counts = torch.tensor([2, 0, 3, 4])
    expected = F.grouped_mm(x, matrices, offs=counts.cumsum(0).int())
    torch.testing.assert_close(compute_grouped_product(x, matrices, counts), expected)


def test_products_below_fp32_have_few_shapes():
    """On a CPU a kernel is compiled for each of them. What is added to an expert's rows changes
    nothing.
    """

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.mm:
                seen.add((tuple(args[0].shape), tuple(args[1].shape)))
            return function(*args, **(kwargs or {}))

    seen: set = set()
    linear = GroupedLinear(
        TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, num_experts=2, bf16=True
        ),
        *(16, 24),
        init=Normal(0.5),
        split_dim=1,
        axes=ExpertAxes(),
    )
    linear.initialize(1)
    for first in range(64, 256):  # another number of rows in every step
        counts = torch.tensor([first, 300 - first])
        x = torch.randn(300, 16, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(300, 24, dtype=torch.bfloat16)
        linear.weight.grad = None
        with Shapes():
            linear(x, counts).backward(dy)
        if first in (64, 67, 211):
            weight = linear.weight.detach().float()
            for expert, rows in enumerate((slice(first), slice(first, None))):
                matrix = weight[expert]
                rows_of_x = x.detach()[rows].float()
                rows_of_dy = dy[rows].float()
                close = partial(torch.testing.assert_close, rtol=2e-2, atol=5e-2)
                close(linear(x, counts)[rows].float(), rows_of_x @ matrix.T)
                close(x.grad[rows].float(), rows_of_dy @ matrix)
                close(linear.weight.grad[expert].float(), rows_of_dy.T @ rows_of_x, atol=0.5)
    assert len(seen) <= 3 * 14  # kinds of products; multiples of 16 from 48 to 256


def test_groups_limit_the_choice():
    """Two of four groups by the sum of their best scores; the bias chooses, and is not in the
    weights.
    """
    options = {
        "num_experts": 8, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
    }  # fmt: skip
    logits = torch.tensor([[3.0, -9.0, 2.0, 1.9, -1.0, -1.0, 2.5, -9.0]])
    bias = torch.zeros(8)
    config = config_of(**options)
    experts, probs = choose(logits, config, bias)
    assert set(experts[0].tolist()) == {0, 6}
    assert probs.sum().item() == pytest.approx(2.5)
    bias[4] = 10.0  # its group wins, and it is chosen; its weight is that of its own score
    experts, probs = choose(logits, config, bias)
    assert set(experts[0].tolist()) == {4, 0}
    scores = torch.sigmoid(logits[0, experts[0]])
    torch.testing.assert_close(probs[0], 2.5 * scores / scores.sum())


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn(k):
    """In training every expert gets its share of tokens that all prefer one; the weights are those
    of plain scores.
    """
    config = config_of(
        moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0, moe_router_topk=k
    )
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(2)) + torch.tensor(
        [3.0, 0.0, 0.0, 0.0]
    )
    spread = run_sinkhorn(logits)
    torch.testing.assert_close(spread.sum(1), torch.full((64,), 1 / 64), rtol=2e-2, atol=0)
    torch.testing.assert_close(spread.sum(0), torch.full((4,), 1 / 4), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        spread.log() - logits,
        (spread.log() - logits)[:1]
        + (spread.log() - logits)[:, :1]
        - (spread.log() - logits)[:1, :1],
    )  # rows and columns were scaled, no more
    scores = logits.sigmoid() if k == 1 else logits.softmax(1)
    for training, basis in ((True, spread), (False, scores)):
        experts, probs = choose_by_sinkhorn(logits, config, training)
        assert torch.equal(experts, basis.topk(k, 1).indices) and torch.equal(
            probs, scores.gather(1, experts)
        )
    loads = [
        choose_by_sinkhorn(logits, config, training)[0].flatten().bincount(minlength=4).max()
        for training in (True, False)
    ]
    assert loads[0] < loads[1] * 0.6 and config.load_balancing == {}


def test_the_expert_bias_follows_the_load():
    config = config_of(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk=1
    )
    router = TopKRouter(config, layer_number=0, axes=ExpertAxes())
    torch.nn.init.zeros_(router.weight)
    router.expert_bias.copy_(torch.tensor([0.3, 0.2, 0.1, 0.0]))
    router.start_step(1.0, per_token_loss=False)
    router(torch.ones(8, 16), 2).probs.sum().backward()
    finish_step([router])  # all of the load was the first expert's
    torch.testing.assert_close(router.expert_bias, torch.tensor([0.299, 0.201, 0.101, 0.001]))


def biases_after_steps(rank, world_size, ddp, sizes, **optimizer):
    """Of experts, after steps with gradients that each rank makes from (name, step)."""
    parallel = ParallelConfig(**sizes)
    ps = ParallelState.create(parallel) if world_size > 1 else ParallelState.for_rank(parallel)
    model = GPTModel(config_of(add_bias_linear=True), experts=ps.expert_axes)
    model.initialize(seed=5)
    params = dict(model.named_parameters())
    biases = {
        name: param
        for name, param in params.items()
        if ".experts." in name and name.endswith(".bias")
    }
    for param in biases.values():
        param.data.fill_(1.0)
    chunk = DistributedDataParallel(model, DistributedDataParallelConfig(**ddp), ps.dp_cp, ps.edp)
    optimizer = MegatronOptimizer([chunk], OptimizerConfig(lr=0.1, clip_grad=0.0, **optimizer), ps)
    for step in range(2):
        for name, param in params.items():
            if param.requires_grad:
                seed = step * 1000 + sum(map(ord, name))
                param.main_grad.normal_(generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    chunk.finish_param_sync()
    return {name: param.detach() for name, param in biases.items()}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("world_size", "sizes", "shapes"),
    [
        (1, {}, {(4, 64), (4, 16)}),
        (2, {"expert_model_parallel_size": 2}, {(2, 64), (2, 16)}),
        (2, {"expert_tensor_parallel_size": 2}, {(4, 32), (4, 16)}),
    ],
    ids=["one", "ep2", "etp2"],
)
def test_biases_of_experts_are_no_matrices(pool, world_size, sizes, shapes, sharded):
    """They are `[experts, n]`, and have no weight decay; Muon leaves them to Adam."""
    after = partial(biases_after_steps, ddp={"use_distributed_optimizer": sharded}, sizes=sizes)
    plain = pool.run(partial(after, weight_decay=0.0), world_size)
    for rule in ("adam", "muon"):
        decayed = pool.run(partial(after, weight_decay=0.5, optimizer=rule), world_size)
        for expected, got in zip(plain, decayed, strict=True):
            assert {tuple(bias.shape) for bias in expected.values()} == shapes
            assert all((bias != 1.0).all() for bias in expected.values())
            assert_same(got, expected)


def test_a_choice_at_random_uses_all_experts():
    """--moe-router-force-load-balancing: whatever the weights say, which have gradients all the same."""
    config = config_of(
        moe_router_topk=2, moe_router_force_load_balancing=True, moe_aux_loss_coeff=0.0
    )
    router = TopKRouter(config, layer_number=0, axes=ExpertAxes())
    router.initialize(seed=1)
    router.weight.data[0].fill_(10.0)
    routing = router(torch.ones(2000, 16), 2)
    assert (routing.experts.flatten().bincount(minlength=4) / 1000 - 1).abs().max() < 0.15
    routing.probs[:, 0].sum().backward()
    assert (router.weight.grad.abs() > 0).all()


def all_to_the_first_experts(rank, world_size, options):
    """Output and gradients of a layer whose tokens all choose experts 0 and 1, which are on the
    first rank of EP 2.
    """
    parallel = ParallelConfig(expert_model_parallel_size=world_size)
    ps = ParallelState.create(parallel) if world_size > 1 else ParallelState.for_rank(parallel)
    place = Placement(Axis(), TensorParallelRng(0, 0), experts=ps.expert_axes)
    layer = MoELayer(
        config_of(moe_router_topk=2, moe_aux_loss_coeff=0.0, **options), place, layer_number=0
    )
    layer.initialize(seed=3)
    layer.router.weight.data[:2].fill_(1.0)
    layer.router.weight.data[2:].fill_(-1.0)
    tokens = torch.rand(6, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output = layer(tokens)
    output.square().sum().backward()
    gradients = {name: param.grad for name, param in layer.experts.named_parameters()}
    return (
        output.detach(),
        tokens.grad,
        {name: grad for name, grad in gradients.items() if grad is not None},
    )


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("biases", [False, True])
def test_a_rank_may_get_no_token(pool, dispatcher, biases):
    run = partial(
        all_to_the_first_experts,
        options={"add_bias_linear": biases, "moe_token_dispatcher_type": dispatcher},
    )
    (whole, of_tokens, of_experts), parts = run(0, 1), pool.run(run, 2)
    for rank, (output, gradient, gradients) in enumerate(parts):
        torch.testing.assert_close(output, whole)
        torch.testing.assert_close(gradient, of_tokens)
        for name, grad in gradients.items():  # the same tokens on both ranks
            torch.testing.assert_close(grad, 2 * of_experts[name].chunk(2)[rank])


MICROBATCHES = 3
TOKENS = 24


def global_loss(rank, world_size):
    """What a router reports of its loss in a step, and its gradient, of this replica's tokens."""
    config = config_of(
        moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.5, moe_router_topk=2
    )
    axes = ExpertAxes()
    if world_size > 1:
        axes = ParallelState.create(ParallelConfig()).expert_axes
    router = TopKRouter(config, layer_number=0, axes=axes)
    router.initialize(seed=4)
    router.start_step(1.0, per_token_loss=False)
    everything = torch.randn(MICROBATCHES, TOKENS, 16, generator=torch.Generator().manual_seed(9))
    for tokens in everything.chunk(world_size, 1)[rank]:
        router(tokens, 1).probs.sum().mul(0.0).backward()
    return (
        router.recorded["global_load_balancing_loss"],
        router.weight.grad,
        router.weight.detach(),
        everything,
    )


def test_the_loss_over_the_global_batch(pool):
    """E / (k T) * sum of p * counts / T, with the mean counts so far; two replicas with halves are
    one with all.
    """
    reported, gradient, weight, everything = global_loss(0, 1)
    weight.requires_grad_()
    scores = torch.softmax(everything @ weight.t(), -1)
    counts = F.one_hot(scores.topk(2, -1).indices, 4).sum((1, 2)).float().cumsum(0) / torch.arange(
        1, 4
    ).view(3, 1)
    expected = (scores.sum(1) * counts).sum() * 4 / (2 * TOKENS**2)
    torch.testing.assert_close(reported, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(0.5 * expected, weight)[0])
    replicas = pool.run(global_loss, 2)
    torch.testing.assert_close(sum(replica[0] for replica in replicas) / 2, reported)
    torch.testing.assert_close(sum(replica[1] for replica in replicas) / 2, gradient)


def test_an_expert_without_room_drops_the_lowest_weights():
    config = config_of(
        moe_expert_capacity_factor=1.0, moe_router_topk=1, moe_router_pre_softmax=True
    )
    router = TopKRouter(config, layer_number=0, axes=ExpertAxes())
    torch.nn.init.zeros_(router.weight)
    with torch.no_grad():
        router.weight[0] = 0.05
    kept = router(torch.linspace(1, 2, 8).unsqueeze(1).expand(8, 16), 1).kept
    assert kept.sum() == 2 and kept[-2:].all()  # everyone chose the first expert


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"swiglu": False, "add_bias_linear": True}], ids=str
)
def test_moe_act_keeps_what_goes_into_the_activation_alone(options):
    """The same bits, and of the values between an expert's matrices neither activation nor product."""
    found = []
    for more in ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}):
        torch.manual_seed(0)
        config = config_of(**options, **more)
        layer = MoELayer(config, Placement(Axis(), TensorParallelRng(0, 0)), layer_number=0)
        layer.initialize(1)
        for matrix in (layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight):
            matrix.main_grad = torch.zeros_like(matrix, dtype=torch.float32)
        hidden = torch.randn(32, 2, config.hidden_size).to(config.params_dtype).requires_grad_()
        with LiveTensors() as live:
            before = live.live
            output = layer(hidden)
            kept = live.live - before
            output.square().sum().backward()
        gradients = [
            p.main_grad if hasattr(p, "main_grad") else p.grad
            for p in layer.parameters()
            if p.requires_grad
        ]
        found.append((output, hidden.grad, *gradients, kept))
    (*plain, kept), (*again, kept_again) = found
    for mine, expected in zip(again, plain, strict=True):
        assert torch.equal(mine, expected)
    rows = 32 * 2 * config.moe_router_topk
    assert kept - kept_again == 2 * rows * config.moe_ffn_size * config.params_dtype.itemsize


@pytest.mark.parametrize(
    "text,expected",
    [("2", 2), ("[0]*2+[1]", [0, 0, 1]), ("([0]+[1]*3)", [0, 1, 1, 1]), ("[0,1]*2", [0, 1, 0, 1])],
)
def test_layer_patterns(text, expected):
    assert parse_layer_pattern(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "[1]*10**9", "[1]*1000000", "__import__('os')", "[1]+2", "(" * 500]
)
def test_what_is_no_pattern(text):
    with pytest.raises(ValueError, match="is not a valid layer pattern"):
        parse_layer_pattern(text)


def test_dense_and_expert_layers_together():
    config = config_of(num_layers=3, moe_layer_freq=[0, 1, 0])
    kinds = [type(layer.mlp).__name__ for layer in GPTModel(config).decoder.layers]
    assert kinds == ["MLP", "MoELayer", "MLP"] and config.moe_layer_pattern == [0, 1, 0]
    assert config_of(num_layers=3, moe_layer_freq=2).moe_layer_pattern == [1, 0, 1]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"moe_router_topk": 5}, "--moe-router-topk 5 must be between 1 and --num-experts 4"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1 needs --moe-router-pre-softmax"),
        ({"moe_layer_freq": [0, 1, 1]}, "must have a 0 or a 1 for each of the --num-layers 2"),
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            "shared experts do not have biases",
        ),
        ({"moe_router_enable_expert_bias": True}, "needs --moe-router-score-function sigmoid"),
        ({"moe_shared_expert_gate": True}, "needs --moe-shared-expert-intermediate-size"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 2}, "must divide --num-experts 4"),
        ({"moe_router_num_groups": 2}, "must be given together"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "must have one value for each",
        ),
        ({"moe_pad_expert_input_to_capacity": True}, "needs --moe-expert-capacity-factor"),
        ({"moe_expert_capacity_factor": 0.0}, "must be positive, got 0.0"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "sinkhorn does not support --moe-aux-loss-coeff",
        ),
    ],
)
def test_impossible_experts_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(**options)
