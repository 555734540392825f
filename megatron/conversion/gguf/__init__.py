"""GGUF files of llama.cpp as models of transformers."""
