"""Errors of checkpoint files."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read.

    The message names the file or key, the reason and the fix.
    """


class DamagedError(CheckpointError):
    """A file differs from the one that was saved."""


class UnsafePickleError(CheckpointError):
    """A pickle names something that no checkpoint needs. No code of it was executed."""
