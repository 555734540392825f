"""Changes of models and of their number: edits, adapters merged into weights, merges."""
