"""`LightningCheckpointerCallback` of Lightning: an interrupted and resumed run ends with the same bits."""

import importlib.util
import os
import sys
import time
from unittest import mock

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from megatron.checkpointer.lightning import (  # noqa: E402
    LightningCheckpointerCallback,
)
from megatron.core.dist_checkpointing import CheckpointDirectory  # noqa: E402
from tests import ROOT  # noqa: E402

STEPS = 8


def load_example():
    path = ROOT / "examples/library/train_lightning.py"
    spec = importlib.util.spec_from_file_location("train_lightning", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Interruption(Exception):
    pass


class Interrupt(Callback):
    """Raises after a step; counts all steps in its state."""

    def __init__(self, step, directory):
        self.step = step
        self.directory = directory
        self.first = None
        self.count = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.first = self.first or trainer.global_step
        self.count += 1
        if trainer.global_step == self.step:
            while not CheckpointDirectory(self.directory).list_iterations():
                time.sleep(0.01)  # the save is asynchronous
            raise Interruption

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def train(rank, world_size, directory, interval, step=None):
    """Train the example's model; returns weights, optimizer state, progress and the first step."""
    example = load_example()
    torch.manual_seed(0)
    interrupt = Interrupt(step, directory)
    callback = LightningCheckpointerCallback(directory, save_interval=interval)
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "NODE_RANK": 0}
    launched |= {"LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0, "MASTER_PORT": 1}
    launched |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "test"}
    environment = {name: str(value) for name, value in launched.items()} if world_size > 1 else {}
    with mock.patch.dict(os.environ, environment):
        trainer = example.build_trainer(
            STEPS,
            callback,
            accelerator="cpu",
            devices=world_size,
            strategy="ddp" if world_size > 1 else "auto",
            use_distributed_sampler=False,
            enable_progress_bar=False,
        )
        trainer.callbacks.insert(0, interrupt)
        module = example.AutoEncoder()
        try:
            trainer.fit(module, example.Loader())
        except Interruption:
            return None
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for kind, value in trainer.optimizers[0].state[parameter].items():
            state[f"{name} {kind}"] = value.clone()
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    progress = (trainer.global_step, trainer.current_epoch, rates, interrupt.count)
    return state, progress, interrupt.first


# An epoch has 3 steps of the optimizer.
@pytest.mark.parametrize(
    ("ranks", "interval", "step"), [(1, 2, 4), (1, 3, 4), (1, 5, 6), (2, 2, 4), (2, 3, 5)]
)
def test_interrupted_training_ends_with_the_same_bits(ranks, interval, step, pool, tmp_path):
    expected = pool.run(train, ranks, tmp_path / "at once", 100)
    pool.run(train, ranks, tmp_path / "run", interval, step)
    resumed = pool.run(train, ranks, tmp_path / "run", interval)
    for (state, progress, first), (wanted, final, _) in zip(resumed, expected, strict=True):
        assert progress == final
        assert first >= interval
        assert state.keys() == wanted.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=name)


def test_example_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (10, 20):
        command = ["train_lightning.py", "--checkpoints", "run", "--steps", str(steps)]
        monkeypatch.setattr(sys, "argv", command)
        load_example().main()
    assert CheckpointDirectory(tmp_path / "run").list_iterations() == [10, 20]


def test_trainer_that_saves_itself_is_refused(tmp_path):
    example = load_example()
    trainer = example.build_trainer(
        2, LightningCheckpointerCallback(tmp_path / "run"), accelerator="cpu"
    )
    trainer.callbacks.append(ModelCheckpoint())
    with pytest.raises(ValueError, match="ModelCheckpoint .*enable_checkpointing=False"):
        trainer.fit(example.AutoEncoder(), example.Loader())
