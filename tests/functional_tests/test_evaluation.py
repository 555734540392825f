"""Evaluation in the loop: losses of domains, and scores of sequences and tasks."""

import json
import logging
import shlex

import pytest
import torch

from megatron.training.config.parsing import parse_args
from megatron.training.evaluation.domains import parse_domains
from megatron.training.evaluation.prompts import continue_greedily, read_prompts
from megatron.training.evaluation.scoring import ScoredSequence, score_sequences
from megatron.training.reporting.run_report import collect_facts
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.evaluation_runs import LM_EVAL, TASKS, make_task_run
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA, train

EOD = 60
TRAINING = f"{LLAMA} --train-iters 4 --global-batch-size 4 --eval-iters 2 --eval-interval 2 "


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a directory with text of three domains."""
    directory = tmp_path_factory.mktemp("evaluation")
    for step, name in enumerate(("web", "code", "math"), start=1):
        with open(directory / f"{name}.jsonl", "w") as file:
            for document in range(200):
                words = [str((document + i * step) % 60) for i in range(10)]
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return directory


def make_flags(work):
    return f"{TRAINING} --train-data-path {work / 'web.jsonl'} --data-cache-path {work / 'cache'} "


def get_points(outcomes, prefix):
    """Return the values of the only rank that reports, by (name, iteration)."""
    (points,) = (outcome.measured.points for outcome in outcomes if outcome.measured.points)
    selected = {}
    for (name, iteration), value in points.items():
        if name.startswith(prefix):
            selected[name, iteration] = value
    return selected


@pytest.fixture(scope="module")
def domains(pool, work):
    """Return the losses of a run with two domains, by name and iteration."""
    run = work / "run"
    flags = f"{make_flags(work)} --save {run} --load {run}"
    flags += f" --valid-domain code={work / 'code.jsonl'} math={work / 'math.jsonl'}"
    outcomes = pool.run(train, 1, flags)
    return get_points(outcomes, "lm loss validation ")


def test_the_loss_of_a_domain_is_that_of_a_validation_set(pool, work, domains):
    """Every evaluation of a domain begins at its first sample, as the first one of a set does."""
    assert set(domains) == {
        ("lm loss validation code", 2),
        ("lm loss validation code", 4),
        ("lm loss validation math", 2),
        ("lm loss validation math", 4),
    }

    for name in ("code", "math"):
        for interval in (2, 4):
            flags = make_flags(work) + f"--valid-data-path {work / name}.jsonl "
            flags = flags.replace("--eval-interval 2", f"--eval-interval {interval}")
            points = get_points(pool.run(train, 1, flags), "lm loss validation")
            expected = points["lm loss validation", interval]
            assert domains[f"lm loss validation {name}", interval] == expected


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_losses_of_domains_are_the_same_at_every_layout(pool, work, domains, layout):
    flags = f"{make_flags(work)} {LAYOUTS[layout][1]} --valid-domain code={work / 'code.jsonl'} "
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


def train_and_score(rank, world_size, flags, sequences=None):
    """Return the scores of sequences; without them, also the sequences and their scores by logits.

    The last one ends with the most probable tokens.
    """
    config = parse_args(shlex.split(COMMON + flags), world_size)
    run = pretrain(config, model_provider, datasets_provider, forward_step)
    if sequences is not None:
        first, *continuation = sequences[-1].tokens
        _, generated = continue_greedily(run, [[5, 6], [first]], 4, EOD)
        assert generated == continuation
        return score_sequences(run, sequences, EOD)

    # Continue a prompt with the most probable tokens.
    greedy = [1]
    for _ in range(4):
        logits = compute_logits(run, greedy)
        greedy.append(int(logits[-1].argmax()))
    prompt = greedy[:1]
    assert continue_greedily(run, [prompt], 4, EOD) == [greedy[1:]]

    # The end of the document ends a continuation, and is not part of it.
    end_of_document = greedy[-1]
    end = greedy.index(end_of_document, 1)
    assert continue_greedily(run, [prompt], 9, end_of_document) == [greedy[1:end]]

    sequences = [*make_sequences(), ScoredSequence(greedy, 4)]
    scores = score_sequences(run, sequences, EOD)
    assert run.chunks[0].training

    expected = []
    for tokens, num_scored in sequences:
        logits = compute_logits(run, tokens[:-1])[-num_scored:]
        labels = torch.tensor(tokens[-num_scored:])
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        is_greedy = torch.equal(logits.argmax(-1), labels)
        expected.append((-losses.item(), is_greedy))
    return scores, sequences, expected


def compute_logits(run, tokens):
    """Return the logits [s, vocab] of a sequence."""
    inputs = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        return run.chunks[0](inputs, positions)[0]


def make_sequences():
    sequences = []
    for length, num_scored in [(2, 1), (17, 16), (5, 2), (9, 8), (16, 1), (12, 3), (17, 1)]:
        tokens = [(7 * i + 3 * length) % 60 for i in range(length)]
        sequences.append(ScoredSequence(tokens, num_scored))
    return sequences


@pytest.fixture(scope="module")
def expected_scores(pool):
    flags = f"{LLAMA} --train-iters 8 --mock-data"
    ((scores, sequences, expected),) = pool.run(train_and_score, 1, flags)
    assert_close(scores, expected)
    *random, greedy = [is_greedy for _, is_greedy in expected]
    assert greedy
    assert not any(random)
    return sequences, expected


def assert_close(scores, expected):
    for score, (log_likelihood, is_greedy) in zip(scores, expected, strict=True):
        assert score.log_likelihood == pytest.approx(log_likelihood, abs=2e-5)
        assert score.is_greedy == is_greedy


@pytest.mark.parametrize("layout", ["dp2", "tp2_sp", "pp2_interleaved", "pp2_cp2"])
def test_scores_are_those_of_the_logits_at_every_layout(pool, expected_scores, layout):
    world_size, layout_flags = LAYOUTS[layout]
    flags = f"{LLAMA} --train-iters 8 --mock-data {layout_flags}"
    sequences, expected = expected_scores
    for scores in pool.run(train_and_score, world_size, flags, sequences):
        assert_close(scores, expected)


def train_and_sample(rank, world_size, flags):
    """Return the samples that rank 0 logs, as (iteration, prompt, text)."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    console = logging.getLogger("megatron.training.reporting.console")
    console.addHandler(handler)
    try:
        train(rank, world_size, flags)
    finally:
        console.removeHandler(handler)

    fields = [getattr(record, "fields", {}) for record in records]
    samples = [field for field in fields if field.get("event") == "sample"]
    return [(sample["iteration"], sample["prompt"], sample["text"]) for sample in samples]


