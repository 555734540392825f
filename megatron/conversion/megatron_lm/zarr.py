"""Checkpoints in Megatron-core's zarr format, the default until core 0.6, which are not read."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.files import METADATA_JSON
from megatron.core.safe_files.reading import read_json


def describe_zarr_checkpoint(root: Path) -> str | None:
    """Return the way to convert a zarr checkpoint, `root` or one in it; None if there is none."""
    for path in [root / METADATA_JSON, *sorted(root.glob(f"*/{METADATA_JSON}"))]:
        if not path.is_file():
            continue
        fields = read_json(path)
        if isinstance(fields, dict) and fields.get("sharded_backend") == "zarr":
            return (
                f"{path.parent} is in Megatron-core's zarr format, which is not read. Load it with "
                "a Megatron-LM that reads zarr, e.g. core 0.11, and save it again with "
                "--ckpt-format torch_dist (in older ones: --dist-ckpt-format torch_dist)"
            )
    return None
