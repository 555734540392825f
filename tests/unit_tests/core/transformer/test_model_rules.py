"""Contradictory options of a model are rejected with the reason."""

import pytest

from tests.unit_tests.core.transformer.tiny_moe import make_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_router_topk": 5}, "--moe-router-topk 5 must be between 1 and --num-experts 4"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1 requires --moe-router-pre-softmax"),
        (
            {
                "moe_router_num_groups": 3,
                "moe_router_group_topk": 2,
                "moe_router_group_score_topk": 1,
            },
            "--moe-router-num-groups 3 must divide --num-experts 4, and be at least",
        ),
        ({"moe_layer_freq": [0, 1, 1]}, "must have a 0 or a 1 for each of the --num-layers 2"),
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            "shared experts do not have biases",
        ),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "sinkhorn"},
            "sinkhorn and --moe-router-enable-expert-bias are mutually exclusive",
        ),
        ({"moe_shared_expert_gate": True}, "requires --moe-shared-expert-intermediate-size"),
        ({"moe_average_shared_expert": True}, "requires --moe-shared-expert-intermediate-size"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 2}, "must divide --num-experts 4"),
        (
            {"moe_router_num_groups": 2},
            "--moe-router-num-groups 2 requires --moe-router-group-topk",
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "must have one value for each",
        ),
        ({"moe_pad_expert_input_to_capacity": True}, "requires --moe-expert-capacity-factor"),
        ({"moe_expert_capacity_factor": 0.0}, "must be positive, got 0.0"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            r"sinkhorn with --moe-aux-loss-coeff \[.*\]: sinkhorn balances without a loss",
        ),
    ],
)
def test_contradictory_expert_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relu": True, "squared_relu": True}, "--squared-relu and --relu are mutually exclusive"),
        (
            {"clip_qkv": 8.0, "qk_layernorm": True},
            "--clip-qkv 8.0 with --qk-layernorm requires --qk-layernorm-across-heads",
        ),
        ({"norm_weights": False, "apply_layernorm_1p": True}, "--no-norm-weights and --apply-"),
        (
            {"norm_weights": False, "transformer_impl": "transformer_engine"},
            r"--no-norm-weights requires --transformer-impl local \(now transformer_engine\)",
        ),
        (
            {"multi_latent_attention": True, "attention_output_gate": True, "clip_qkv": 8.0},
            "--multi-latent-attention and --attention-output-gate are mutually exclusive\n"
            "--multi-latent-attention and --clip-qkv 8.0 are mutually exclusive",
        ),
        (
            {"query_length_scaling": 0.1},
            r"--query-length-scaling 0.1 requires --rope-type yarn \(now rope\)",
        ),
    ],
)
def test_contradictory_dense_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        make_config(swiglu=False, **options)
