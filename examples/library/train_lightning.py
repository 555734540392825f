"""Train a small network with Lightning, with asynchronous, crash-safe checkpoints.

    python examples/library/train_lightning.py --checkpoints run --steps 20
    python examples/library/train_lightning.py --checkpoints run --steps 40

The second command continues from step 20. Kill it at any time and start it again: the final weights
are the same bits. Requires lightning or pytorch_lightning.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megatron.checkpointer.lightning import (
    LightningCheckpointerCallback,
    LightningModule,
    Trainer,
)

WIDTH = 16
BATCHES = 6  # of an epoch


class Loader:
    """Data loader that can continue within an epoch, like torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < BATCHES:
            generator = torch.Generator().manual_seed(100 * self.epoch + self.position)
            self.position += 1
            yield torch.randn(8, WIDTH, generator=generator)
        self.epoch += 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.position = state["position"]


class AutoEncoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, WIDTH)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def build_trainer(steps: int, callback: LightningCheckpointerCallback, **options: Any) -> Trainer:
    return Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        callbacks=[callback],
        enable_checkpointing=False,
        logger=False,
        enable_model_summary=False,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", required=True, help="directory or s3:// URL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-interval", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    callback = LightningCheckpointerCallback(
        args.checkpoints, save_interval=args.save_interval, keep_last=2
    )
    build_trainer(args.steps, callback).fit(AutoEncoder(), Loader())


if __name__ == "__main__":
    main()
