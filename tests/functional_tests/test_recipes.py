"""Recipes train a small model of the published config.json, and export it with the same fields."""

import json

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from tests import GOLDEN
from tests.support.sft_runs import write_tokenizer
from tests.support.training_harness import get_losses, train
from tests.unit_tests.test_recipes import RECIPES, launch

# A hundredth of the size, or less. The vocabulary is larger than that of the golden tokenizer.
SMALLER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 272,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "max_window_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SIZES = (
    "--train-iters 20 --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 "
    "--min-lr 5e-4 --num-workers 0 --num-threads 1 --log-interval 1 --eval-iters 0 "
    "--make-vocab-size-divisible-by 16 --save-interval 1000 --expert-model-parallel-size 1 "
    "--tensor-model-parallel-size 1"
)
NOT_EXPORTED = {"dtype", "use_cache", "transformers_version", "_name_or_path"}
# The others have the same family.
DEFAULT = ("gpt_oss_20b", "olmo2_1b", "qwen3_0_6b", "qwen3_30b_a3b", "smollm2_135m")
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in RECIPES]


def write_model(directory, name):
    """Write a random model of a smaller config.json, and return this."""
    published = json.loads((GOLDEN / f"hf_configs/{name}.json").read_text())
    fields = published | {key: value for key, value in SMALLER.items() if key in published}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:2]
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        directory
    )
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(fields))
    return fields


@pytest.mark.parametrize("name", CASES)
def test_recipe_trains_and_exports(pool, tmp_path, name):
    fields = write_model(tmp_path / "model", name)
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for start in range(40):
            builder.add((start + np.arange(100)) % 256)
    command = launch(name, "continue", 8).stdout
    for path in ("model", "data", "run"):
        command = command.replace(f"\n/{path}", f"\n{tmp_path / path}")
    flags = " ".join(command.split()[1:])
    losses = get_losses(pool.run(train, 1, f"{flags} {SIZES}", ""))
    assert losses[0] == pytest.approx(np.log(fields["vocab_size"]), rel=0.1)
    assert losses[-1] < losses[0] - 0.5
    # Fields of other programs, and those of generation and files, are not exported.
    names = AutoConfig.for_model(fields["model_type"]).to_dict().keys() - NOT_EXPORTED
    expected = AutoConfig.for_model(**fields).to_dict()
    exported = AutoConfig.from_pretrained(tmp_path / "run/model").to_dict()
    assert {name: exported[name] for name in names} == {name: expected[name] for name in names}
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
