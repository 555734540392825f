"""Compute the gradients and merged weights of an adapter with peft; runs in its own environment.

python peft_lora_gradients.py MODEL ADAPTER RESULT.pt [nf4]

The merged model is also written to the directory RESULT. With nf4, bitsandbytes quantizes the model, which is not merged.
"""

import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.arange(60).view(2, 30) * 7 % 250


def compute(
    model_dir: Path, adapter_dir: Path, merged_dir: Path, is_quantized: bool
) -> dict[str, Any]:
    """Return loss, gradients by name in the model, and merged weights, which are also saved."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if is_quantized:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, quantization_config=quantization
    )
    adapted = PeftModel.from_pretrained(model, adapter_dir, is_trainable=True)
    logits = adapted(TOKENS).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    gradients = {}
    for name, param in adapted.named_parameters():
        if param.requires_grad:
            short = name.removeprefix("base_model.model.model.").replace(".default", "")
            gradients[short.removesuffix(".weight")] = param.grad
    if is_quantized:
        return {"loss": loss.item(), "gradients": gradients}
    merged = adapted.merge_and_unload()
    merged.save_pretrained(merged_dir)
    return {"loss": loss.item(), "gradients": gradients, "merged": merged.state_dict()}


if __name__ == "__main__":
    model, adapter, result = map(Path, sys.argv[1:4])
    is_quantized = sys.argv[4:] == ["nf4"]
    torch.save(compute(model, adapter, result.with_suffix(""), is_quantized), result)
