"""Write LoRA adapters with peft, and the models that it merges them into.

    python peft_adapters.py trials WORK COUNT
    python peft_adapters.py golden tests/golden

Runs in an environment with peft and transformers, without this project. A trial is a directory with
`base`, `adapter` and `merged`. The golden adapters are for the models in `tests/golden/hf`.
"""

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2 = {
    "vocab_size": 67,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Configuration, linear layers, embedding and output layer.
MODELS: dict[str, tuple[Any, tuple[str, ...], str, str]] = {
    "llama": (transformers.LlamaConfig(**SIZES), LINEAR, "embed_tokens", "lm_head"),
    "llama with biases": (
        transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        LINEAR,
        "embed_tokens",
        "lm_head",
    ),
    "tied llama": (
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        LINEAR,
        "embed_tokens",
        "lm_head",
    ),
    "phi3": (
        transformers.Phi3Config(**SIZES),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        "embed_tokens",
        "lm_head",
    ),
    "gpt2": (transformers.GPT2Config(**GPT2), ("c_attn", "c_fc", "c_proj"), "wte", "lm_head"),
    "mixtral": (
        transformers.MixtralConfig(**EXPERTS),
        ("q_proj", "v_proj"),
        "embed_tokens",
        "lm_head",
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20
        ),
        ("q_proj", "o_proj"),
        "embed_tokens",
        "lm_head",
    ),
    "gpt_oss": (
        transformers.GptOssConfig(
            **(EXPERTS | {"intermediate_size": 32}),
            head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
        ),
        ("q_proj", "o_proj"),
        "embed_tokens",
        "lm_head",
    ),
}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
WITH_BIASES = ("llama with biases", "gpt2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- Trials ----


def draw_options(name: str, rng: random.Random) -> dict[str, Any]:
    """Return random options of an adapter."""
    _, linear, embedding, head = MODELS[name]
    options: dict[str, Any] = {
        "r": rng.choice([1, 2, 3, 8]),
        "lora_alpha": rng.choice([0.5, 1, 4, 16, 32]),
        "task_type": "CAUSAL_LM",
        "use_rslora": rng.random() < 0.4,
    }
    targets = rng.sample(linear, rng.randint(1, len(linear)))

    # Experts, or variants that parameters do not have.
    if name in WITH_EXPERTS and rng.random() < 0.7:
        options["target_parameters"] = rng.choice(
            [["experts.gate_up_proj", "experts.down_proj"], ["mlp.experts.down_proj"]]
        )
    elif rng.random() < 0.3:
        options["use_dora"] = True
    elif name in WITH_BIASES and rng.random() < 0.3:
        options["lora_bias"] = True

    # Embedding and output layer.
    choice = rng.random()
    if choice < 0.2 and not options.get("lora_bias"):
        targets += rng.sample([embedding, head], rng.randint(1, 2))
    elif choice < 0.4:
        options["modules_to_save"] = rng.choice([[embedding], [head], [embedding, head]])
        options["ensure_weight_tying"] = rng.random() < 0.5
    elif choice < 0.6:
        options["trainable_token_indices"] = rng.choice([[1, 5, 66], {embedding: [3, 2]}])
    options["target_modules"] = targets

    # peft sorts patterns when it saves them, and applies the first that matches: give one.
    if rng.random() < 0.3:
        options["rank_pattern"] = {rng.choice([*linear, r"\.1\..*"]): 5}
    if rng.random() < 0.3:
        options["alpha_pattern"] = {rng.choice([*linear, r"\.1\..*_proj"]): 7}
    if rng.random() < 0.3:
        options["bias"] = rng.choice(["all", "lora_only"])
    return options


def fill(model: Any, generator: torch.Generator) -> None:
    """Draw all parameters that are trained at random."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                values = 0.3 * torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    values = values.abs() + 0.5
                parameter.copy_(values)


def load(directory: Path, dtype: torch.dtype, is_separated: bool) -> Any:
    """Return a model, with an output layer of its own if `is_separated`, as peft recommends."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    if is_separated and model.config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, tie_word_embeddings=False
        )
        model.get_output_embeddings().weight.data = embedding.detach().clone()
    return model


