"""What goes wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file or key, the reason and the way out."""


class UnsafePickleError(CheckpointError):
    """A pickle names something that a checkpoint has no reason to contain. Nothing of it was executed."""
