"""Checkpoints of a run: contents, saving, retention, ownership and loading."""
