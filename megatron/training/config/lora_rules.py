"""Rules of adapters that concern several flags."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run_config import Config


def find_adapter_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the flags of a run with --lora-rank."""
    lora = config.lora
    checkpoint = config.checkpoint
    if not (checkpoint.load or checkpoint.pretrained_checkpoint):
        yield (
            f"--lora-rank {lora.lora_rank} without a base model: adapters on random weights are "
            "useless. Give --pretrained-checkpoint, or --load with --finetune"
        )
    if lora.lora_base_encoding is None:
        return
    encoding = f"--lora-base-encoding {lora.lora_base_encoding}"
    if config.model.low_precision is not None:
        precision = f"--fp8-format {config.model.fp8}"
        if config.model.fp8 is None:
            precision = f"--fp4-format {config.model.fp4}"
        yield (
            f"{encoding} with {precision}: products with encoded weights are computed in the "
            "precision of the decoded ones. Leave out one of them"
        )
    if config.model.tp_comm_overlap:
        yield (
            f"{encoding} with --tp-comm-overlap, which linear layers of Transformer Engine "
            "implement: encoded layers are local ones. Leave it out"
        )
    if config.logging.log_params_norm:
        yield f"{encoding} with --log-params-norm, which needs decoded weights. Leave it out"
