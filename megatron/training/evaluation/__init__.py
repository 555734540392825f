"""Evaluation in the loop, besides the loss of the validation split."""
