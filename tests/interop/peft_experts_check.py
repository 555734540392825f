"""Compare adapters of experts with peft: gradients, merged weights and files in both directions.

    python -m tests.interop.peft_experts_check PYTHON WORK

PYTHON is an interpreter with peft, and WORK an empty directory.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from megatron.conversion.editing.edits import apply_edits
from megatron.conversion.huggingface.adapter_writer import write_adapter
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, WriteOptions
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.adapters.targets import add_adapters
from megatron.training.config.lora_options import LoraConfig
from tests.interop.peft_lora_gradients import TOKENS
from tests.support.memory_source import MemorySource
from tests.unit_tests.conversion.filled_model import chunk

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
TOP_2_OF_4: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MODELS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **TOP_2_OF_4),
    "mixtral": transformers.MixtralConfig(**SIZES, **LOCAL_EXPERTS),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES,
        **LOCAL_EXPERTS,
        head_dim=16,
        layer_types=["full_attention", "full_attention"],
    ),
    "granitemoe": transformers.GraniteMoeConfig(**SIZES, **LOCAL_EXPERTS),
    "deepseek_v3": transformers.DeepseekV3Config(**(SIZES | DEEPSEEK)),
}
# Model -> targets
CASES = {
    "qwen3_moe": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "mixtral": ["linear_fc1", "linear_fc2", "v_proj"],
    "gpt_oss": ["linear_fc1", "linear_fc2"],
    "granitemoe": ["linear_fc2", "q_proj"],
    # peft 0.21 loads adapters of shared experts as those of routed experts.
    "deepseek_v3": ["experts.linear_fc1", "experts.linear_fc2", "linear_proj"],
}
TOLERANCE = 1e-6


def write_ours(base: Path, work: Path, targets: list[str]) -> float:
    """Write random adapters and their gradients as files of PEFT, and return the loss."""
    source = open_checkpoint(base)
    lora = LoraConfig(lora_rank=3, lora_alpha=6.0, lora_targets=targets)
    model = chunk(source)
    add_adapters(model, lora, TensorParallelRng(0, 0))
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            param.data.normal_(std=0.1, generator=generator)
    positions = torch.arange(TOKENS.shape[1] - 1).expand(2, -1)
    loss = model(TOKENS[:, :-1], positions, labels=TOKENS[:, 1:]).mean()
    loss.backward()

    args = source.args | vars(lora) | {"model_vocab_size": SIZES["vocab_size"]}
    args["lora_base_model"] = (str(base), "float32:0", source.args["hf_model_type"])
    values = {}
    gradients = {}
    for key, entry in model.sharded_state_dict().items():
        if ".lora_" in key:
            values[key] = entry.local.detach()
            gradients[key] = entry.local.grad
            assert gradients[key].norm() > 0, key

    for name, tensors in (("adapter", values), ("gradients", gradients)):
        (work / name).mkdir()
        write_adapter(MemorySource(args, tensors), work / name)
    return loss.item()


def compare_gradients(work: Path, expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference from PEFT's gradients."""
    weights = load_file(work / "adapter/adapter_model.safetensors")
    error = 0.0
    names = set()
    for name, gradient in load_file(work / "gradients/adapter_model.safetensors").items():
        short = name.removeprefix("base_model.model.model.").removesuffix(".weight")
        names.add(short)
        # PEFT also trains the zeros of B between projections that one module computes.
        expected_gradient = expected[short].masked_fill(weights[name] == 0, 0.0)
        error = max(error, (gradient - expected_gradient).abs().max().item())

    assert names == expected.keys(), names ^ expected.keys()
    return error


def check(python: str, work: Path, name: str, targets: list[str]) -> None:
    base = work / "base"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    model.save_pretrained(base)
    loss = write_ours(base, work, targets)

    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    script = str(Path(__file__).with_name("peft_lora_gradients.py"))
    command = [python, script, str(base), str(work / "adapter"), str(work / "result.pt")]
    subprocess.run(command, check=True, env=environment)
    expected = torch.load(work / "result.pt")
    assert abs(loss - expected["loss"]) <= TOLERANCE, (loss, expected["loss"])

    error = compare_gradients(work, expected["gradients"])
    assert error <= TOLERANCE, f"{name}: gradients differ by {error}"

    options = WriteOptions(edits=EditOptions(adapters=(work / "adapter",)))
    merged = apply_edits(open_checkpoint(base), options)
    expected_source = open_checkpoint(work / "result")
    for key, tensor in expected_source.tensors.items():
        difference = (merged.tensors[key].read_all() - tensor.read_all()).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: {key} differs by {difference}"
    print(f"peft: experts of {name}: gradients within {error:.1e}", flush=True)


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    for name, targets in CASES.items():
        (work / name).mkdir()
        check(python, work / name, name, targets)


if __name__ == "__main__":
    main()
