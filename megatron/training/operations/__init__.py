"""Observation of long runs: slow ranks, hangs, and silently wrong results."""
