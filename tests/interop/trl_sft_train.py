"""Train the model in WORK/model with trl's SFTTrainer, or DPOTrainer for preferences, on given
batches, in its own environment.

WORK/cases.json contains, for each case, the file of its examples and the indices of the examples
of each batch. Writes the tokens, labels and losses to WORK/trl.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class BatchTrainer:
    """Part of a trainer that reads given batches, and keeps the exact losses."""

    batches: list[list[int]]
    losses: list[float]

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(
            self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        result = super().compute_loss(*args, **options)
        loss = result[0] if isinstance(result, tuple) else result
        self.losses.append(loss.item())
        return result


class SFTBatchTrainer(BatchTrainer, SFTTrainer):
    columns = ("input_ids", "labels")


class DPOBatchTrainer(BatchTrainer, DPOTrainer):
    columns = ("prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps", "ref_rejected_logps")


def train(work: Path, data: str, batches: list[list[int]], max_length: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    examples = [json.loads(line) for line in Path(data).read_text().splitlines()]
    # Text and messages cannot share a column.
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        form = f"{type(example.get('prompt'))} {sorted(example)}"
        groups.setdefault(form, []).append(index)
    is_preference = "chosen" in examples[0]
    objective: dict[str, Any] = {"assistant_only_loss": "messages" in examples[0]}
    if is_preference:
        objective = {"precompute_ref_log_probs": True, "beta": 0.1}
    options = (DPOConfig if is_preference else SFTConfig)(
        **objective,
        output_dir=str(work / "output"),
        max_steps=len(batches),
        per_device_train_batch_size=1,
        max_length=max_length,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    trainer_class = DPOBatchTrainer if is_preference else SFTBatchTrainer
    tokenized: dict[int, dict[str, Any]] = {}
    for indices in groups.values():
        rows = [examples[index] for index in indices]
        trainer = trainer_class(
            model=str(work / "model"),
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        for index, row in zip(indices, trainer.train_dataset, strict=True):
            tokenized[index] = {name: row[name] for name in trainer.columns}
    trainer.train_dataset = Dataset.from_list([tokenized[index] for index in sorted(tokenized)])
    trainer.batches = batches
    trainer.losses = []
    trainer.train()
    return {
        "examples": [tokenized[index] for index in sorted(tokenized)],
        "batches": batches,
        "losses": trainer.losses,
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    torch.manual_seed(0)
    cases = json.loads((directory / "cases.json").read_text())
    results = {name: train(directory, **case) for name, case in cases.items()}
    (directory / "trl.json").write_text(json.dumps(results))
