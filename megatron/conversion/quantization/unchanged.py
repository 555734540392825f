"""Matrices of an export that keep the bytes of the quantized model that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.model_space.lazy_tensors import are_equal
from megatron.conversion.quantization.encodings import UNUSED, list_matrices
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.safe_files.schema import format_value

# Field of `quantization_config` that lists modules without quantization, by `quant_method`.
_UNQUANTIZED_FIELDS = {
    "fp8": "modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "compressed-tensors": "ignore",
}


def keep_unchanged(
    weights: Mapping[str, LazyTensor],
    stored: Mapping[str, LazyTensor],
    settings: Mapping[str, Any],
    directory: Path,
) -> tuple[dict[str, LazyTensor], dict[str, Any], list[str]]:
    """Replace matrices by the tensors that encode them in a quantized model, if they are equal.

    Args:
        weights: tensors of the export by name.
        stored: tensors of the quantized model in `directory`.
        settings: its checked `quantization_config`.
        directory: for messages.

    Returns:
        The tensors to write, their `quantization_config`, and the names of matrices that differ
        from the decoded ones: they are not quantized.
    """
    result = dict(weights)
    changed = []
    dtype = next(iter(weights.values())).dtype
    for elements in list_matrices(dict(stored), settings, dtype, directory):
        matrix = elements.matrix
        weight = weights.get(matrix.name)
        if weight is None:
            raise ValueError(
                f"--keep-quantization {directory}: the export has no {matrix.name}: the models "
                "differ, or store experts in another form"
            )
        if not are_equal(elements.decode(weight.dtype), weight):
            changed.append(matrix.name)
            continue
        del result[matrix.name]
        for name in matrix.names.values():
            result[name] = stored[name]

    # Scales of activations and of the key-value cache
    changed_modules = {name.removesuffix(".weight") for name in changed}
    for name, tensor in stored.items():
        if name.endswith(UNUSED) and name.rpartition(".")[0] not in changed_modules:
            result[name] = tensor
    return result, _exclude(settings, sorted(changed_modules), directory), changed


def _exclude(settings: Mapping[str, Any], modules: list[str], directory: Path) -> dict[str, Any]:
    """Return the settings with more modules that are not quantized."""
    if not modules:
        return dict(settings)
    method = settings["quant_method"]
    if method not in _UNQUANTIZED_FIELDS:
        raise ValueError(
            f"--keep-quantization {directory}: {len(modules)} matrices, e.g. {modules[0]}, have "
            f"changed, and quant_method = {format_value(method)} has no list of modules that are "
            "not quantized: give --quantize instead"
        )
    field = _UNQUANTIZED_FIELDS[method]
    return {**settings, field: [*(settings.get(field) or ()), *modules]}
