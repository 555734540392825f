"""Compare adapters that a run trained with peft: gradients of all matrices, and merged weights.

    python -m tests.interop.peft_lora_check PYTHON WORK

PYTHON is an interpreter with peft, and WORK an empty directory.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, WriteOptions
from megatron.core.run_checkpoint.formats import find_checkpoint
from megatron.core.run_checkpoint.native_reader import open_run_checkpoint
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.adapters.encoded_layers import index_encoded_layers
from megatron.training.adapters.targets import add_adapters
from megatron.training.config.lora_options import LoraConfig
from tests import ROOT
from tests.interop.peft_lora_gradients import TOKENS
from tests.support.compare import read_whole
from tests.support.lora_runs import LORA, MODEL, SHAPE, TRAINING, WIDE_SHAPE, write_wide_model
from tests.unit_tests.conversion.filled_model import chunk

CASES = {
    "lora": "",
    "dora": "--lora-dora",
    "some_targets": "--lora-targets q_proj v_proj linear_fc2",
    "nf4": "--lora-base-encoding nf4",
}
NAMES = {
    "decoder.layers.": "layers.",
    "self_attention.linear_qkv.": "self_attn.",
    "self_attention.linear_proj.": "self_attn.",
    "mlp.linear_fc1.": "mlp.",
    "mlp.linear_fc2.": "mlp.",
}
TOLERANCE = 1e-6


def compute_gradients(run: Path, base: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of our model with the adapters of a run, and their gradients."""
    ref = find_checkpoint(run)
    assert ref is not None

    source = open_run_checkpoint(ref.directory)
    assert source is not None

    names = ("lora_rank", "lora_alpha", "lora_targets", "lora_dora", "lora_base_encoding")
    lora = LoraConfig(**{name: source.args[name] for name in names})
    model = chunk(open_checkpoint(base))
    base_values = {name: param.detach() for name, param in model.named_parameters()}
    add_adapters(model, lora, TensorParallelRng(0, 0))
    layers = index_encoded_layers([model])
    for name, param in model.named_parameters():
        if param in layers:
            layers[param].store_rows(0, base_values[name])
        elif name in base_values:
            param.data.copy_(base_values[name])

    for key, entry in model.sharded_state_dict().items():
        if ".lora_" in key:
            entry.local.data.copy_(read_whole(source, key))
    positions = torch.arange(TOKENS.shape[1] - 1).expand(2, -1)
    losses = model(TOKENS[:, :-1], positions, labels=TOKENS[:, 1:])
    losses.mean().backward()
    gradients = {}
    for key, entry in model.sharded_state_dict().items():
        if ".lora_" in key:
            for ours, theirs in NAMES.items():
                key = key.replace(ours, theirs)
            gradients[key] = entry.local.grad
    return losses.mean().item(), gradients


def check(python: str, work: Path, name: str, flags: str) -> None:
    """Train adapters, and compare them in peft."""
    run, adapter, result = (work / name / part for part in ("run", "adapter", "result.pt"))
    is_quantized = "nf4" in flags
    base = MODEL
    shape = SHAPE
    if is_quantized:
        base = work / name / "base"
        shape = WIDE_SHAPE
        write_wide_model(base)

    argv = f"{shape} {TRAINING} {LORA} --pretrained-checkpoint {base} --save {run} --save-hf {adapter} {flags}"
    program = [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv.split()]
    subprocess.run(program, check=True, cwd=ROOT)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    script = str(Path(__file__).with_name("peft_lora_gradients.py"))
    arguments = [str(base), str(adapter), str(result)]
    if is_quantized:
        arguments.append("nf4")
    subprocess.run([python, script, *arguments], check=True, env=environment)
    expected = torch.load(result)

    loss, gradients = compute_gradients(run, base)
    assert abs(loss - expected["loss"]) <= TOLERANCE, (loss, expected["loss"])
    assert gradients.keys() == expected["gradients"].keys()

    error = 0.0
    for key, gradient in gradients.items():
        assert gradient.norm() > 0, key
        error = max(error, (gradient - expected["gradients"][key]).abs().max().item())
    assert error <= TOLERANCE, f"{name}: gradients differ by {error}"

    print(f"peft: {name}: {len(gradients)} gradients within {error:.1e}", flush=True)
    if is_quantized:
        return
    options = WriteOptions(edits=EditOptions(adapters=(adapter,)))
    convert(MODEL, work / name / "merged", "hf", options=options)
    merged = load_file(work / name / "merged/model.safetensors")
    assert merged.keys() == expected["merged"].keys()

    for key, weight in merged.items():
        difference = (weight - expected["merged"][key]).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: {key} differs by {difference}"


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    for name, flags in CASES.items():
        (work / name).mkdir()
        check(python, work, name, flags)


if __name__ == "__main__":
    main()
