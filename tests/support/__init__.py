"""Helpers that several test modules share; they are imported by their full name."""
