"""What a launch remembers of the directory that it will own."""

from pathlib import Path

from megatron.conversion.convert import WRITERS
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.lineage import LINEAGE, Lineage, Segment
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.training.checkpoint.save_directory import identify_newest
from tests.support.memory_source import GPT_ARGS, random_source


def test_checkpoints_of_one_name_and_different_starts_are_different(tmp_path: Path) -> None:
    """Otherwise a launch that has loaded the first one would not notice the second one."""
    assert identify_newest(tmp_path / "absent") is None
    WRITERS["torch_dist"](random_source(GPT_ARGS), tmp_path, WriteOptions(), no_progress)
    (checkpoint,) = tmp_path.glob("iter_*")
    iteration = int(checkpoint.name.removeprefix("iter_"))
    found = []
    for generation, token in ((1, "a"), (1, "b"), (2, "b")):
        lineage = Lineage((Segment(generation, iteration, token),))
        (checkpoint / LINEAGE).write_bytes(lineage.encode(None))
        found.append(identify_newest(tmp_path))
    assert found[0] != found[1] == found[2]
    assert all(entry is not None and entry[0] == checkpoint.name for entry in found)
