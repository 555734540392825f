"""Weights of a run in the memory of inference engines: planned once, replayed after every step."""
