"""Checkpoints that DeepSpeed's engine saves, which are not read before their conversion.

<root>/latest: name of the directory
<root>/<tag>/[zero_pp_rank_D_]mp_rank_XX_model_states.pt: weights and state of a rank
<root>/<tag>/[bf16_]zero_pp_rank_D_mp_rank_XX_optim_states.pt: its part of the optimizer, with ZeRO
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.run_checkpoint.formats import read_tag
from megatron.core.run_checkpoint.keys import ENGINE_LATEST, ENGINE_MODEL_FILES, ZERO

_OPTIMIZER_FILES = "*_optim_states.pt"


def find_engine_checkpoint(root: Path) -> Path | None:
    """Return `root`, the directory in it that `latest` names, or another one in it, that an engine
    has saved. None if there is none.
    """
    checkpoint_dirs: list[Path] = []
    for path in [*root.glob(ENGINE_MODEL_FILES), *root.glob(f"*/{ENGINE_MODEL_FILES}")]:
        is_universal = (path.parent / ZERO).is_dir()
        if not is_universal and path.parent not in checkpoint_dirs:
            checkpoint_dirs.append(path.parent)
    if not checkpoint_dirs:
        return None
    latest = read_tag(root / ENGINE_LATEST)
    return next((path for path in checkpoint_dirs if path.name == latest), min(checkpoint_dirs))


def describe_engine_checkpoint(root: Path) -> str | None:
    """Return the way to convert the engine's checkpoint in a directory, None if there is none."""
    directory = find_engine_checkpoint(root)
    if directory is None:
        return None
    subject = f"{directory} was saved by DeepSpeed's engine, whose files are not read"
    if not any(directory.glob(_OPTIMIZER_FILES)):
        return (
            f"{subject}. It has no files of ZeRO, which DeepSpeed's converters need: load it in "
            "DeepSpeed, and save a model of transformers (save_pretrained(), save_16bit_model())"
        )
    return (
        f"{subject}. Convert it first. With the names of Megatron-DeepSpeed, including the "
        "optimizer: python -m deepspeed.checkpoint.ds_to_universal --input_folder "
        f"{directory} --output_folder {directory}_universal. A model of transformers, without the "
        "optimizer: save_16bit_model() in DeepSpeed, or python -m deepspeed.utils.zero_to_fp32 "
        f"{directory.parent} MODEL --tag {directory.name}, and copy its config.json to MODEL"
    )