def test_samples_of_prompts_are_logged_at_every_evaluation(pool, tmp_path):
    (tmp_path / "prompts.txt").write_text("3 4 5\n\n7\n")
    flags = f"{TRAINING} --mock-data --sample-prompts {tmp_path / 'prompts.txt'} --sample-tokens 5"
    (samples,) = pool.run(train_and_sample, 1, flags)
    prompts = [(iteration, prompt) for iteration, prompt, _ in samples]

    assert prompts == [(2, "3 4 5"), (2, "7"), (4, "3 4 5"), (4, "7")]
    for _, _, text in samples:
        assert len(text.split()) <= 5

    world_size, layout = LAYOUTS["tp2_sp"]
    parallel_samples = pool.run(train_and_sample, world_size, f"{flags} {layout}")[0]
    assert parallel_samples == samples


def test_unusable_prompts_are_errors(pool, tmp_path):
    path = tmp_path / "prompts.txt"
    with pytest.raises(ValueError, match=r"prompts\.txt: cannot be read"):
        read_prompts(str(path))

    path.write_text("\n")
    with pytest.raises(ValueError, match="the file has no prompt"):
        read_prompts(str(path))

    path.write_text("1 2 3 4 5 6 7 8 9 10 11 12")
    flags = f"{TRAINING} --mock-data --sample-prompts {path} --sample-tokens 5"
    with pytest.raises(ValueError, match="has 12 tokens; .*a prompt has 1 to 11"):
        pool.run(train, 1, flags)


# ---- Tasks of lm-eval ----


@pytest.fixture(scope="module")
def task_scores(pool, tmp_path_factory):
    """Return the scores of a run, and those of lm-eval's own model class on its export."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from lm_eval.tasks import TaskManager

    from megatron.training.evaluation.tasks import list_scores

    directory = tmp_path_factory.mktemp("tasks")
    flags = f"{make_task_run(directory)} --save-hf {directory / 'model'} --save {directory / 'run'}"
    points = get_points(pool.run(train, 1, flags, ""), "eval ")
    results = lm_eval.simple_evaluate(
        "hf",
        model_args=f"pretrained={directory / 'model'},dtype=float32",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(LM_EVAL), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    expected = {}
    for name, value in list_scores(results["results"]).items():
        expected[f"eval {name}"] = value
    return points, expected


def test_tasks_have_the_scores_of_lm_eval_on_the_export(task_scores):
    points, expected = task_scores
    assert {iteration for _, iteration in points} == {1, 2}
    assert {name for name, _ in points} == set(expected)
    assert len(expected) == 3
    for name, value in expected.items():
        assert points[name, 2] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_tasks_have_the_same_scores_at_every_layout(pool, task_scores, tmp_path, layout):
    flags = f"{make_task_run(tmp_path)} {LAYOUTS[layout][1]}"
    points = get_points(pool.run(train, 2, flags, ""), "eval ")
    for key, value in task_scores[0].items():
        assert points[key] == pytest.approx(value, rel=1e-5)


def test_unusable_tasks_are_errors(tmp_path):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from megatron.training.evaluation.tasks import load_tasks, parse_tasks

    with pytest.raises(ValueError, match=r"--eval-tasks .*absent\.yaml: no such file"):
        parse_tasks([f"hellaswag,{tmp_path / 'absent.yaml'}"])
    with pytest.raises(ValueError, match="--eval-tasks unknown: lm-eval has no such task"):
        load_tasks(["local_text", "unknown"], [str(LM_EVAL)] * 2)

    text = (LM_EVAL / "local_text.yaml").read_text()
    text = text.replace("local_text", "local_generation")
    path = tmp_path / "generation.yaml"
    path.write_text(text.replace("loglikelihood_rolling", "generate_until"))

    with pytest.raises(ValueError, match="--eval-tasks local_generation: it generates text"):
        load_tasks(*parse_tasks([str(path)]))
