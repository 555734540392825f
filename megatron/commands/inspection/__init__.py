"""The commands of tools/checkpoint/inspect_checkpoint.py, one module each."""
