"""Compute the gradients and merged weights of an adapter with peft; runs in its own environment.

python peft_lora_gradients.py MODEL ADAPTER RESULT.pt

The merged model is also written to the directory RESULT.
"""

import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.arange(60).view(2, 30) * 7 % 250


def compute(model_dir: Path, adapter_dir: Path, merged_dir: Path) -> dict[str, Any]:
    """Return loss, gradients by name in the model, and merged weights, which are also saved."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, adapter_dir, is_trainable=True)
    logits = adapted(TOKENS).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    gradients = {}
    for name, param in adapted.named_parameters():
        if param.requires_grad:
            short = name.removeprefix("base_model.model.model.").replace(".default", "")
            gradients[short.removesuffix(".weight")] = param.grad
    merged = adapted.merge_and_unload()
    merged.save_pretrained(merged_dir)
    return {"loss": loss.item(), "gradients": gradients, "merged": merged.state_dict()}


if __name__ == "__main__":
    model, adapter, result = map(Path, sys.argv[1:])
    torch.save(compute(model, adapter, result.with_suffix("")), result)
