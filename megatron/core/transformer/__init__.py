"""Transformer layers, their configuration, and the backends that compute them."""
