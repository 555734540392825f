"""Tests of a `device` run on the CPU too, where they hold the code against itself; marked `gpu`, on
a CUDA device.
"""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
