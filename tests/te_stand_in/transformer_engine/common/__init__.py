"""See ../../README.md."""
