"""Save parameters with the names of Megatron-DeepSpeed, split over TP2 and PP2, by DeepSpeed's engine.

    torchrun --nproc-per-node 4 deepspeed_megatron_write.py DIRECTORY [--bf16]

Runs in a virtual environment with torch and deepspeed, without this project. The parameters are
trained for two steps with gradients that differ for each element. `oracle.json` contains digests of
all states after DeepSpeed's own ds_to_universal, and the final learning rate.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal

TP, PP = 2, 2
TAG = "global_step2"
HIDDEN, FFN, HEADS, GROUPS, VOCABULARY, ROWS = 16, 24, 4, 2, 37, 40
EMBEDDING = "tied_modules.embed.word_embeddings.weight"
HEAD_DIM = HIDDEN // HEADS
SHAPES = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attention.query_key_value.weight": ((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN),
    "self_attention.dense.weight": (HIDDEN, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.dense_h_to_4h.weight": (2 * FFN, HIDDEN),
    "mlp.dense_4h_to_h.weight": (HIDDEN, FFN),
}
STAGES = (
    {EMBEDDING: (ROWS, HIDDEN)} | {f"2.{name}": shape for name, shape in SHAPES.items()},
    {f"3.{name}": shape for name, shape in SHAPES.items()}
    | {"4.weight": (HIDDEN,), EMBEDDING: (ROWS, HIDDEN)},
)
ARGS = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "swiglu": True,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-5,
    "use_rotary_position_embeddings": True,
    "add_position_embedding": False,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": False,
    "max_position_embeddings": 16,
    "seq_length": 16,
    "make_vocab_size_divisible_by": 4,
    "tensor_model_parallel_size": TP,
    "pipeline_model_parallel_size": PP,
    "consumed_train_samples": 8,
    "lr": 1e-3,
}
PATTERNS = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCABULARY,
    "padded_vocab_size": ROWS,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [
        r"\d+.input_layernorm.weight",
        r"\d+.post_attention_layernorm.weight",
        r"4.weight",
    ],
    "parameter_to_average_patterns": [],
    "parameter_with_row_parallelism_patterns": [
        r"\d+.self_attention.dense.weight",
        r"\d+.mlp.dense_4h_to_h.weight",
    ],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.dense_h_to_4h.weight"],
}


class Grid:
    """Model-parallel unit for DeepSpeed: every process is a tensor- and pipeline-parallel rank."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        alone = [dist.new_group([rank]) for rank in ranks]
        stages = [dist.new_group(list(ranks[first : first + TP])) for first in ranks[::TP]]
        self._alone = alone[dist.get_rank()]
        self._stage = stages[dist.get_rank() // TP]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank() % TP

    def get_tensor_model_parallel_world_size(self) -> int:
        return TP

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._stage

    def get_pipeline_model_parallel_rank(self) -> int:
        return dist.get_rank() // TP

    def get_pipeline_model_parallel_world_size(self) -> int:
        return PP

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._alone


def cut_slice(name: str, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """Return the slice of a tensor-parallel rank by the rules of Megatron's layers."""
    if "layernorm" in name or name == "4.weight":
        return full
    if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
        return full.chunk(TP, dim=1)[tp_rank]
    if "dense_h_to_4h" in name:
        return torch.cat([half.chunk(TP)[tp_rank] for half in full.chunk(2)])
    return full.chunk(TP)[tp_rank]


def make_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return values that are equal on all ranks."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randn(shape, generator=generator) * 0.02


class Stage(torch.nn.Module):
    """The parameters of a stage, and a loss with a given gradient."""

    def __init__(self, stage: int, tp_rank: int) -> None:
        super().__init__()
        self.tp_rank = tp_rank
        self.shapes = STAGES[stage]
        for name, shape in self.shapes.items():
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            values = cut_slice(name, make_values(name, shape, 0), tp_rank).clone()
            param = torch.nn.Parameter(values)
            # Otherwise only the first tensor-parallel rank counts it in the gradient norm.
            param.tensor_model_parallel = values.shape != shape
            module.register_parameter(last, param)

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, param in self.named_parameters():
            gradient = make_values(name, self.shapes[name], step)
            total = total + (param.float() * cut_slice(name, gradient, self.tp_rank)).sum()
        return total


def train(bf16: bool) -> deepspeed.DeepSpeedEngine:
    stage, tp_rank = divmod(dist.get_rank(), TP)
    model = Stage(stage, tp_rank)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "name": "wd_no_scale_lr"},
        {"params": others, "weight_decay": 0.0, "name": "no_wd_no_scale_lr"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": bf16},
    }
    if bf16:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=Grid())
    for step in (1, 2):
        engine.backward(engine(step))
        engine.step()
    return engine


def write_oracle(directory: Path) -> None:
    """Convert by DeepSpeed, and write the digests of the result."""
    for layer in range(1, 5):  # DeepSpeed derives the layout from the names of these files
        for tp_rank in range(TP):
            path = directory / TAG / f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt"
            torch.save({}, path)
    universal = directory / "universal"
    sys.argv = ["ds_to_universal", "--input_folder", str(directory / TAG)]
    sys.argv += ["--output_folder", str(universal), "--num_extract_workers", "1"]
    sys.argv += ["--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    oracle = {}
    for path in sorted(universal.glob("zero/*/*.pt")):
        content = torch.load(path, weights_only=False)
        if isinstance(content, dict):
            values = content["param"].detach().float().contiguous()
            states = oracle.setdefault(path.parent.name, {})
            states[path.stem] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    shutil.rmtree(universal)
    (directory / "oracle.json").write_text(json.dumps(oracle, indent=1))


def main() -> None:
    directory = Path(sys.argv[1])
    bf16 = "--bf16" in sys.argv
    deepspeed.init_distributed("gloo")
    engine = train(bf16)
    state = {
        "args": argparse.Namespace(**ARGS, bf16=bf16),
        "iteration": 2,
        "checkpoint_version": 3.0,
        "universal_checkpoint_info": PATTERNS,
    }
    engine.save_checkpoint(str(directory), tag=TAG, client_state=state)
    dist.barrier()
    if dist.get_rank() == 0:
        write_oracle(directory)
    dist.barrier()


if __name__ == "__main__":
    main()
