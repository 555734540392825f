"""Archives of NeMo (`.nemo`) around torch_dist weights, packed or unpacked, as a `Source`.

    model_config.yaml
    model_weights/          torch_dist: keys begin with `model.`
    <hash>_tokenizer.model

An archive is read without unpacking it. (Source: NeMo 2.0.0, `NLPSaveRestoreConnector.save_to`.)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.conversion.megatron_lm.archive_path import ArchivePath
from megatron.conversion.megatron_lm.nemo_config import NEMO_CONFIG, read_nemo_config
from megatron.conversion.megatron_lm.torch_dist import TorchDistSource
from megatron.conversion.options import ReadOptions, Rename
from megatron.core.dist_checkpointing import CheckpointError, read_metadata
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.run_checkpoint.keys import NEMO_WEIGHTS

_PREFIXES = ("model.module.", "model.", "module.")
_CONVERT = (
    "convert it to a model of transformers with NeMo (scripts/checkpoint_converters), and give that"
)


def open_nemo(path: Path, read_options: ReadOptions | None = None) -> TorchDistSource:
    """Open an archive, or the directory of an unpacked one.

    Raises ValueError for weights in another format, or another model than GPT of Megatron-core.
    """
    read_options = read_options or ReadOptions()
    root = ArchivePath(str(path)) if path.is_file() else path
    weights = root / NEMO_WEIGHTS
    if not (root / NEMO_CONFIG).is_file():
        raise CheckpointError(f"{path} has no {NEMO_CONFIG}: it is not an archive of NeMo")
    if not (weights / METADATA).is_file():
        names = ", ".join(sorted(entry.name for entry in root.iterdir()))
        raise CheckpointError(
            f"{path}: only weights in {NEMO_WEIGHTS}/ in the format torch_dist are read, not zarr "
            f"or model_weights.ckpt (it contains {names}): {_CONVERT}"
        )

    # Keys of Megatron-core have the prefix of the module in NeMo's model.
    keys = read_metadata(weights).tensors
    renames = list(read_options.renames)
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in keys):
            renames.append(Rename(f"{prefix}*", "*"))
            break
    source = TorchDistSource(weights, replace(read_options, renames=renames))
    source.description = f"NeMo archive {path}"
    _report_tokenizer(source, root)
    return source


def _report_tokenizer(source: TorchDistSource, root: Path) -> None:
    """Note that the tokenizer in an archive is not used."""
    tokenizer = read_nemo_config(root).get("tokenizer")
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if isinstance(model, str) and model.startswith("nemo:"):
        source.unused.append(
            f"the tokenizer {model.removeprefix('nemo:')} (extract it from the archive, and give "
            "--tokenizer for an export, or the tokenizer's flags for a run)"
        )
