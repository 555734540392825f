"""Checkpoints of DeepSpeed's engine, which must be converted before they are read."""

import logging
from pathlib import Path

import pytest

from megatron.conversion.deepspeed.universal_writer import write_universal
from megatron.conversion.opening import open_checkpoint
from megatron.core.run_checkpoint.formats import NoCheckpointError, find_checkpoint
from megatron.core.safe_files import CheckpointError
from megatron.training.checkpoint.launch import TrainingDirectory
from megatron.training.config.options import CheckpointConfig
from tests.support.memory_source import GPT_ARGS, random_source

# The files that each ZeRO stage saves on two ranks (DeepSpeed 0.14 to 0.19).
MODEL = "mp_rank_00_model_states.pt"
STAGES = {
    "stage 1, fp32": (MODEL, *(f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1))),
    "stage 2, bf16": (
        MODEL,
        *(f"bf16_zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1)),
    ),
    "stage 3, fp32": (
        *(f"zero_pp_rank_{n}_{MODEL}" for n in (0, 1)),
        *(f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1)),
    ),
}


def save(root: Path, files: tuple[str, ...], step: int = 4) -> Path:
    """Create the files of an engine's checkpoint, without content."""
    directory = root / f"global_step{step}"
    directory.mkdir(parents=True)
    for name in files:
        (directory / name).touch()
    (root / "latest").write_text(directory.name)
    return directory


@pytest.mark.parametrize("stage", STAGES)
def test_converter_is_named(stage: str, tmp_path: Path) -> None:
    save(tmp_path, STAGES[stage], step=2)
    directory = save(tmp_path, STAGES[stage], step=10)
    for path in (tmp_path, directory):
        with pytest.raises(NoCheckpointError) as refusal:
            find_checkpoint(path)
        for part in (
            f"ds_to_universal --input_folder {directory} --output_folder {directory}_universal",
            f"zero_to_fp32 {tmp_path} MODEL --tag global_step10",
        ):
            assert part in str(refusal.value)


def test_converter_is_named_for_a_step_and_with_a_tracker(tmp_path: Path) -> None:
    """Megatron-DeepSpeed also writes Megatron-LM's tracker."""
    directory = save(tmp_path, STAGES["stage 1, fp32"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    for step in (None, 4):
        with pytest.raises(NoCheckpointError, match=f"ds_to_universal --input_folder {directory} "):
            find_checkpoint(tmp_path, step)


def test_files_without_zero_have_no_converter(tmp_path: Path) -> None:
    save(tmp_path, (MODEL,))
    with pytest.raises(NoCheckpointError, match="has no files of ZeRO.*save_16bit_model"):
        find_checkpoint(tmp_path)


def test_training_does_not_start_from_random_weights(tmp_path: Path) -> None:
    """With the same --load and --save, an empty directory is the first launch of a run."""
    save(tmp_path, STAGES["stage 2, bf16"])
    with pytest.raises(CheckpointError, match="ds_to_universal"):
        TrainingDirectory(
            CheckpointConfig(load=str(tmp_path), save=str(tmp_path)), tmp_path
        ).choose()


def test_newer_checkpoint_that_is_not_converted_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_universal(random_source(GPT_ARGS), tmp_path)
    converted = (tmp_path / "latest_universal").read_text()
    (tmp_path / "latest").write_text(converted.removesuffix("_universal"))
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tmp_path)
        assert not caplog.records
        save(tmp_path, STAGES["stage 1, fp32"], step=900)
        open_checkpoint(tmp_path)
    assert f"latest names global_step900, but latest_universal names {converted}" in caplog.text
