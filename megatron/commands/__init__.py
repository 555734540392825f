"""Implementations of the programs in tools/, which import them after parsing their arguments."""
