"""Checkpoints that other programs save while they train a model of transformers, only read.

Each reader finds the weights and the optimizer of one program, as tensors under the names of
transformers; `folder_source.py` makes a `Source` of them.
"""
