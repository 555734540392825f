"""Dataclass fields as flags: parsing, help, and messages for mistakes."""

import shlex
from dataclasses import dataclass, field

import pytest

from megatron.core.flags import flag
from megatron.training.config.arguments import FlagParser, build, parse_flags
from megatron.training.config.flag_help import field_docs, format_help


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
    domains: list[str] | None = flag(None, repeatable=True)
    """Domains."""
    workers: int = flag(2, positive=True)
    """Workers."""
    dropout: float = flag(0.1, at_least=0, at_most=1)
    """Dropout."""
    internal: int = field(default=7)


@dataclass
class Other:
    """Shares num_layers with Example."""

    num_layers: int = flag(2)
    """Hidden."""


def parsed(text: str) -> Example:
    given, _ = parse_flags(FlagParser({"Example": Example}), shlex.split(text))
    return build(Example, given)


def test_defaults_are_the_dataclass_ones_and_only_given_flags_are_reported():
    given, ignored = parse_flags(FlagParser({"Example": Example}), ["--rate", "0.5"])
    assert given == {"rate": 0.5}
    assert ignored == []
    assert build(Example, given) == Example(rate=0.5)


def test_values_of_every_type():
    text = "--num-layers 4 --disable-bias --no-shuffle --tied --kind b --window (128,0) --path x y"
    assert parsed(text) == Example(4, None, False, False, True, "b", (128, 0), ["x", "y"])
    assert parsed("--window=-1,0").window == (-1, 0)


def test_repeatable_lists_have_the_values_of_all_occurrences():
    example = parsed("--domains a b --paths x --domains=c --paths y")
    assert example.domains == ["a", "b", "c"]
    assert example.paths == ["y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--num-layers four", r"--num-layers: 'four' is not an integer"),
        ("--num-layers", r"--num-layers needs a value"),
        ("--rate nan", r"--rate must be a finite number, got nan"),
        ("--rate=-inf", r"--rate must be a finite number, got -inf"),
        ("--workers 0", r"--workers must be positive, got 0"),
        ("--dropout -0.1", r"--dropout must be at least 0, got -0.1"),
        ("--dropout 1.5", r"--dropout must be at most 1, got 1.5"),
        ("--paths a ''", r"--paths: its value is empty, as an unset variable would be"),
        ("--kind c", r"--kind: 'c' is not one of a, b"),
        ("--window 3", r"--window: '3' is not 2 numbers joined by commas"),
        (
            "--optimzer adam",
            r"unknown flag --optimzer: did you mean --optimizer\?$",
        ),
        ("--num-layer 4", r"unknown flag --num-layer: did you mean --num-layers"),
        ("--use-mpi", r"unknown flag --use-mpi: .* --ignore-unknown-flags drops those of a fork$"),
        ("stray", r"unexpected value 'stray'"),
        ("--internal 3", r"unknown flag --internal"),
        ("--tied=1", r"--tied takes no value, got '1'"),
        ("--paths --tied", r"--paths needs at least one value"),
        (
            "--mtp-num-layers 1",
            r"--mtp-num-layers 1: Megatron-LM's multi-token prediction is not implemented here",
        ),
        (
            "--mtp-num-layers 1 --mtp-loss-scaling-factor 4",
            r"--mtp-num-layers 1 \(and 1 more flags of it\): .*multi-token",
        ),
        ("--fp4-param-gather", r"primary weights in fp4 is not implemented here"),
        (
            "--loss-on-targets-only --reset-progress",
            r"--loss-on-targets-only, --reset-progress: not a flag of Megatron-LM but of a fork",
        ),
        (
            "--batch-size 4",
            r"--batch-size 4: Megatron-LM has renamed this flag to --micro-batch-size",
        ),
        ("--spec x y", r"--spec x y: this option of Megatron-LM is not implemented here"),
    ],
)
def test_errors_contain_reason_and_fix(text, message):
    with pytest.raises(ValueError, match=message):
        parsed(text)


def test_accepted_flags_are_dropped_with_their_values():
    parser = FlagParser({"Example": Example})
    arguments = [
        "--no-masked-softmax-fusion",
        "--attention-backend",
        "unfused",
        "--num-layers",
        "3",
        "--DDP-impl=local",
    ]
    given, ignored = parse_flags(parser, arguments)
    assert given == {"num_layers": 3}
    assert ignored == ["--no-masked-softmax-fusion", "--attention-backend", "--DDP-impl"]


@pytest.mark.parametrize("text", ["--dist-ckpt-format=zarr", "--DDP-impl x"])
def test_accepted_flags_must_not_request_missing_features(text):
    with pytest.raises(ValueError, match=r"not supported, only "):
        parsed(text)


def test_default_values_and_parts_of_disabled_features_have_no_effect():
    parser = FlagParser({"Example": Example})
    words = (
        "--context-parallel-size 1 --mtp-loss-scaling-factor 0.2 --fp8-margin 0 --softmax-type "
        "vanilla"
    )
    given, ignored = parse_flags(parser, words.split())
    assert given == {}
    assert len(ignored) == 4
    with pytest.raises(ValueError, match="multi-token prediction"):
        parse_flags(parser, [*words.split(), "--mtp-num-layers", "1"])


def test_accepted_flag_without_its_value():
    with pytest.raises(ValueError, match="--attention-backend needs a value"):
        parsed("--attention-backend --tied")


def test_all_problems_are_reported_one_per_line():
    with pytest.raises(ValueError) as error:
        parsed("--num-layers four --kind c --num-experts 8 --zzz stray")
    assert len(str(error.value).splitlines()) == 4
    # a word after an unknown flag is taken for its value
    assert "stray" not in str(error.value)


def test_quotes_and_spellings_of_launch_scripts():
    assert parsed("""--kind "'b'" --rate='"0.5"' --paths 'a=b' c""") == Example(
        rate=0.5, kind="b", paths=["a=b", "c"]
    )


def test_every_spelling_of_a_switch():
    assert parsed("--bias").bias
    assert parsed("--disable-bias --bias").bias
    assert not parsed("--no-bias").bias
    assert not parsed("--disable-bias").bias
    assert parsed("--shuffle").shuffle
    assert not parsed("--disable-shuffle").shuffle
    assert not parsed("--tied --no-tied").tied


def test_help_shows_every_flag_once_with_its_docstring_and_default():
    text = format_help({"Example": Example, "Other": Other})
    assert text.count("--num-layers") == 1
    assert "Layers, 100 % of them. (default: 2)" in text
    assert "First line." in text
    assert "Not shown." not in text
    assert "--internal" not in text
    assert "Paths. Also --path." in text
    assert "N,N" in text


def test_docstring_of_a_field_is_the_string_under_it():
    assert field_docs(Example)["kind"] == "Kind."
    assert "internal" not in field_docs(Example)
