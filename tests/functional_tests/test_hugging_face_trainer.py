"""`CheckpointerCallback`: an interrupted and resumed `transformers.Trainer` ends with the same bits."""

import functools
import importlib.util
import os
import signal
import sys
import time
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import EarlyStoppingCallback, TrainerCallback

from megatron.checkpointer.hugging_face_trainer import (
    CheckpointerCallback,
)
from megatron.core.dist_checkpointing import CheckpointDirectory
from tests import ROOT

STEPS = 10


def load_example():
    path = ROOT / "examples/library/train_hf_trainer.py"
    spec = importlib.util.spec_from_file_location("train_hf_trainer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_hf_trainer"] = module  # the collator is found by name
    spec.loader.exec_module(module)
    return module


class Interruption(Exception):
    pass


class Interrupt(TrainerCallback):
    """Ends training after a step: by an exception, by a request or by a signal."""

    def __init__(self, kind, step, directory):
        self.kind = kind
        self.step = step
        self.directory = directory

    def on_step_end(self, args, state, control, **others):
        if state.global_step != self.step:
            return
        if self.kind == "request":
            control.should_training_stop = True
        if self.kind == "signal" and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.kind == "exception":
            while not CheckpointDirectory(self.directory).list_iterations():
                time.sleep(0.01)  # the save is asynchronous
            raise Interruption


def train(rank, world_size, directory, interval, interruption=None, steps=STEPS):
    """Train the example's model; returns weights, optimizer state, log and the first step."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    launched |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    environment = {name: str(value) for name, value in launched.items()} if world_size > 1 else {}
    AcceleratorState._reset_state(True)
    with mock.patch.dict(os.environ, environment):
        trainer = load_example().build_trainer(
            steps,
            output_dir=str(directory / "output"),
            eval_strategy="steps",
            eval_steps=4,
            metric_for_best_model="loss",
            greater_is_better=False,
            restore_callback_states_from_checkpoint=True,
            disable_tqdm=True,
        )
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=100))
        if interruption is not None:
            trainer.add_callback(Interrupt(*interruption, directory / "run"))
        started = []
        trainer.add_callback(Recorder(started))
        callback = CheckpointerCallback(
            directory / "run", save_interval=interval, exit_signals=[signal.SIGUSR1]
        )
        try:
            callback.train(trainer)
        except Interruption:
            return None
        finally:
            AcceleratorState._reset_state(True)
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        if trainer.optimizer is not None:
            for kind, value in trainer.optimizer.state.get(parameter, {}).items():
                state[f"{name} {kind}"] = value.clone()
    losses = []
    for line in trainer.state.log_history:
        if "loss" in line or "eval_loss" in line:  # none of them at the end of training
            losses.append((line["step"], line.get("loss"), line.get("eval_loss")))
    outcome = (trainer.state.best_metric, trainer.state.epoch, trainer.state.global_step)
    return state, losses, outcome, started


class Recorder(TrainerCallback):
    def __init__(self, started):
        self.started = started

    def on_step_end(self, args, state, control, **others):
        self.started.append(state.global_step)


def assert_same(found, expected):
    assert found[0].keys() == expected[0].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, expected[0][name], rtol=0, atol=0, msg=name)
    assert found[1:3] == expected[1:3]


@pytest.fixture(scope="module")
def uninterrupted(pool, tmp_path_factory):
    """Return a function of the number of ranks: the results of training without interruption."""

    @functools.cache
    def train_at_once(ranks):
        return pool.run(train, ranks, tmp_path_factory.mktemp("at_once"), 100)

    return train_at_once


# An epoch has 7 steps on one rank and 4 on two, of which the last one has a single micro-batch.
@pytest.mark.parametrize(
    ("ranks", "interval", "kind", "step"),
    [
        (1, 7, "exception", 8),
        (1, 100, "request", 7),
        (1, 100, "signal", 3),
        (2, 3, "exception", 5),
        (2, 4, "exception", 6),
        (2, 100, "signal", 5),
    ],
)
def test_interrupted_training_ends_with_the_same_bits(
    ranks, interval, kind, step, uninterrupted, pool, tmp_path
):
    expected = uninterrupted(ranks)
    pool.run(train, ranks, tmp_path, interval, (kind, step))
    resumed = pool.run(train, ranks, tmp_path, interval)
    for actual, wanted in zip(resumed, expected, strict=True):
        assert_same(actual, wanted)
        assert 1 < actual[3][0] <= step + 2


def test_completed_training_is_not_continued(tmp_path):
    first = train(0, 1, tmp_path, 4, steps=4)
    again = train(0, 1, tmp_path, 4, steps=4)
    assert again[3] == []
    weights = {name: value for name, value in first[0].items() if " " not in name}
    assert_same(again, (weights, *first[1:]))


def test_example_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = load_example()
    for steps in (2, 3):
        command = ["train_hf_trainer.py", "--checkpoints", "run", "--steps", str(steps)]
        monkeypatch.setattr(sys, "argv", command)
        example.main()
    assert CheckpointDirectory(tmp_path / "run").list_iterations() == [2, 3]
    assert [capsys.readouterr().out.count("'grad_norm'")] == [3]


def test_trainer_that_saves_itself_is_refused(tmp_path):
    build = load_example().build_trainer
    callback = CheckpointerCallback(tmp_path / "run")
    trainer = build(2, output_dir=str(tmp_path))
    trainer.args.save_strategy = "steps"
    with pytest.raises(ValueError, match=r'save_strategy="steps" writes .*set save_strategy="no"'):
        callback.train(trainer)
    trainer = build(2, output_dir=str(tmp_path))
    trainer.add_callback(callback)
    with pytest.raises(ValueError, match=r"callback\.train\(trainer\) instead of trainer\.train"):
        trainer.train()
