"""Evaluation in the loop: losses of domains."""

import json

import pytest

from megatron.training.evaluation.domains import parse_domains
from megatron.training.reporting.run_report import collect_facts
from tests.support.training_harness import LLAMA, train

LAYOUTS = {"dp2": "", "pp2": "--pipeline-model-parallel-size 2"}
TRAINING = f"{LLAMA} --train-iters 4 --eval-iters 2 --eval-interval 2 "


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with text of three kinds."""
    directory = tmp_path_factory.mktemp("evaluation")
    for step, name in enumerate(("web", "code", "math"), start=1):
        with open(directory / f"{name}.jsonl", "w") as file:
            for number in range(200):
                words = [(number + i * step) % 60 for i in range(10)]
                file.write(json.dumps({"text": " ".join(map(str, words))}) + "\n")
    return directory


def make_flags(work):
    return f"{TRAINING} --train-data-path {work / 'web.jsonl'} --data-cache-path {work / 'cache'} "


def get_points(outcomes, prefix):
    (points,) = (outcome.measured.points for outcome in outcomes if outcome.measured.points)
    return {key: value for key, value in points.items() if key[0].startswith(prefix)}


@pytest.fixture(scope="module")
def domains(pool, work):
    """The losses of a run with two domains, by name and iteration."""
    save = work / "run"
    flags = f"{make_flags(work)} --save {save} --load {save} --valid-domain "
    flags += " ".join(f"{name}={work / name}.jsonl" for name in ("code", "math"))
    return get_points(pool.run(train, 1, flags), "lm loss validation ")


def test_the_loss_of_a_domain_is_that_of_a_validation_set(pool, work, domains):
    """Every evaluation of a domain begins at its first sample, as the first one of a set does."""
    names = {f"lm loss validation {name}" for name in ("code", "math")}
    assert set(domains) == {(name, iteration) for name in names for iteration in (2, 4)}
    for name in ("code", "math"):
        for interval in (2, 4):
            flags = make_flags(work) + f"--valid-data-path {work / name}.jsonl "
            flags = flags.replace("--eval-interval 2", f"--eval-interval {interval}")
            points = get_points(pool.run(train, 1, flags), "lm loss validation")
            expected = points["lm loss validation", interval]
            assert domains[f"lm loss validation {name}", interval] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_domains_are_the_same_at_every_layout(pool, work, domains, layout):
    flags = f"{make_flags(work)} {LAYOUTS[layout]} --valid-domain code={work / 'code.jsonl'} "
    points = get_points(pool.run(train, 2, flags), "lm loss validation ")
    for (name, iteration), loss in points.items():
        assert loss == pytest.approx(domains[name, iteration], abs=1e-5)
    assert len(points) == 2


def test_losses_of_domains_are_on_the_page_of_the_run(work, domains):
    (launch,) = collect_facts([work / "run"], False)["runs"][0]["launches"]
    expected = {}
    for (name, iteration), loss in domains.items():
        expected.setdefault(name, []).append((iteration, pytest.approx(loss)))
    assert launch["evaluations"] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [(["code"], "code: expected NAME=PATH"), (["a=x", "a=y"], "a=y: a is already x; give another")],
)
def test_malformed_domains_are_errors(values, message):
    with pytest.raises(ValueError, match=message):
        parse_domains(values)
