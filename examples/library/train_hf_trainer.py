"""Train a small GPT-2 with `transformers.Trainer`, with asynchronous, crash-safe checkpoints.

    torchrun --nproc-per-node 2 examples/library/train_hf_trainer.py --checkpoints run --steps 20
    torchrun --nproc-per-node 2 examples/library/train_hf_trainer.py --checkpoints run --steps 40

The second command continues from step 20. Kill it at any time and start it again: the final weights
are the same bits. Ctrl-C or SIGTERM saves and ends. Requires accelerate.
"""

import argparse
import signal

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from megatron.checkpointer.hugging_face_trainer import (
    CheckpointerCallback,
)

VOCABULARY = 64
LENGTH = 16
SAMPLES = 56


def build_trainer(steps: int, **arguments: object) -> Trainer:
    """Return a trainer of `steps` steps, several epochs of its random tokens."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    training_arguments = TrainingArguments(
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        save_strategy="no",  # the callback saves
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        **arguments,
    )
    dataset = TensorDataset(torch.randint(0, VOCABULARY, (SAMPLES, LENGTH)))
    return Trainer(
        GPT2LMHeadModel(config),
        training_arguments,
        data_collator=collate,
        train_dataset=dataset,
        eval_dataset=TensorDataset(dataset.tensors[0][:8]),
    )


def collate(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([sample[0] for sample in samples])  # [b, s]
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", required=True, help="directory or s3:// URL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-interval", type=int, default=10)
    args = parser.parse_args()

    callback = CheckpointerCallback(
        args.checkpoints,
        save_interval=args.save_interval,
        exit_signals=[signal.SIGTERM, signal.SIGINT],
        keep_last=2,
    )
    callback.train(build_trainer(args.steps))


if __name__ == "__main__":
    main()
