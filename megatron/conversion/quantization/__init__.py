"""Quantized weights: encodings as a table, decoded and encoded a few rows at a time."""
