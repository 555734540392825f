"""Tests; their layout is that of the package. Helpers are imported by their full name,
`tests....`.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
