"""The native format of a run's checkpoint: its keys, arguments, training state and reader."""
