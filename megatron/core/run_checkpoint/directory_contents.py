"""Description of the checkpoints in a directory, for the error that none of them can be loaded."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import CheckpointDirectory, iteration_in_name
from megatron.core.run_checkpoint.formats import describe_unread, find_problem, list_newest_first


def describe_contents(root: Path) -> str:
    """Return a list of the complete or damaged checkpoints in `root`, for messages."""
    if not root.is_dir():
        return f"{root} is not a directory"
    complete = []
    descriptions = []
    for directory in list_newest_first(root):
        problem = find_problem(directory)
        if problem is None:
            complete.append(directory.name)
        else:
            descriptions.append(f"\n  {directory.name}: {problem}")
    if complete:
        return f"complete are: {', '.join(complete)}"
    text = f"{root} holds no complete checkpoint{''.join(descriptions[:5])}"
    abandoned = _find_abandoned(root)
    if abandoned is not None:
        text += (
            f"\n  {abandoned.name} is complete, but of a branch that this run has left: to return "
            f"to it, add --ckpt-step {iteration_in_name(abandoned)}"
        )
    unread = describe_unread(root)
    if unread is not None:
        text += f"\n  {unread}"
    return text


def _find_abandoned(root: Path) -> Path | None:
    """Return the last complete checkpoint in `root`, of any branch; None if there is none."""
    checkpoints = CheckpointDirectory(root)
    for iteration in reversed(checkpoints.list_iterations()):
        path = checkpoints.path(iteration)
        if find_problem(path) is None:
            return path
    return None
