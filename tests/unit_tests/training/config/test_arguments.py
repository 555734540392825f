"""Dataclass fields become flags and come back as values; mistakes are explained."""

import shlex
from dataclasses import dataclass, field

import pytest

from megatron.core.utils import flag
from megatron.training.config.arguments import build, field_docs, make_parser, parse_flags


@dataclass
class Example:
    """First line.

    Not shown.
    """

    num_layers: int = flag(2)
    """Layers, 100 % of them."""
    rate: float | None = flag(None)
    """A rate."""
    bias: bool = flag(True, "--disable-bias")
    """Leave out biases."""
    shuffle: bool = flag(True)
    """Do not shuffle."""
    tied: bool = flag(False)
    """Tie."""
    kind: str = flag("a", choices=("a", "b"))
    """Kind."""
    window: tuple[int, int] | None = flag(None)
    """Window."""
    paths: list[str] | None = flag(None, "--paths", "--path")
    """Paths."""
    internal: int = field(default=7)


@dataclass
class Other:
    """Shares num_layers with Example."""

    num_layers: int = flag(2)
    """Hidden."""


def parsed(text: str) -> Example:
    given, _ = parse_flags(make_parser({"Example": Example}), shlex.split(text))
    return build(Example, given)


def test_defaults_are_the_dataclass_ones_and_only_given_flags_are_reported():
    given, ignored = parse_flags(make_parser({"Example": Example}), ["--rate", "0.5"])
    assert given == {"rate": 0.5} and ignored == []
    assert build(Example, given) == Example(rate=0.5)


def test_every_kind_of_value():
    text = "--num-layers 4 --disable-bias --no-shuffle --tied --kind b --window (128,0) --path x y"
    assert parsed(text) == Example(4, None, False, False, True, "b", (128, 0), ["x", "y"])
    assert parsed("--window=-1,0").window == (-1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--num-layers four", r"--num-layers: invalid int value: 'four'"),
        ("--num-layers", r"--num-layers: expected one argument"),
        ("--kind c", r"--kind: invalid choice: 'c'"),
        ("--window 3", r"--window: invalid 2 numbers joined by commas value: '3'"),
        ("--num-layer 4", r"unknown flag --num-layer: did you mean --num-layers"),
        ("--num_layers 4", r"unknown flag --num_layers: did you mean --num-layers"),
        ("--zzz", r"unknown flag --zzz: --help lists all flags"),
        ("stray", r"unexpected value 'stray'"),
        ("--internal 3", r"unknown flag --internal"),
    ],
)
def test_mistakes_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        parsed(text)


def test_accepted_flags_are_dropped_with_their_values():
    parser = make_parser({"Example": Example})
    words = ["--no-rope-fusion", "--attention-backend", "unfused", "--num-layers", "3", "--transformer-impl=local"]
    given, ignored = parse_flags(parser, words)
    assert given == {"num_layers": 3}
    assert ignored == ["--no-rope-fusion", "--attention-backend", "--transformer-impl"]


@pytest.mark.parametrize(
    "text", ["--context-parallel-size 2", "--context-parallel-size=2", "--expert-model-parallel-size 4"]
)
def test_accepted_flags_must_not_ask_for_something_that_is_missing(text):
    with pytest.raises(ValueError, match=r"not supported, only (1|torch_dist) "):
        parsed(text)


def test_accepted_flag_without_its_value():
    with pytest.raises(ValueError, match="--attention-backend expects a value"):
        parsed("--attention-backend --tied")


def test_help_shows_every_flag_once_with_its_docstring_and_default():
    text = make_parser({"Example": Example, "Other": Other}).format_help()
    assert text.count("--num-layers") == 1
    assert "Layers, 100 % of them. (default: 2)" in text
    assert "First line." in text and "Not shown." not in text
    assert "--internal" not in text
    assert "Paths. Also --path." in text
    assert "N,N" in text


def test_docstring_of_a_field_is_the_string_under_it():
    assert field_docs(Example)["kind"] == "Kind."
    assert "internal" not in field_docs(Example)
