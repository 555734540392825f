"""Values of codes against a list of them."""

import pytest
import torch

from megatron.core.encoded_elements import ElementFormat, Elements, decode_elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_values", [4, 8, 16, 32])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(slice(0, 10), id="pairs"),
        pytest.param(slice(1, 11), id="odd-offset"),
        pytest.param(slice(2, 11), id="odd-count"),
        pytest.param(slice(0, 8, 2), id="strided"),
    ],
)
def test_values_of_codes(dtype, num_values, rows):
    generator = torch.Generator().manual_seed(num_values)
    values = tuple(torch.randn(num_values, generator=generator).tolist())
    codes = torch.randint(0, num_values, (12, 1), dtype=torch.uint8, generator=generator)[rows]
    elements = Elements(codes, torch.ones(1, 1, dtype=dtype))
    decoded = decode_elements(elements, ElementFormat(values, dtype, dtype))
    expected = torch.tensor([[values[code]] for code in codes.flatten()], dtype=dtype)
    assert torch.equal(decoded, expected)
