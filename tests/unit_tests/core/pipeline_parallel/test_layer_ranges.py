"""Each layer is on one pipeline stage, in the order of the virtual stages."""

import pytest

from megatron.core.pipeline_parallel import pipeline_layer_ranges
from megatron.core.pipeline_parallel.layout_notation import count_mtp_layers, parse_layout


def to_lists(ranges: list[list[range]]) -> list[list[list[int]]]:
    return [[list(chunk) for chunk in stage] for stage in ranges]


def test_even_stages():
    assert to_lists(pipeline_layer_ranges(4, 2)) == [[[0, 1]], [[2, 3]]]
    assert to_lists(pipeline_layer_ranges(3, 1)) == [[[0, 1, 2]]]


def test_interleaved_chunks_alternate_between_stages():
    assert to_lists(pipeline_layer_ranges(8, 2, 2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("pp,vpp,per_chunk", [(2, 1, 3), (3, 2, 1), (4, 3, 2), (8, 4, 1)])
def test_equal_chunks_follow_the_virtual_stages(pp, vpp, per_chunk):
    ranges = pipeline_layer_ranges(pp * vpp * per_chunk, pp, vpp)
    for stage in range(pp):
        for chunk in range(vpp):
            start = (chunk * pp + stage) * per_chunk
            assert ranges[stage][chunk] == range(start, start + per_chunk)


@pytest.mark.parametrize(
    "arguments,sizes",
    [
        ((10, 4, 1, 1, None), [1, 3, 3, 3]),
        ((12, 4, 1, 1, 3), [1, 4, 4, 3]),
        ((10, 4, 1, None, 1), [3, 3, 3, 1]),
        ((7, 2, 1, 5, 2), [5, 2]),
        ((7, 2, 1, None, 2), [5, 2]),
        ((16, 4, 2, 2, 6), [2, 4, 4, 6]),
    ],
)
def test_uneven_stages(arguments, sizes):
    ranges = pipeline_layer_ranges(*arguments)
    vpp = arguments[2]
    assert [[len(chunk) for chunk in stage] for stage in ranges] == [
        [size // vpp] * vpp for size in sizes
    ]
    in_model_order = [layer for chunk in range(vpp) for stage in ranges for layer in stage[chunk]]
    assert in_model_order == list(range(arguments[0]))


@pytest.mark.parametrize(
    "arguments,message",
    [
        (
            (10, 4),
            "10 layers cannot be split over 4 pipeline stages.*--num-layers could be 8, 12, "
            ".*first.* 1, 4, 7",
        ),
        (
            (10, 2, 2),
            "10 layers .* 2 pipeline stages x 2 chunks.*--num-layers could be 8, 12, .*first.* 2, "
            "4, 6, 8",
        ),
        ((3, 4), "3 layers.*--num-layers could be 4, --decoder-first-pipeline-num-layers no value"),
        (
            (11, 4, 1, 4, 4),
            "with --decoder-first.* 4 and --decoder-last.* 4: .*first.* could be 1, 3, 5",
        ),
        ((10, 4, 1, 2, None), "with --decoder-first-pipeline-num-layers 2: .* could be 1, 4, 7"),
        (
            (10, 4, 1, None, 2),
            "with --decoder-last-pipeline-num-layers 2: .*last-pipeline-num-layers could be 1, 4, "
            "7",
        ),
        ((10, 2, 1, 4, 4), "could be 6"),
        ((4, 2, 1, 4, None), "could be 1, 2, 3"),
        ((4, 2, 1, 0, None), "could be 1, 2, 3"),
        ((4, 2, 1, None, 7), "could be 1, 2, 3"),
        ((16, 4, 2, 1, 3), "x 2 chunks with .*first.* 1 and .*last.* 3"),
        ((4, 1, 2), "2 chunks per stage need more than one pipeline stage"),
        (
            (4, 1, 1, 2, None),
            "--decoder-first-pipeline-num-layers 2 needs more than one pipeline stage",
        ),
        (
            (4, 1, 1, None, 2),
            "--decoder-last-pipeline-num-layers 2 needs more than one pipeline stage",
        ),
        ((0, 2), r"number of layers \(0\)"),
        ((4, 0), r"pipeline stages \(0\)"),
        ((4, 2, 0), r"chunks per stage \(0\)"),
    ],
)
def test_impossible_sizes_are_rejected_with_advice(arguments, message):
    with pytest.raises(ValueError, match=message):
        pipeline_layer_ranges(*arguments)


def test_advised_values_work():
    for first in (1, 4, 7):
        assert len(pipeline_layer_ranges(10, 4, 1, first)[0][0]) == first


def test_embedding_and_loss_count_as_layers():
    ranges = pipeline_layer_ranges(6, 4, account_for_embedding=True, account_for_loss=True)
    assert [[len(chunk) for chunk in stage] for stage in ranges] == [[1], [2], [2], [1]]
    ranges = pipeline_layer_ranges(7, 2, 2, account_for_embedding=True)
    assert ranges == [[range(0, 1), range(3, 5)], [range(1, 3), range(5, 7)]]
    with pytest.raises(ValueError, match="7 layers cannot be split over 2"):
        pipeline_layer_ranges(6, 2, account_for_loss=True)


def test_layout_in_megatron_lms_notation():
    assert parse_layout("Et*3|(tt|)*6L") == [3, 2, 2, 2, 2, 2, 2, 0]
    assert parse_layout("Et,t|tL") == [2, 1]
    assert parse_layout("E|t*4|L") == [0, 4, 0]
    assert parse_layout("Et|t|m*2L") == [1, 1, 0]
    assert count_mtp_layers("Et|t|m*2L") == 2
    # Chunks alternate between the stages: stage 0 has chunks 0 and 2.
    ranges = pipeline_layer_ranges(6, 2, 2, layout="Et|ttt|t|tL")
    assert ranges == [[range(0, 1), range(4, 5)], [range(1, 4), range(5, 6)]]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Etm|tL", r"multi-token prediction \(m\) .* directly before L"),
        ("Et|tmLm", "expected E"),
        ("tt|tL", "expected E"),
        ("Et||tL", "chunk 1 is empty"),
        ("Et|x|L", "expected E"),
        ("Et*99999|L", "repeat count 99999 is too large"),
        ("Et|tL", "has 2 layers on 2 chunks: the model has 4 layers"),
    ],
)
def test_invalid_layouts(layout, message):
    with pytest.raises(ValueError, match=message):
        pipeline_layer_ranges(4, 2, layout=layout)
