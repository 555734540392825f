"""Helpers shared by several test modules; import them by their full name."""
