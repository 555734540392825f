"""benchmarks/gpu.py on a fake device: measurements in its own process."""

import re
from argparse import Namespace

import torch

from benchmarks.gpu import check_windowed_attention


def test_peak_of_windowed_attention_is_its_own():
    """It does not include memory that was in use before."""
    torch.empty(200 << 20, dtype=torch.uint8, device="cuda")  # is freed at once
    (line,) = check_windowed_attention(Namespace(is_small=True, device="cuda"))
    assert re.match(r"windowed attention: \d MB at most", line), line
