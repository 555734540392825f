"""Fine-tuning has the losses of TRL at every layout, and resumes with the same data and losses."""

import json
import shutil

import pytest

from tests.support.sft_runs import CASES, GOLDEN, PACKED, make_flags, write_tokenizer
from tests.support.training_harness import get_losses, train

LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "cp2_a2a": "--context-parallel-size 2 --cp-comm-type a2a",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fine_tuning")
    write_tokenizer(directory / "tokenizer")
    return directory


def make_run(work, case):
    data, packing = CASES[case]
    return make_flags(work / "tokenizer", work, data, packing)


def assert_losses_of_trl(losses, case):
    golden = json.loads((GOLDEN / "trl.json").read_text())[case]["losses"]
    assert losses == pytest.approx(golden, abs=1e-5, rel=0)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(pool, work, case):
    outcomes = pool.run(train, 1, make_run(work, case), "")
    assert_losses_of_trl(get_losses(outcomes), case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_trl_at_every_layout(pool, work, layout):
    flags = f"{make_run(work, 'packed_conversations')} {LAYOUTS[layout]}"
    outcomes = pool.run(train, 2, flags, "")
    assert_losses_of_trl(get_losses(outcomes), "packed_conversations")


def test_resumed_runs_read_the_same_samples(pool, work, tmp_path):
    """Bitwise at the same layout; another one continues with the same samples. The run has several
    epochs and evaluates.
    """
    data = make_flags(work / "tokenizer", work, "conversations.jsonl", PACKED)
    flags = (
        f"{data} --split 8,4,0 --train-iters 8 --eval-iters 1 --eval-interval 2 --save-interval 3 "
    )
    expected = pool.run(train, 1, flags, "")[0]
    first = pool.run(train, 1, f"{flags} --save {tmp_path / 'run'} --exit-interval 3", "")[0]
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    resume = flags.replace("--finetune", "").replace("--load", "--pretrained-checkpoint")
    second = pool.run(train, 1, f"{resume} --load {tmp_path / 'run'}", "")[0]
    assert first.measured.losses + second.measured.losses == expected.measured.losses
    assert second.consumed_train_samples == 16
    evaluated = {key: value for key, value in expected.measured.points.items() if key[1] > 3}
    for key, value in evaluated.items():
        if "validation" in key[0]:
            assert second.measured.points[key] == value
    other = pool.run(train, 2, f"{resume} --load {tmp_path / 'other'}", "")
    assert get_losses(other) == pytest.approx(expected.measured.losses[3:], abs=1e-5)


def test_exports_contain_the_chat_template_and_generation_defaults(pool, work, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    defaults = {"eos_token_id": [257, 258], "temperature": 0.6}
    (tokenizer / "generation_config.json").write_text(json.dumps(defaults))
    flags = make_flags(tokenizer, work, "conversations.jsonl")
    pool.run(train, 1, f"{flags} --train-iters 1 --save-hf {tmp_path / 'model'}", "")
    template = (tmp_path / "model/chat_template.jinja").read_text()
    assert template == (GOLDEN / "markers.jinja").read_text()
    assert json.loads((tmp_path / "model/generation_config.json").read_text()) == defaults
