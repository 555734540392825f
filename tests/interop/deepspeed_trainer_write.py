"""Train tiny models with the Trainer of transformers, or with accelerate, and DeepSpeed on a CPU.

    torchrun --nproc-per-node 2 deepspeed_trainer_write.py DIRECTORY CASE

Runs in a virtual environment with torch, transformers, accelerate and deepspeed, without this
project. Writes DIRECTORY/CASE/checkpoint-3, as its program saves it, with the oracle of
deepspeed_engine_write.py.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed_engine_write import (
    BATCH,
    STEPS_AFTER,
    STEPS_BEFORE,
    VOCABULARY,
    Case,
    make_config,
    make_groups,
    read_digests,
    write_oracle,
)
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

RANKS = 2
ACCUMULATION = 2  # micro-batches of a step of the Trainer
LENGTH = 12
STEPS = STEPS_BEFORE + STEPS_AFTER
LEARNING_RATE = 1e-3


class TrainerCase(NamedTuple):
    stage: int
    bf16: bool = False
    tied: bool = False
    # The optimizer of DeepSpeed in the memory of the CPU, and its schedule, instead of torch's.
    offload: bool = False
    accelerate: bool = False


CASES = {
    "trainer-zero1": TrainerCase(1),
    "trainer-zero2-offload": TrainerCase(2, tied=True, offload=True),
    "trainer-zero3-bf16": TrainerCase(3, bf16=True),
    "trainer-zero3-offload": TrainerCase(3, bf16=True, tied=True, offload=True),
    "accelerate-zero2-bf16": TrainerCase(2, bf16=True, accelerate=True),
    "accelerate-zero3": TrainerCase(3, tied=True, accelerate=True),
}


def make_model(case: TrainerCase) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(make_config(Case(RANKS, case.stage, case.bf16, case.tied)))


def make_samples(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(2))


def make_settings(case: TrainerCase) -> dict[str, Any]:
    """Return the configuration of DeepSpeed, with the values of the documentation of the Trainer."""
    zero: dict[str, Any] = {"stage": case.stage, "overlap_comm": False}
    if case.stage == 3:
        zero |= {
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1000,
        }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
    if not case.offload:
        return settings | {"zero_allow_untested_optimizer": True}
    zero["offload_optimizer"] = {"device": "cpu"}
    names = ("lr", "betas", "eps", "weight_decay")
    optimizer = {"type": "AdamW", "params": dict.fromkeys(names, "auto")}
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    scheduler = {"type": "WarmupLR", "params": dict.fromkeys(names, "auto")}
    return settings | {"optimizer": optimizer, "scheduler": scheduler}


# ---- Trainer ----


class OracleCallback(TrainerCallback):
    """Gathers the digests of the state when it is saved."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.digests: dict[str, dict[str, str]] = {}

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if state.global_step == STEPS_BEFORE:
            assert self.trainer is not None
            engine = self.trainer.model_wrapped
            self.digests = read_digests(engine.module, engine.optimizer)


def run_trainer(case: TrainerCase, directory: Path) -> None:
    """Train and save with the Trainer."""
    args = TrainingArguments(
        output_dir=str(directory),
        deepspeed=make_settings(case),
        use_cpu=True,
        bf16=case.bf16,
        max_steps=STEPS,
        save_steps=STEPS_BEFORE,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=STEPS_BEFORE - 1,
        # With an optimizer in its configuration (offload), DeepSpeed decays norms and biases, too.
        weight_decay=0.1,
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    per_step = RANKS * BATCH * ACCUMULATION
    samples = make_samples(STEPS * per_step)
    dataset = [{"input_ids": sample, "labels": sample} for sample in samples]
    callback = OracleCallback()
    trainer = Trainer(make_model(case), args, train_dataset=dataset, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    if args.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        batches = samples.view(STEPS, per_step, LENGTH)[STEPS_BEFORE:]
        saved = directory / f"checkpoint-{STEPS_BEFORE}"
        write_oracle(saved, callback.digests, batches, losses[STEPS_BEFORE:])


# ---- accelerate ----


def run_accelerate(case: TrainerCase, directory: Path) -> None:
    """Train in a loop with accelerate, and save its state."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
    plugin = DeepSpeedPlugin(zero_stage=case.stage, gradient_clipping=1.0)
    precision = "bf16" if case.bf16 else "no"
    accelerator = Accelerator(
        mixed_precision=precision,
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    per_step = RANKS * BATCH
    samples = make_samples(STEPS * per_step)
    model = make_model(case)
    optimizer = torch.optim.AdamW(make_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    loader = torch.utils.data.DataLoader(samples, batch_size=BATCH)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved = directory / f"checkpoint-{STEPS_BEFORE}"
    digests = {}
    losses = []
    for index, inputs in enumerate(loader):
        if index == STEPS_BEFORE:
            accelerator.save_state(str(saved))
            digests = read_digests(engine.module, engine.optimizer)
        loss = engine(input_ids=inputs, labels=inputs).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().float()).mean().item())
    if accelerator.is_main_process:
        engine.module.config.save_pretrained(saved)
        batches = samples.view(STEPS, per_step, LENGTH)[STEPS_BEFORE:]
        write_oracle(saved, digests, batches, losses[STEPS_BEFORE:])


def main() -> None:
    case = CASES[sys.argv[2]]
    directory = Path(sys.argv[1]) / sys.argv[2]
    run = run_accelerate if case.accelerate else run_trainer
    run(case, directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
