"""Hugging Face directories: families as tables, weights as safetensors, tokenizer and sidecar."""
