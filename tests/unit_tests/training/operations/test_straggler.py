"""Lines of --log-straggler."""

from megatron.training.operations.straggler import (
    Measurement,
    describe_slowest,
    find_slowest,
    format_report,
)


def make_measurements(works):
    return [
        Measurement(
            rank, f"node{rank}", iteration=0.5, work=work, forward=work / 2, batch=0.001,
            tflops=1 / work,
        )
        for rank, work in enumerate(works)
    ]  # fmt: skip


def test_slowest_rank_is_named_with_its_host():
    text = describe_slowest(make_measurements([0.2, 0.2, 0.3, 0.1]))
    assert text == (
        "rank 2 (node2) is the slowest: it works 300.0 ms per iteration, the median of the others "
        "is 200.0 ms; an iteration takes 500.0 ms"
    )


def test_slowest_rank_is_compared_with_the_median_of_the_others():
    slowest, median = find_slowest(make_measurements([0.1, 0.2, 0.3, 0.4]))
    assert (slowest.rank, median) == (3, 0.2)


def test_no_rank_is_named_if_all_are_equally_fast():
    assert describe_slowest(make_measurements([0.2, 0.21, 0.2])) is None
    assert describe_slowest(make_measurements([0.2])) is None


def test_report_has_the_form_of_megatron_lm():
    (row,) = format_report(make_measurements([0.2, 0.4]), 1)
    assert row == (
        "| MnRtt/Rnk: 100.00ms/0 | MxRtt/Rnk: 200.00ms/1 | MnDRtt/Rnk: 1.00ms/0 "
        "| MxDRtt/Rnk: 1.00ms/1 | MnEtpt/Rnk: 2.50TF/1 | MxEtpt/Rnk: 5.00TF/0"
    )


def test_report_lists_the_slowest_and_fastest_ranks():
    _, bottom, top = format_report(make_measurements([0.2, 0.4, 0.5]), 2)
    assert bottom == "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 2.00/2, 2.50/1"
    assert top == "^^^^ Top    2 Ranks with highest Etpt(TF): 2.50/1, 5.00/0"
