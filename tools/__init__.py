"""Command-line tools: preprocessing, planning, reports, checkpoints."""
