"""Comparison of checkpoints of NeMo with the models that they were written from."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from tests.support.compare import read_all

# Modules of local layers -> keys in checkpoints, which are those of Transformer Engine
KEYS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def check_nemo(path: Path, work: Path) -> None:
    """Compare tensors, bitwise, and the logits of an export with those in the file `*.npz`."""
    expected = {}
    arrays = dict(np.load(path.with_suffix(".npz")))
    keys = dict(KEYS)
    if any(".mlp.router." in key for key in arrays):
        keys.pop(".pre_mlp_layernorm.")  # Transformer Engine fuses it with a dense MLP only.
    for key, value in arrays.items():
        for module, prefix in keys.items():
            key = key.replace(module, prefix)
        expected[key] = torch.from_numpy(value)
    tokens = expected.pop("tokens")
    logits = expected.pop("logits")
    tensors = read_all(open_checkpoint(path))
    # Main parameters in fp32 are the weights.
    for key in [key for key in tensors if key.startswith("optimizer.state.param.")]:
        expected[key] = expected[key.removeprefix("optimizer.state.param.")]
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensors[key], tensor), key

    convert(path, work / "hf", "hf")
    model = AutoModelForCausalLM.from_pretrained(work / "hf", dtype=torch.float32)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-5)
