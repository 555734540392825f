"""See ../README.md."""
