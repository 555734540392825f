"""Ownership of a directory of checkpoints: fencing, takeover by a launch, and lineage."""
