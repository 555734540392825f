"""GPU tests. Tests with a `device` also run on the CPU; marked `gpu`, on a CUDA device."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
