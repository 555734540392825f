"""See ../../../README.md."""
