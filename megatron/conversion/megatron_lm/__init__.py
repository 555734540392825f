"""Megatron-LM's formats: torch_dist in all its forms, and the legacy directories."""
