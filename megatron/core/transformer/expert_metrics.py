"""Names of the metrics of experts in logs and TensorBoard."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names in logs, as in Megatron-LM, by --moe-router-load-balancing-type."""
Z_LOSS = "z_loss"
LOAD = "load"
"""The largest load of an expert divided by the mean load."""


def get_metric_names(config: TransformerConfig) -> list[str]:
    """Return the names of the metrics that the routers of a model measure."""
    names = [LOSS_NAMES[loss_type] for loss_type in config.load_balancing]
    if config.moe_z_loss_coeff:
        names.append(Z_LOSS)
    return [*names, LOAD]
