"""Flags of low-rank adapters (LoRA, DoRA)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.flags import CHANGED, FlagRule, FlagSection, flag

_WITH_RANK = {"lora_rank": CHANGED}


@dataclass
class LoraConfig(FlagSection):
    """Low-rank adapters on a frozen base model."""

    RULES = (
        FlagRule(
            _WITH_RANK,
            excludes={
                "compile": True,
                "fp8_param_gather": True,
                "use_mup": True,
                "mtp_num_layers": CHANGED,
                "ema_decay": CHANGED,
                "pipeline_model_parallel_layout": CHANGED,
                "save_hf_interval": CHANGED,
                "save_hf_dtype": CHANGED,
                "ckpt_convert_format": CHANGED,
            },
            reason="adapters do not support it. Train the whole model, or merge the adapters first",
        ),
        FlagRule(
            _WITH_RANK,
            requires={"ckpt_format": "torch_dist"},
            reason="Megatron-LM's legacy files contain whole models",
        ),
        FlagRule(
            {**_WITH_RANK, "moe_router_enable_expert_bias": True},
            requires={"moe_router_bias_update_rate": 0.0},
            reason="the bias of the router belongs to the base model, which is frozen",
        ),
    )

    lora_rank: int | None = flag(None, positive=True)
    """Train adapters W + alpha / rank * B A of this rank instead of the weights, which are loaded
    from --pretrained-checkpoint (or --load with --finetune) and frozen. Gradients, optimizer and
    checkpoints contain the adapters only.
    """
    lora_alpha: float | None = flag(None, positive=True, requires=_WITH_RANK)
    """Scale of the adapters, which is divided by the rank. Default: --lora-rank, a scale of 1."""
    lora_dropout: float = flag(0.0, at_least=0, below=1, requires=_WITH_RANK)
    """Dropout of the input of the adapters."""
    lora_targets: list[str] = flag(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), requires=_WITH_RANK
    )
    """Linear layers that get adapters, by name (linear_qkv, experts.linear_fc1), or projections in
    them (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj). Each projection has
    matrices of its own.
    """

    lora_dora: bool = flag(
        False,
        requires=_WITH_RANK,
        excludes={"lora_dropout": CHANGED},
        reason="the norm of a row includes B A, which applies to the same input as W",
    )
    """Also train the length of every row of the weights (DoRA): m (W + B A) / ||W + B A||."""

    lora_load: str | None = flag(None, requires=_WITH_RANK)
    """Directory of an adapter of PEFT from which the adapters of a new run start."""

    lora_base_encoding: str | None = flag(None, choices=("keep", "nf4", "fp8"), requires=_WITH_RANK)
    """Keep the frozen weights of linear layers in memory in this encoding (QLoRA), and decode them
    for each product. keep: in that of the quantized base model (e.g. AWQ, GPTQ, mxfp4, nvfp4), so
    that the weights are those of the release. nf4, fp8: encoded while they are loaded, with a scale
    for 64 elements, unless the base model has that encoding.
    """
