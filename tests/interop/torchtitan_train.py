"""Train with torchtitan's optimizers, schedulers and checkpoint manager, or with our manager.

    torchrun --nproc-per-node N torchtitan_train.py MANAGER DIRECTORY STEPS LOSSES [INITIAL]

MANAGER is `dcp` (torchtitan's) or `checkpointer` (examples/library/torchtitan_checkpoints.py). The
model and the loop are not torchtitan's, whose Trainer calls `torch.cuda.set_device` and whose models
import triton and need flex or varlen attention. Runs in a virtual environment with torchtitan and the distribution of `checkpointing/`. Continues from the newest
checkpoint in DIRECTORY, or from the checkpoint INITIAL, up to STEPS and writes {step: loss} to
LOSSES. All ranks train on the same tokens, so that the losses do not depend on the number of ranks.
"""

import importlib.util
import json
import sys
from pathlib import Path

import megatron_checkpoint
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

ADAPTER = Path(__file__).parents[2] / "examples/library/torchtitan_checkpoints.py"
VOCABULARY = 64
LENGTH = 16
WIDTH = 32


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )
    fully_shard(model[1])
    return fully_shard(model)


class TrainState:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict:
        return {"step": self.step, "ntokens_seen": torch.tensor(self.step * LENGTH)}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


class Loader:
    """Data loader whose position is the number of batches."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


def import_manager() -> type:
    """Return the manager of the example, with the distribution's name of the engine."""
    sys.modules["megatron.core.dist_checkpointing"] = megatron_checkpoint
    spec = importlib.util.spec_from_file_location("torchtitan_checkpoints", ADAPTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchtitan_checkpoints"] = module
    spec.loader.exec_module(module)
    return module.CheckpointerManager


def main() -> None:
    kind, directory, steps, target = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    initial = sys.argv[5] if len(sys.argv) > 5 else None
    dist.init_process_group("gloo")
    model = build_model()
    config = default_adamw(lr=8e-4)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=20
    )
    state = TrainState()
    loader = Loader()
    manager = CheckpointManager if kind == "dcp" else import_manager()
    # The position of a data loader is that of one rank: it is set below if their number changes.
    skipped = ["dataloader"] if dist.get_world_size() == 1 else []
    options = {"initial_load_model_only": False, "exclude_from_loading": skipped}
    checkpointer = manager.Config(
        enable=True, interval=3, last_save_model_only=False, initial_load_path=initial, **options
    ).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(directory),
    )
    checkpointer.load()
    loader.position = state.step
    losses = {}
    while state.step < steps:
        state.step += 1
        batch = loader.next_batch()
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        losses[state.step] = loss.item()
        checkpointer.save(state.step, last_step=state.step == steps)
    checkpointer.close()
    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(losses))
        print(f"trained {len(losses)} steps of a model of torchtitan", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
