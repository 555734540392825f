"""Integers in words against the bits of a Python integer."""

import pytest
import torch

from megatron.conversion.quantization.packed_integers import unpack_integers, unpack_rows


@pytest.mark.parametrize("num_words", [1, 5, 8])
@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_consecutive_bits(bits, num_words):
    generator = torch.Generator().manual_seed(bits)
    shape = (3, num_words)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
    expected = []
    for row in words.tolist():
        number = sum((word % 2**32) << (32 * index) for index, word in enumerate(row))
        count = 32 * num_words // bits
        expected.append([(number >> (bits * index)) % 2**bits for index in range(count)])
    assert unpack_integers(words, bits).tolist() == expected
    assert unpack_rows(words.t(), bits).t().tolist() == expected
