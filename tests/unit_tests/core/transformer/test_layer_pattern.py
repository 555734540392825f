"""Layer patterns of --moe-layer-freq and --window-attn-skip-freq."""

import pytest

from megatron.core.transformer.layer_pattern import parse_layer_pattern


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2", 2), ("[0]*2+[1]", [0, 0, 1]), ("([0]+[1]*3)", [0, 1, 1, 1]), ("[0,1]*2", [0, 1, 0, 1])],
)
def test_valid_patterns(text, expected):
    assert parse_layer_pattern(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "[1]*10**9", "[1]*1000000", "__import__('os')", "[1]+2", "(" * 500, "2*[1]", ""]
)
def test_invalid_patterns_are_rejected(text):
    with pytest.raises(ValueError, match="is not a valid layer pattern"):
        parse_layer_pattern(text)