def merge(base: Path, adapter: Path, dtype: torch.dtype, is_separated: bool) -> Any:
    model = load(base, dtype, is_separated)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def write_trial(seed: int, work: Path) -> None:
    """Write a random base model and adapter, and the merged model."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    name = rng.choice(list(MODELS))
    dtype = rng.choice(DTYPES)
    config, _, embedding, head = MODELS[name]
    model = AutoModelForCausalLM.from_config(config)
    fill(model, generator)
    model.to(dtype).save_pretrained(work / "base")

    options = draw_options(name, rng)
    print(seed, name, dtype, options, flush=True)
    model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=dtype)
    adapted = get_peft_model(model, LoraConfig(**options))
    fill(adapted, generator)
    if rng.random() < 0.3:  # trained in 16 bits
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.data = parameter.data.to(torch.bfloat16)
    adapted.save_pretrained(work / "adapter", safe_serialization=rng.random() < 0.7)

    is_separated = not {embedding, head}.isdisjoint(options["target_modules"])
    merge(work / "base", work / "adapter", dtype, is_separated).save_pretrained(work / "merged")


# ---- Golden adapters ----

# Options, dtype of the base model, and whether the file is a pickle of torch.
GOLDEN: dict[str, tuple[dict[str, Any], torch.dtype, bool]] = {
    "llama_patterns": (
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "layers_to_transform": [0],
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {r"layers\.0\..*\.down_proj": 9},
            "trainable_token_indices": [5, 258],
        },
        torch.bfloat16,
        False,
    ),
    "llama_dora": (
        {
            "r": 2,
            "lora_alpha": 6,
            "use_dora": True,
            "target_modules": r".*embed_tokens|.*layers\.0\.self_attn\.k_proj",
        },
        torch.bfloat16,
        False,
    ),
    "gpt2_biases": (
        {
            "r": 4,
            "lora_alpha": 4,
            "lora_bias": True,
            "bias": "lora_only",
            "fan_in_fan_out": True,
            "target_modules": ["attn.c_proj", "c_attn"],
            "layers_to_transform": [0],
        },
        torch.bfloat16,
        True,
    ),
    "gpt2_dora": (
        {
            "r": 2,
            "lora_alpha": 3,
            "use_dora": True,
            "fan_in_fan_out": True,
            "target_modules": ["attn.c_proj"],
            "layers_to_transform": [0],
        },
        torch.float32,
        False,
    ),
    "qwen2_saved": (
        {
            "r": 1,
            "lora_alpha": 2,
            "target_modules": ["o_proj"],
            "layers_to_transform": [0],
            "modules_to_save": ["embed_tokens"],
        },
        torch.bfloat16,
        False,
    ),
    "gpt_oss_experts": (
        {
            "r": 2,
            "lora_alpha": 5,
            "target_modules": ["o_proj"],
            "layers_to_transform": [0],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
        torch.bfloat16,
        False,
    ),
}


def write_golden(golden: Path) -> None:
    """Write the golden adapters, and the tensors that merging them changes."""
    for name, (options, dtype, is_pickle) in GOLDEN.items():
        base = golden / "hf" / name.rpartition("_")[0]
        directory = golden / "peft" / name
        shutil.rmtree(directory, ignore_errors=True)
        generator = torch.Generator().manual_seed(1)
        model = load(base, dtype, is_separated=False)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        fill(adapted, generator)
        adapted.save_pretrained(directory, safe_serialization=not is_pickle)
        (directory / "README.md").unlink()

        merged = merge(base, directory, dtype, is_separated="embed_tokens" in str(options))
        changed = {}
        for key, value in merged.state_dict().items():
            # Parameters of experts are trained in all layers; those of one are enough.
            is_repeated = ".layers.1." in key
            if not is_repeated and not torch.equal(value.to(dtype), before[key]):
                changed[key] = value.to(dtype).contiguous()
        save_file(changed, directory / "merged.safetensors", {"format": "pt"})
        print(name, *changed)


def main() -> None:
    command, directory = sys.argv[1], Path(sys.argv[2])
    if command == "golden":
        write_golden(directory)
        return
    for seed in range(int(sys.argv[3])):
        write_trial(seed, directory / str(seed))


if __name__ == "__main__":
    main()
