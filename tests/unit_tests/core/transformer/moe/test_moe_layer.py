"""Layers with experts: losses and gradients equal those of Megatron-LM and of transformers."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from megatron.conversion.model_space.layouts import make_local_name
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import find_routers, finish_step
from megatron.core.transformer.placement import Placement
from tests import ROOT
from tests.support.compare import assert_same
from tests.support.live_tensors import LiveTensors
from tests.unit_tests.core.transformer.tiny_moe import make_config

GOLDEN = ROOT / "tests/golden/megatron_moe"
QWEN = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 4,
    "moe_router_pre_softmax": True,
    "moe_z_loss_coeff": 1e-3,
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "bf16": True,
    "add_qkv_bias": True,
}
DEEPSEEK = {
    "num_layers": 4,
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": [0, 1, 1, 1],
    "num_query_groups": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_shared_expert_intermediate_size": 32,
    "rope_type": "rope",
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
}
CASES = {
    "deepseek_fp32": DEEPSEEK,
    "mixtral_fp32": {},
    "drop_fp32": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "qwen2moe_bf16": QWEN,
}


class Reference:
    """Results of Megatron-LM for one micro-batch, with tensors by our names."""

    def __init__(self, case):
        self.arrays = np.load(GOLDEN / case / "initial_forward.npz")
        self.weights = self.arrays
        if case == "drop_fp32":
            # The model that drops tokens has the weights of the other one.
            self.weights = np.load(GOLDEN / "mixtral_fp32/initial_forward.npz")

    def tensor(self, kind, name):
        name = make_local_name(name)
        arrays = self.weights if kind == "weight" else self.arrays
        if "mlp.experts." not in name:
            return torch.from_numpy(arrays[f"{kind}:{name}"])
        layer, projection = name.split("experts.")
        prefix = f"{kind}:{layer}experts."
        experts = []
        for key in arrays.files:
            if key.startswith(prefix) and key.endswith(projection):
                experts.append(torch.from_numpy(arrays[key]))
        return torch.stack(experts)


@pytest.mark.parametrize("case", CASES)
def test_micro_batch_equals_megatron_lm(case):
    """Logits, selection and weights of each token, auxiliary losses, and all gradients."""
    config = make_config(**CASES[case])
    reference = Reference(case)
    tolerance = 2e-2 if config.bf16 else 2e-6
    model = GPTModel(config, make_vocab_size_divisible_by=32)
    for name, param in model.named_parameters():
        array_type = "buffer" if name.endswith("expert_bias") else "weight"
        param.data.copy_(reference.tensor(array_type, name))
    tokens = torch.from_numpy(reference.arrays["tokens"]).long()
    labels = torch.from_numpy(reference.arrays["labels"]).long()
    positions = torch.arange(64).expand(2, -1)

    with torch.no_grad():
        logits = model.eval()(tokens, positions)
    expected = torch.from_numpy(reference.arrays["logits"])
    assert (logits.float() - expected).norm() < tolerance * expected.norm()

    routings = []
    routers = find_routers([model.train()])
    for router in routers:
        router.start_step(1.0, per_token_loss=False)
        router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    losses = model(tokens, positions, labels=labels)
    losses.mean().backward()
    finish_step(routers)
    for router, routing in zip(routers, routings, strict=True):
        check_router(router, routing, reference, config, tolerance)

    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        expected = reference.tensor("grad", name)
        error = (param.grad.float() - expected).norm() / expected.norm()
        assert error < (0.05 if config.bf16 else 5e-6), name


def check_router(router, routing, reference, config, tolerance):
    layer = router.layer_number
    kept = 1.0 if routing.kept is None else routing.kept
    weights = routing.probs.float() * kept
    probs = torch.zeros(128, config.experts).scatter(1, routing.experts, weights)
    expected = torch.from_numpy(reference.arrays[f"probs:decoder.layers.{layer}.mlp.router"])

    if config.bf16:
        # Two rounded scores may be equal, and either expert may be selected.
        assert ((probs != 0) == (expected != 0)).float().mean() > 0.99
    else:
        assert torch.equal(probs != 0, expected != 0)
        torch.testing.assert_close(probs, expected, rtol=0, atol=tolerance)

    for name in router.recorded.keys() - {"tokens_per_expert"}:
        expected_loss = reference.arrays[f"aux:{name}"][layer]
        assert router.recorded[name].item() == pytest.approx(expected_loss, rel=tolerance), name
    assert router.recorded["tokens_per_expert"].sum() == (probs != 0).sum()


def copy_to_mixtral(ours, theirs):
    """Copy the weights of our model with 2 layers to a Mixtral model of transformers."""
    params = dict(ours.named_parameters())
    state = theirs.state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        own = f"decoder.layers.{layer}."
        qkv = params[own + "self_attention.linear_qkv.weight"].view(2, 32, 32)
        q, k, v = qkv.split([16, 8, 8], dim=1)
        proj = params[own + "self_attention.linear_proj.weight"]
        state[prefix + "self_attn.q_proj.weight"].copy_(q.reshape(32, 32))
        state[prefix + "self_attn.k_proj.weight"].copy_(k.reshape(16, 32))
        state[prefix + "self_attn.v_proj.weight"].copy_(v.reshape(16, 32))
        state[prefix + "self_attn.o_proj.weight"].copy_(proj)
        experts = own + "mlp.experts."
        state[prefix + "mlp.gate.weight"].copy_(params[own + "mlp.router.weight"])
        state[prefix + "mlp.experts.gate_up_proj"].copy_(params[experts + "linear_fc1.weight"])
        state[prefix + "mlp.experts.down_proj"].copy_(params[experts + "linear_fc2.weight"])

    state["model.embed_tokens.weight"].copy_(params["embedding.word_embeddings.weight"])
    state["lm_head.weight"].copy_(params["output_layer.weight"])


def test_loss_and_gradients_equal_mixtral_of_transformers():
    theirs = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            sliding_window=None,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            router_aux_loss_coef=0.0,
        )
    )
    config = make_config(
        hidden_size=32,
        moe_ffn_hidden_size=24,
        vocab_size=96,
        moe_aux_loss_coeff=0.0,
        init_method_std=0.1,
    )
    ours = GPTModel(config, make_vocab_size_divisible_by=1)
    ours.initialize(3)
    copy_to_mixtral(ours, theirs)
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens, labels=tokens)
    losses = ours(tokens, torch.arange(32).expand(2, -1), labels=tokens.roll(-1, 1))[:, :-1]
    assert losses.mean().item() == pytest.approx(expected.loss.item(), abs=1e-6)

    expected.loss.backward()
    losses.mean().backward()
    params = dict(ours.named_parameters())
    for layer in range(2):
        for name, key in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            expected_grad = theirs.get_parameter(f"model.layers.{layer}.mlp.experts.{name}").grad
            grad = params[f"decoder.layers.{layer}.mlp.experts.{key}.weight"].grad
            torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-7)


def train_expert_biases(rank, world_size, ddp, sizes, **optimizer_options):
    """Return the biases of experts after two steps with gradients that depend on name and step."""
    parallel = ParallelConfig(**sizes)
    ps = ParallelState.create(parallel) if world_size > 1 else ParallelState.for_rank(parallel)
    model = GPTModel(make_config(add_bias_linear=True), experts=ps.expert_axes)
    model.initialize(seed=5)
    params = dict(model.named_parameters())
    biases = {}
    for name, param in params.items():
        if ".experts." in name and name.endswith(".bias"):
            param.data.fill_(1.0)
            biases[name] = param

    chunk = DistributedDataParallel(model, DistributedDataParallelConfig(**ddp), ps.dp_cp, ps.edp)
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, **optimizer_options)
    optimizer = MegatronOptimizer([chunk], config, ps)
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
def test_biases_of_experts_are_not_matrices(pool, world_size, sizes, shapes, sharded):
    """They are `[experts, n]`, have no weight decay, and Muon leaves them to Adam."""
    train = partial(train_expert_biases, ddp={"use_distributed_optimizer": sharded}, sizes=sizes)
    plain = pool.run(partial(train, weight_decay=0.0), world_size)
    for rule in ("adam", "muon"):
        decayed = pool.run(partial(train, weight_decay=0.5, optimizer=rule), world_size)
        for expected, got in zip(plain, decayed, strict=True):
            assert {tuple(bias.shape) for bias in expected.values()} == shapes
            assert all((bias != 1.0).all() for bias in expected.values())
            assert_same(got, expected)


def run_and_measure(config):
    """Return output and gradients of an MoE layer, and the bytes that it keeps for backward."""
    torch.manual_seed(0)
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

    results = [output, hidden.grad]
    for param in layer.parameters():
        if param.requires_grad:
            results.append(param.main_grad if hasattr(param, "main_grad") else param.grad)
    return results, kept


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"swiglu": False, "add_bias_linear": True}],
    ids=str,
)
def test_moe_act_recomputes_the_activation(options):
    """Results are bitwise equal; neither the activation nor its weighted product is kept."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    config = make_config(**options)
    expected, kept = run_and_measure(config)
    got, kept_with_recomputation = run_and_measure(make_config(**options, **recompute))

    for result, expected_result in zip(got, expected, strict=True):
        assert torch.equal(result, expected_result)

    rows = 32 * 2 * config.moe_router_topk
    saved = 2 * rows * config.moe_ffn_size * config.params_dtype.itemsize
    assert kept - kept_with_recomputation == saved


def test_dense_and_expert_layers_are_mixed_by_pattern():
    config = make_config(num_layers=3, moe_layer_freq=[0, 1, 0])
    kinds = [type(layer.mlp).__name__ for layer in GPTModel(config).decoder.layers]
    assert kinds == ["MLP", "MoELayer", "MLP"]
    assert config.moe_layer_pattern == [0, 1, 0]
    assert make_config(num_layers=3, moe_layer_freq=2).moe_layer_pattern == [1, 0, 1]
