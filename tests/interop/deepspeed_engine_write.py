"""Train tiny models of transformers with real DeepSpeed on CPU, and save them with its engine.

    torchrun --nproc-per-node N deepspeed_engine_write.py DIRECTORY CASE

Runs in a virtual environment with torch, transformers and deepspeed, without this project. Writes
DIRECTORY/CASE: the checkpoint after three steps, config.json, and `oracle.json` with the digests
of all parameters and optimizer states as DeepSpeed gathers them, of its zero_to_fp32, and the
batches and losses of the next steps.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

STEPS_BEFORE = 3
STEPS_AFTER = 3
BATCH = 2  # per rank
LENGTH = 12
VOCABULARY = 37


class Case(NamedTuple):
    ranks: int
    stage: int
    bf16: bool = False
    tied: bool = False
    frozen: bool = False


CASES = {
    "zero1": Case(2, 1),
    "zero2-bf16-tied": Case(2, 2, bf16=True, tied=True),
    "zero2-frozen": Case(3, 2, frozen=True),
    "zero3-frozen": Case(3, 3, frozen=True),
    "zero3-bf16-tied": Case(2, 3, bf16=True, tied=True),
}


def make_config(case: Case) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=case.tied,
        attn_implementation="eager",
    )


def make_groups(model: torch.nn.Module) -> list[dict]:
    """Return the groups of transformers' Trainer: no weight decay of norms and biases."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    decayed = [param for name, param in trained if "norm" not in name]
    others = [param for name, param in trained if "norm" in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def initialize(case: Case) -> tuple[LlamaForCausalLM, deepspeed.DeepSpeedEngine]:
    torch.manual_seed(1)
    config = make_config(case)
    model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.02)
        if case.frozen and ("layers.0" in name or "embed" in name):
            param.requires_grad = False
    optimizer = torch.optim.AdamW(make_groups(model), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": case.stage},
    }
    if case.stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        settings["zero_optimization"]["sub_group_size"] = 500
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return model, engine


def make_batches(case: Case) -> torch.Tensor:
    """Return [steps, all ranks' samples, tokens]."""
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS_BEFORE + STEPS_AFTER, case.ranks * BATCH, LENGTH)
    return torch.randint(VOCABULARY, shape, generator=generator)


def step(engine: deepspeed.DeepSpeedEngine, batch: torch.Tensor) -> float:
    """Train on this rank's samples, and return the mean loss of all ranks."""
    first = dist.get_rank() * BATCH
    inputs = batch[first : first + BATCH]
    loss = engine(input_ids=inputs, labels=inputs).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().float()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the elements as fp32."""
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def read_digests(
    model: torch.nn.Module, optimizer: deepspeed.DeepSpeedOptimizer
) -> dict[str, dict[str, str]]:
    """Return the digests of parameters and moments by name, as DeepSpeed's functions gather them."""
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed 0.19.8 links them before the first step of torch's optimizer creates them.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    states = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            with deepspeed.zero.GatheredParameters(param, enabled=hasattr(param, "ds_id")):
                states[name] = {"param": digest(param)}
            continue
        states[name] = {"param": digest(safe_get_full_fp32_param(param))}
        for state in ("exp_avg", "exp_avg_sq"):
            states[name][state] = digest(safe_get_full_optimizer_state(param, state))
    return states


def write_oracle(
    directory: Path, states: dict[str, dict[str, str]], batches: torch.Tensor, losses: list[float]
) -> None:
    """Write the digests of all states and of zero_to_fp32, and the next batches and losses."""
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        (directory / script).unlink(missing_ok=True)
    merged = get_fp32_state_dict_from_zero_checkpoint(str(directory))
    oracle = {
        "states": states,
        "zero_to_fp32": {name: digest(tensor) for name, tensor in merged.items()},
        "batches": batches.tolist(),
        "losses": losses,
    }
    (directory / "oracle.json").write_text(json.dumps(oracle, indent=1))


def main() -> None:
    case = CASES[sys.argv[2]]
    directory = Path(sys.argv[1]) / sys.argv[2]
    deepspeed.init_distributed("gloo")
    assert dist.get_world_size() == case.ranks
    model, engine = initialize(case)
    batches = make_batches(case)
    for batch in batches[:STEPS_BEFORE]:
        step(engine, batch)
    engine.save_checkpoint(str(directory))
    digests = read_digests(model, engine.optimizer)
    losses = [step(engine, batch) for batch in batches[STEPS_BEFORE:]]
    if dist.get_rank() == 0:
        make_config(case).save_pretrained(directory)
        write_oracle(directory, digests, batches[STEPS_BEFORE:], losses)
    dist.barrier()


if __name__ == "__main__":
    main()
