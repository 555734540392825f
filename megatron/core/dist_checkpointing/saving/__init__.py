"""Stage, write and commit: from live tensors to a durable checkpoint."""
