"""DeepSpeed's universal checkpoints."""
