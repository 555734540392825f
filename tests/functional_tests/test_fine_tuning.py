"""Fine-tuning and DPO have the losses of TRL at every layout, and resume with the same data and losses."""

import json
import os
import shutil
import subprocess

import pytest

from tests import ROOT
from tests.support.sft_runs import CASES, GOLDEN, MODEL, PACKED, make_flags, write_tokenizer
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


def get_validation(measured):
    """Return the validation losses by (name, iteration)."""
    losses = {}
    for (name, iteration), value in measured.points.items():
        if "validation" in name:
            losses[name, iteration] = value
    return losses


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(pool, work, case):
    outcomes = pool.run(train, 1, make_run(work, case), "")
    assert_losses_of_trl(get_losses(outcomes), case)


@pytest.mark.parametrize("case", ["packed_conversations", "preferences"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_trl_at_every_layout(pool, work, layout, case):
    flags = f"{make_run(work, case)} {LAYOUTS[layout]}"
    outcomes = pool.run(train, 2, flags, "")
    assert_losses_of_trl(get_losses(outcomes), case)


def test_preferences_are_means_over_pairs(pool, work):
    """They are means without --calculate-per-token-loss, and with other micro-batches."""
    flags = make_run(work, "preferences").replace("--calculate-per-token-loss", "")
    flags = flags.replace("--micro-batch-size 1", "--micro-batch-size 2")
    outcomes = pool.run(train, 2, f"{flags} {LAYOUTS['cp2']}", "")
    assert_losses_of_trl(get_losses(outcomes), "preferences")


def test_preferences_continue_with_the_reference_of_the_run(pool, work, tmp_path):
    """The run continues bitwise at the same layout. The log has the rewards."""
    flags = f"{make_run(work, 'preferences')} --split 6,2,0 --eval-iters 1 --eval-interval 2 "
    expected = pool.run(train, 1, flags, "")[0].measured
    flags += f"--save {tmp_path / 'run'} --save-interval 3 "
    first = pool.run(train, 1, f"{flags} --exit-interval 3", "")[0].measured
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    second = pool.run(train, 1, flags, "")[0].measured

    assert first.losses + second.losses == expected.losses
    assert first.metrics + second.metrics == expected.metrics
    assert get_validation(first) | get_validation(second) == get_validation(expected)

    accuracies = [accuracy for accuracy, _ in expected.metrics]
    margins = [margin for _, margin in expected.metrics]
    assert accuracies[0] == margins[0] == 0.0
    assert margins[-1] > 0
    assert set(accuracies) <= {0, 0.5, 1}

    other = pool.run(train, 2, flags.replace("/run", "/other"), "")
    assert get_losses(other) == pytest.approx(expected.losses[3:], abs=1e-5)

    # Other data has no reference in this checkpoint, unless its weights become one.
    changed = flags.replace("--split 6,2,0", "--split 5,3,0")
    changed = changed.replace("--train-iters 6", "--train-iters 8")
    with pytest.raises(ValueError, match="no log-probabilities of the reference for the train"):
        pool.run(train, 1, changed, "")


def test_the_command_of_a_run_continues_it_with_the_same_samples(pool, work, tmp_path):
    """The same layout continues bitwise, another one with the same samples. The run has several
    epochs and evaluates.
    """
    data = make_flags(work / "tokenizer", work, "conversations.jsonl", PACKED)
    flags = (
        f"{data} --split 8,4,0 --train-iters 8 --eval-iters 1 --eval-interval 2 --save-interval 3 "
    )
    expected = pool.run(train, 1, flags, "")[0].measured
    flags += f"--save {tmp_path / 'run'} "
    first = pool.run(train, 1, f"{flags} --exit-interval 3", "")[0].measured
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    second = pool.run(train, 1, flags, "")[0]

    assert first.losses + second.measured.losses == expected.losses
    assert second.consumed_train_samples == 16
    assert len(get_validation(expected)) >= 4
    assert get_validation(first) | get_validation(second.measured) == get_validation(expected)

    other = pool.run(train, 2, flags.replace("/run", "/other"), "")
    assert get_losses(other) == pytest.approx(expected.losses[3:], abs=1e-5)


def test_epochs_are_the_length_of_a_run(pool, work, tmp_path):
    """--sft-epochs is --train-samples of that many passes, also when the run is resumed."""
    data = make_flags(work / "tokenizer", work, "conversations.jsonl", PACKED)
    data = data.replace("--train-iters 6", "").replace("--split 1,0,0", "--split 8,4,0")
    by_epochs = f"{data} --sft-epochs 3 --save {tmp_path} --exit-interval 2"
    first = pool.run(train, 1, by_epochs, "")[0]
    expected = pool.run(train, 1, f"{data} --train-samples 24", "")[0].measured  # of 8 sequences
    second = pool.run(train, 2, by_epochs.replace("--exit-interval 2", ""), "")
    assert second[0].consumed_train_samples == 24

    losses = first.measured.losses + get_losses(second)
    assert losses == pytest.approx(expected.losses, abs=1e-5)


def run_example(pool, work, script, data="conversations"):
    """Run the flags of an example with a small model and few iterations."""
    model = work / "base"
    shutil.copytree(MODEL, model)
    write_tokenizer(model)
    defaults = {"eos_token_id": [257, 258], "temperature": 0.6}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    variables = {
        "LAUNCH": "printf %s\\n",
        "MODEL": str(model),
        "RUN_DIR": str(work),
        "DATA": str(GOLDEN / f"{data}.jsonl"),
    }
    result = subprocess.run(
        ["bash", f"examples/finetune/{script}.sh"],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    flags = result.stdout.split()[1:]
    assert "--sft" in flags

    small = (
        " --split 1,0,0 --seq-length 64 --train-iters 2 --global-batch-size 2 --log-interval 1 "
        "--eval-iters 0 --num-workers 0 --num-threads 1 --make-vocab-size-divisible-by 1"
    )
    outcomes = pool.run(train, 1, " ".join(flags) + small, "")
    assert len(get_losses(outcomes)) == 2
    return defaults


@pytest.mark.parametrize("script, data", [("sft", "conversations"), ("dpo", "preferences")])
def test_the_example_trains_and_exports(pool, tmp_path, script, data):
    """The export contains the chat template and the defaults of generation."""
    defaults = run_example(pool, tmp_path, script, data)
    template = (tmp_path / "model/chat_template.jinja").read_text()
    assert template == (GOLDEN / "markers.jinja").read_text()
    assert json.loads((tmp_path / "model/generation_config.json").read_text()) == defaults


def test_the_example_of_adapters_writes_files_of_peft(pool, tmp_path):
    run_example(pool, tmp_path, "lora")
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(tmp_path / "base")
    assert fields["r"] == 16
    assert fields["lora_alpha"] == 32
