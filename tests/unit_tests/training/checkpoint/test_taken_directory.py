"""A launch notices checkpoints that the former owner of its directory has committed."""

from pathlib import Path

from megatron.conversion.checkpoint_conversion import WRITERS
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.ownership.lineage import LINEAGE, Lineage, Segment
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.training.checkpoint.launch import TrainingDirectory
from megatron.training.config.run_options import CheckpointConfig
from tests.support.memory_source import GPT_ARGS, random_source


def test_checkpoints_of_one_name_and_different_starts_are_different(tmp_path: Path) -> None:
    """Otherwise a launch that has loaded the first one would not notice the second one."""
    config = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    directory = TrainingDirectory(config, tmp_path)
    assert directory.choose() is None
    assert not directory.take()
    WRITERS["torch_dist"](random_source(GPT_ARGS), tmp_path, WriteOptions(), no_progress)
    assert directory.take()  # a first checkpoint

    (checkpoint,) = tmp_path.glob("iter_*")
    iteration = int(checkpoint.name.removeprefix("iter_"))
    changes = []
    for generation, token in ((1, "a"), (1, "b"), (2, "b")):
        lineage = Lineage((Segment(generation, iteration, token),))
        (checkpoint / LINEAGE).write_bytes(lineage.encode(None))
        changes.append(directory.take())
        assert directory.choose() is not None
    assert changes == [True, True, False]
