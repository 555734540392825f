"""Checkpoints of other formats: detection, reading, writing."""
