"""Multimodal models of transformers: their language model is read, and all of them are written.

The models are random ones that transformers has saved, with every parameter changed.
"""

import copy
import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.wrapper import Wrapper
from megatron.conversion.huggingface.wrappers import WRAPPERS, find_wrapper
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.views import SourceView
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.source import Source
from megatron.core.terminal import format_size
from tests import ROOT
from tests.unit_tests.conversion.convert_tool import run_convert
from tests.unit_tests.conversion.huggingface.test_family_models import YARN, logits_of

KEEP = ReadOptions(keep_foreign=True)
TOKENS = torch.randint(0, 80, (2, 24), generator=torch.Generator().manual_seed(5))
IMAGE_TOKEN = 90

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
}
LATENT = DEEPSEEK_EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
INTERLEAVED = ROPE | {"mrope_interleaved": True}
HALF_ROPE = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
ALPHA_ROPE = ROPE | {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}

# Vision towers.
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
}
SQUARE = SMALL | {"image_size": 8}
SIGLIP = SQUARE | {"model_type": "siglip_vision_model"}
CLIP = SQUARE | {"model_type": "clip_vision_model", "patch_size": 4, "num_hidden_layers": 2}
PIXTRAL = SQUARE | {"model_type": "pixtral", "head_dim": 8}
QWEN = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2 = {k: QWEN[k] for k in ("depth", "num_heads", "patch_size")} | {"embed_dim": 16}
QWEN2 |= {"hidden_size": 32, "mlp_ratio": 2}
QWEN3 = QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
GLM = QWEN | {"image_size": 8}
OVIS = SQUARE | {"hidden_act": "silu", "vocab_size": 40, "num_visual_indicator_tokens": 5}

PERCEIVER = {
    "hidden_size": 32,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "num_key_value_heads": 1,
}
SAM = SMALL | {"image_size": 64, "patch_size": 4, "output_channels": 8, "mlp_dim": 16}
SAM |= {"global_attn_indexes": [0], "window_size": 2}
WHISPER = {"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 1}
WHISPER |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 16}

# Fields of text_config, and those outside of it.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        WINDOWS | {"query_pre_attn_scalar": 8},
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4},
    ),
    "mistral3": ({"model_type": "ministral3"}, {"vision_config": PIXTRAL}),
    "qwen2_vl": ({"rope_parameters": ROPE}, {"vision_config": QWEN2}),
    "qwen2_5_vl": (
        {"rope_parameters": ROPE},
        {"vision_config": QWEN | {"fullatt_block_indexes": [1], "window_size": 8}},
    ),
    "qwen3_vl": ({"rope_parameters": INTERLEAVED}, {"vision_config": QWEN3}),
    "qwen3_vl_moe": (EXPERTS | {"rope_parameters": INTERLEAVED}, {"vision_config": QWEN3}),
    "qwen3_5": (DELTA_NETS, {"vision_config": QWEN | {"num_position_embeddings": 16}}),
    "qwen3_5_moe": (
        DELTA_NETS | EXPERTS | {"shared_expert_intermediate_size": 12},
        {"vision_config": QWEN | {"num_position_embeddings": 16}},
    ),
    "llava": ({"model_type": "llama"}, {"vision_config": CLIP, "image_seq_length": 4}),
    "llava_next": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": CLIP, "image_grid_pinpoints": [[8, 8]]},
    ),
    "llava_onevision": (
        {"model_type": "qwen2"},
        {"vision_config": SIGLIP, "image_grid_pinpoints": [[8, 8]]},
    ),
    "internvl": (
        {"model_type": "qwen3"},
        {"vision_config": SMALL | {"image_size": [8, 8], "patch_size": [2, 2]}},
    ),
    "glm4v": ({"rope_parameters": HALF_ROPE}, {"vision_config": GLM}),
    "glm46v": (
        {"model_type": "glm4v_text", "rope_parameters": HALF_ROPE},
        {"vision_config": GLM | {"model_type": "glm4v_vision"}},
    ),
    "glm4v_moe": (DEEPSEEK_EXPERTS | {"rope_parameters": HALF_ROPE}, {"vision_config": GLM}),
    "kimi_k25": (LATENT | {"model_type": "deepseek_v3"}, {"vision_config": SMALL}),
    "hunyuan_vl": (
        {"rope_parameters": ALPHA_ROPE},
        {"vision_config": SQUARE | {"out_hidden_size": 32, "max_image_size": 16}},
    ),
    "idefics3": ({"model_type": "llama"}, {"vision_config": SQUARE, "scale_factor": 2}),
    "smolvlm": ({"model_type": "llama"}, {"vision_config": SQUARE, "scale_factor": 2}),
    "exaone4_5": (WINDOWS | {"model_type": "exaone4"}, {"vision_config": QWEN}),
    "ovis2": ({"model_type": "qwen2"}, {"vision_config": OVIS, "hidden_size": 32}),
    "llava_next_video": (
        {"model_type": "llama"},
        {"vision_config": CLIP, "image_grid_pinpoints": [[8, 8]]},
    ),
    "video_llava": ({"model_type": "llama"}, {"vision_config": CLIP}),
    "vipllava": (
        {"model_type": "llama"},
        {"vision_config": CLIP, "vision_feature_layers": [-1, -2]},
    ),
    "idefics2": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": SQUARE, "perceiver_config": PERCEIVER},
    ),
    "lighton_ocr": ({"model_type": "qwen3"}, {"vision_config": PIXTRAL}),
    "got_ocr2": ({"model_type": "qwen2"}, {"vision_config": SAM}),
    "deepseek_vl": ({"model_type": "llama"}, {"vision_config": SIGLIP}),
    "aria": (
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
        {
            "vision_config": SQUARE | {"model_type": "idefics3_vision"},
            "projector_patch_to_query_dict": {"16": 4},
        },
    ),
    "qwen2_audio": ({"model_type": "qwen2"}, {"audio_config": WHISPER}),
}
ARE_TRAINED = [name for name in MODELS if not name.startswith("qwen3_5")]


class Saved(NamedTuple):
    """A model that transformers has saved, and its logits for `TOKENS`."""

    directory: Path
    logits: torch.Tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function that saves a model of a type once."""

    @functools.cache
    def save(model_type: str) -> Saved:
        directory = tmp_path_factory.mktemp("saved") / model_type
        model = save_model(model_type, directory)
        return Saved(directory, compute_logits(model, input_ids=TOKENS))

    return save


def save_model(wrapper_type: str, directory: Path, **changed: Any) -> torch.nn.Module:
    """Save a random model with `changed` fields of its language model, and return it."""
    text, fields = MODELS[wrapper_type]
    config = transformers.AutoConfig.for_model(
        wrapper_type,
        text_config=TEXT | text | changed,
        image_token_id=IMAGE_TOKEN,
        **fields,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    if wrapper_type == "kimi_k25":  # transformers 5 saves layers under the name of those of images
        tensors = {name.replace("model.blocks", "model.layers"): tensors[name] for name in tensors}
    if wrapper_type == "qwen3_vl_moe":  # published files have transposed experts
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def load_model(directory: Path) -> torch.nn.Module:
    """Load a multimodal model, which must have exactly the tensors of its class."""
    model, report = transformers.AutoModelForMultimodalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


def compute_logits(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def count_bytes(directory: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())


def assert_same_tensors(found: Path, wanted: Path) -> None:
    before = load_file(wanted / "model.safetensors")
    after = load_file(found / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


def rename_tensors(directory: Path, renames: dict[str, str]) -> None:
    """Give tensors whose names start with a key of `renames` the prefix that is its value."""
    renamed = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        for old, new in renames.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = tensor
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})


def test_all_wrappers_are_tested() -> None:
    assert {wrapper.model_type for wrapper in WRAPPERS} == MODELS.keys()


def test_all_wrappers_are_documented() -> None:
    page = (ROOT / "docs/converting.md").read_text(encoding="utf-8")
    missing = [each.model_type for each in WRAPPERS if f"`{each.model_type}`" not in page]
    assert not missing


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.model_type)
def test_defaults_are_those_of_the_language_model(wrapper: Wrapper) -> None:
    """Wrappers with defaults of their own would need rules for them."""
    default = transformers.AutoConfig.for_model(
        wrapper.model_type, text_config={"model_type": wrapper.families[0].model_type}
    )
    assert default.text_config.model_type == wrapper.families[0].model_type
    for family in wrapper.families:
        config = transformers.AutoConfig.for_model(
            wrapper.model_type, text_config={"model_type": family.model_type}
        )
        alone = transformers.AutoConfig.for_model(family.model_type)
        assert config.text_config.to_dict() == alone.to_dict()


ANY_LANGUAGE_MODEL = {
    "smollm3": {},
    "olmo2": {},
    "phi3": {},
    "seed_oss": {},
    "exaone4": {"sliding_window": 7},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "deepseek_v3": LATENT,
    "mistral4": LATENT | {"head_dim": 16},
}


def test_other_language_models_are_read(tmp_path: Path) -> None:
    """Models of transformers that are not in `MODELS` are refused."""
    tested = {text.get("model_type") for text, _ in MODELS.values()}
    (llava,) = (wrapper for wrapper in WRAPPERS if wrapper.model_type == "llava")
    untested = {family.model_type for family in llava.families} - tested
    assert untested <= ANY_LANGUAGE_MODEL.keys()
    for model_type, fields in ANY_LANGUAGE_MODEL.items():
        directory = tmp_path / model_type
        model = save_model("llava", directory, model_type=model_type, **fields)
        expected = compute_logits(model, input_ids=TOKENS)
        actual = logits_of(open_checkpoint(directory), TOKENS)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5, msg=model_type)
        convert(directory, tmp_path / f"{model_type}-hf", "hf", read_options=KEEP)
        assert_same_tensors(tmp_path / f"{model_type}-hf", directory)


@pytest.mark.parametrize("model_type", MODELS)
def test_models_return_with_all_tensors(
    model_type: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """Text has the same logits here, and the model is the same after two conversions."""
    directory, expected = saved(model_type)
    if model_type in ARE_TRAINED:
        source = open_checkpoint(directory)
        torch.testing.assert_close(logits_of(source, TOKENS), expected, rtol=1e-4, atol=2e-5)

    convert(directory, tmp_path / "dist", "torch_dist", read_options=KEEP)
    convert(tmp_path / "dist", tmp_path / "hf", "hf", read_options=KEEP, verify=True)
    assert_same_tensors(tmp_path / "hf", directory)
    assert torch.equal(compute_logits(load_model(tmp_path / "hf"), input_ids=TOKENS), expected)

    # All fields return. Both generations of transformers find whether the head is tied.
    before = read_config(directory)
    after = read_config(tmp_path / "hf")
    if model_type == "kimi_k25":  # the files have no layers for multi-token prediction
        before["text_config"]["num_nextn_predict_layers"] = 0
    is_tied = not any("lm_head" in name for name in load_file(tmp_path / "hf/model.safetensors"))
    assert after["text_config"].pop("tie_word_embeddings") == is_tied
    assert after.pop("tie_word_embeddings") == is_tied
    for fields in (before, before["text_config"]):
        fields.pop("tie_word_embeddings", None)
    assert after == before


@pytest.mark.parametrize("model_type", ARE_TRAINED)
def test_language_model_alone_is_written(
    model_type: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, expected = saved(model_type)
    report = convert(directory, tmp_path / "hf", "hf")
    (line,) = report.not_carried
    others = count_bytes(directory) - count_bytes(tmp_path / "hf")
    assert re.fullmatch(
        rf"unused in the source: \d+ tensors \({re.escape(format_size(others))}\) of the "
        rf"{model_type} model outside of its language model, e\.g\. .+",
        line,
    )

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loading.values()), loading
    assert "vision_config" not in read_config(tmp_path / "hf")
    assert torch.equal(compute_logits(model.eval(), input_ids=TOKENS), expected)


IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(6))
# 4 x 4 patches of 2 frames with 2 x 2 pixels; 2 x 2 of them are a token.
PATCHES = torch.randn(16, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(6))
QWEN_IMAGE = {"pixel_values": PATCHES, "image_grid_thw": torch.tensor([[1, 4, 4]])}
IMAGES: dict[str, dict[str, torch.Tensor]] = {
    "gemma3": {"pixel_values": IMAGE},
    "mistral3": {"pixel_values": IMAGE, "image_sizes": torch.tensor([[8, 8]])},
    "llava": {"pixel_values": IMAGE},
    "internvl": {"pixel_values": IMAGE},
    "qwen2_5_vl": QWEN_IMAGE,
    "qwen3_vl": QWEN_IMAGE,
    "glm4v": QWEN_IMAGE,
}


@pytest.mark.parametrize("model_type", IMAGES)
def test_trained_language_model_returns_to_its_images(
    model_type: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """A run has only the language model; the other tensors come from the original directory."""
    directory, _ = saved(model_type)
    convert(directory, tmp_path / "run", "torch_dist")
    trained = TrainedSource(open_checkpoint(tmp_path / "run"))
    write_torch_dist(trained, tmp_path / "trained")
    arguments = ("--saver", "hf", "--save-dir", tmp_path / "hf", "--keep-foreign", directory)
    done = run_convert("--load-dir", tmp_path / "trained", *arguments, "--verify-target")
    assert done.returncode == 0, done.stderr
    assert "foreign, copied as it is: " in done.stdout

    # The same change in transformers.
    original = load_model(directory)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if re.search(r"language_model|lm_head", name):
                parameter.mul_(TrainedSource.FACTOR)
    tokens = TOKENS[:1].clone()
    tokens[0, 3:7] = IMAGE_TOKEN
    inputs = {"input_ids": tokens, **IMAGES[model_type]}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    if model_type == "gemma3":
        inputs["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    expected = compute_logits(original, **inputs)
    assert torch.equal(compute_logits(load_model(tmp_path / "hf"), **inputs), expected)
    shown = compute_logits(load_model(directory), **inputs)
    assert not torch.allclose(shown, expected)


class TrainedSource(SourceView):
    """A model whose weights were multiplied by a power of two, which is exact."""

    FACTOR = 0.5

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        for key, tensor in source.tensors.items():
            read = partial(self._read_trained, tensor)
            self.tensors[key] = dataclasses.replace(tensor, read=read)

    def _read_trained(self, tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
        return tensor.read(offset, shape) * self.FACTOR


@pytest.mark.parametrize(
    ("model_type", "renames"),
    [
        (
            "gemma3",
            {
                "language_model.model.": "model.language_model.",
                "vision_tower.": "model.vision_tower.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
        ),
        (
            "llava",
            {
                "language_model.lm_head.": "lm_head.",
                "language_model.model.": "model.language_model.",
                "vision_tower.": "model.vision_tower.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
        ),
        ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
    ],
)
def test_names_of_other_releases_return(
    model_type: str, renames: dict[str, str], saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, expected = saved(model_type)
    shutil.copytree(directory, tmp_path / "model")
    rename_tensors(tmp_path / "model", renames)
    torch.testing.assert_close(
        logits_of(open_checkpoint(tmp_path / "model"), TOKENS), expected, rtol=1e-4, atol=2e-5
    )
    convert(tmp_path / "model", tmp_path / "dist", "torch_dist", read_options=KEEP)
    convert(tmp_path / "dist", tmp_path / "hf", "hf", read_options=KEEP)
    assert_same_tensors(tmp_path / "hf", tmp_path / "model")
    assert torch.equal(compute_logits(load_model(tmp_path / "hf"), input_ids=TOKENS), expected)


def test_config_without_text_config_returns(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """Published models of Qwen 2.5 VL have the fields of the language model on the outside."""
    directory, expected = saved("qwen2_5_vl")
    shutil.copytree(directory, tmp_path / "model")
    config = read_config(directory)
    text = config.pop("text_config")
    del text["model_type"], text["head_dim"], text["layer_types"]
    text["rope_theta"] = text["rope_parameters"]["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": ROPE["mrope_section"]}
    del text["rope_parameters"]
    config = text | config
    config["torch_dtype"] = config.pop("dtype")
    write_config(tmp_path / "model", config)
    source = open_checkpoint(tmp_path / "model")
    torch.testing.assert_close(logits_of(source, TOKENS), expected, rtol=1e-4, atol=2e-5)
    convert(tmp_path / "model", tmp_path / "hf", "hf", read_options=KEEP, verify=True)
    assert read_config(tmp_path / "hf") == config
    assert torch.equal(compute_logits(load_model(tmp_path / "hf"), input_ids=TOKENS), expected)


def test_untransposed_experts_are_read(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """transformers 5 saves experts of Qwen 3 VL in another orientation than published files."""
    directory, expected = saved("qwen3_vl_moe")
    load_model(directory).save_pretrained(tmp_path / "model")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert load_file(directory / "model.safetensors")[name].shape == (4, 32, 24)
    assert load_file(tmp_path / "model/model.safetensors")[name].shape == (4, 24, 32)
    source = open_checkpoint(tmp_path / "model")
    torch.testing.assert_close(logits_of(source, TOKENS), expected, rtol=1e-4, atol=2e-5)
    convert(tmp_path / "model", tmp_path / "hf", "hf", read_options=KEEP)
    assert_same_tensors(tmp_path / "hf", directory)


def test_changed_fields_are_written_and_others_kept(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """A new base of the rope keeps its sections, and the dtype is that of the whole model."""
    directory, _ = saved("qwen3_vl")
    before = read_config(directory)
    options = ("--keep-foreign", "--rotary-base", 5000, "--target-vocab-size", 100)
    done = run_convert(
        *("--load-dir", directory, "--save-dir", tmp_path / "hf", "--saver", "hf"),
        *(*options, "--dtype", "bf16"),
    )
    assert done.returncode == 0, done.stderr
    after = read_config(tmp_path / "hf")
    assert after["dtype"] == "bfloat16"
    assert "torch_dtype" not in after
    text = before["text_config"] | {"vocab_size": 100, "rope_theta": 5000.0}
    text["torch_dtype"] = "bfloat16"
    del text["rope_parameters"]
    text["rope_scaling"] = INTERLEAVED | {"rope_type": "default"}
    del text["rope_scaling"]["rope_theta"]
    assert after["text_config"] == text | {"tie_word_embeddings": False}
    model = load_model(tmp_path / "hf")
    assert model.config.text_config.rope_parameters == INTERLEAVED | {"rope_theta": 5000.0}
    assert model.lm_head.weight.dtype == torch.bfloat16
    visual = "model.visual.merger.linear_fc1.weight"  # foreign tensors are copied as they are
    assert load_file(tmp_path / "hf/model.safetensors")[visual].dtype == torch.float32


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        ("qwen2_5_vl", WINDOWS | {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2_5_vl", {"rope_parameters": YARN | {"mrope_section": [1, 1, 2]}}),
        ("qwen3_vl", {"attention_bias": True}),
        ("qwen3_vl_moe", {"mlp_only_layers": [0]}),
        ("glm4v_moe", {"attention_bias": False, "n_group": 2, "n_shared_experts": 2}),
    ],
)
def test_other_language_models_of_a_family_are_read(
    model_type: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    model = save_model(model_type, tmp_path / "model", **changed)
    expected = compute_logits(model, input_ids=TOKENS)
    actual = logits_of(open_checkpoint(tmp_path / "model"), TOKENS)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
    convert(tmp_path / "model", tmp_path / "hf", "hf", read_options=KEEP)
    assert torch.equal(compute_logits(load_model(tmp_path / "hf"), input_ids=TOKENS), expected)


def test_capped_logits_are_refused(tmp_path: Path) -> None:
    """transformers' multimodal class does not cap them, unlike that of the language model."""
    save_model("gemma3", tmp_path / "model", final_logit_softcapping=2.0)
    message = r"final_logit_softcapping = 2\.0 is not supported, only None is"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "model")


def test_ignored_fields_return(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    directory, _ = saved("llava")
    shutil.copytree(directory, tmp_path / "model")
    config = read_config(directory)
    config["text_config"]["new"] = 1
    write_config(tmp_path / "model", config)
    arguments = ("--load-dir", tmp_path / "model", "--save-dir", tmp_path / "hf", "--saver", "hf")
    ignored = ("--hf-ignore-fields", "new", "--keep-foreign", "--verify-target")
    done = run_convert(*arguments, *ignored)
    assert done.returncode == 0, done.stderr
    assert read_config(tmp_path / "hf") == config


def test_quantized_weights_are_dequantized(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """The config.json of the wrapper describes the quantization of its language model."""
    directory, _ = saved("llava")
    arguments = ("--load-dir", directory, "--saver", "hf", "--save-dir", tmp_path / "text")
    done = run_convert(*arguments, "--quantize", "fp8-block")
    assert done.returncode == 0, done.stderr
    shutil.copytree(directory, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    for name, tensor in load_file(tmp_path / "text/model.safetensors").items():
        weights[f"language_model.{name}"] = tensor
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    quantization = read_config(tmp_path / "text")["quantization_config"]
    write_config(tmp_path / "model", read_config(directory) | {"quantization_config": quantization})
    actual = logits_of(open_checkpoint(tmp_path / "model"), TOKENS)
    assert torch.equal(actual, logits_of(open_checkpoint(tmp_path / "text"), TOKENS))
    assert not torch.equal(actual, logits_of(open_checkpoint(directory), TOKENS))

    convert(tmp_path / "model", tmp_path / "hf", "hf", read_options=KEEP)
    assert read_config(tmp_path / "hf") == read_config(directory)
    model = load_model(tmp_path / "hf")
    logits = compute_logits(model, input_ids=TOKENS)
    torch.testing.assert_close(logits, actual, rtol=1e-4, atol=2e-5)


def test_processor_returns_from_other_formats(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, _ = saved("gemma3")
    model = tmp_path / "model"
    shutil.copytree(directory, model)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (model / name).write_text(json.dumps({"processor_class": name}))
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = read_config(model) | {"eos_token_id": [1, 6]}
    write_config(model, config)
    convert(model, tmp_path / "dist", "torch_dist", read_options=KEEP)
    shutil.rmtree(model)
    report = convert(tmp_path / "dist", tmp_path / "hf", "hf", read_options=KEEP)
    assert report.not_carried == []
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text()) == {"processor_class": name}
    assert (tmp_path / "hf/tokenizer.json").exists()
    assert read_config(tmp_path / "hf") == config

    convert(tmp_path / "dist", tmp_path / "text", "hf")
    assert not (tmp_path / "text/processor_config.json").exists()
    assert read_config(tmp_path / "text")["eos_token_id"] == [1, 6]


def test_processor_that_is_missing_is_reported(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, _ = saved("gemma3")
    report = convert(directory, tmp_path / "hf", "hf", read_options=KEEP)
    (line,) = report.not_carried
    assert line.startswith("processor: preprocessor_config.json, processor_config.json, ")


def test_unused_tensors_of_the_language_model_are_named(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, _ = saved("llava")
    shutil.copytree(directory, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    buffer = "layers.0.self_attn.rotary_emb.inv_freq"
    weights[f"language_model.model.{buffer}"] = torch.ones(4)
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    name, line = open_checkpoint(tmp_path / "model").unused
    assert name == f"model.{buffer}"
    assert "of the llava model outside of its language model" in line
    convert(tmp_path / "model", tmp_path / "hf", "hf", read_options=KEEP)
    assert_same_tensors(tmp_path / "hf", tmp_path / "model")


def test_tied_heads(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """Both generations of transformers tie a head that is missing, and none that differs."""
    directory, _ = saved("llava")
    weights = load_file(directory / "model.safetensors")
    head = "language_model.lm_head.weight"
    embedding = weights["language_model.model.embed_tokens.weight"]
    config = read_config(directory)
    for outer, inner, stored, tied in (
        (True, False, weights[head], False),
        (None, None, weights[head], False),
        (True, True, embedding.clone(), True),
        (False, True, embedding.clone(), False),
        (True, None, None, True),
        (False, True, None, True),
    ):
        model = tmp_path / f"{outer}-{inner}-{stored is None}"
        model.mkdir()
        config["tie_word_embeddings"] = outer
        config["text_config"]["tie_word_embeddings"] = inner
        write_config(model, config)
        tensors = {name: tensor for name, tensor in weights.items() if name != head}
        if stored is not None:
            tensors[head] = stored
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        source = open_checkpoint(model, read_options=KEEP)
        assert source.args["untie_embeddings_and_output_weights"] == (not tied), model.name
    config["tie_word_embeddings"] = False
    config["text_config"]["tie_word_embeddings"] = False
    write_config(model, config)
    with pytest.raises(ValueError, match=r"the weights lack lm_head\.weight"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "mllama"},
            r"model_type 'mllama' is not supported \(cross-attention to images\); supported are "
            "gemma3, mistral3, ",
        ),
        ({"model_type": "chameleon"}, "model_type 'chameleon' is not supported; supported are "),
        ({"text_config": None}, "a llava model needs text_config"),
        ({"text_config": [1]}, "text_config is .*, but must be a dictionary"),
        (
            {"text_config": TEXT | {"model_type": "cohere2"}},
            "model_type 'cohere2' of the language model of llava is not supported; supported are "
            "llama, mistral, ",
        ),
        ({"text_config": TEXT | {"model_type": "llama", "new": 1}}, "new = 1"),
        (
            {"text_config": TEXT | {"quantization_config": {"quant_method": "hqq"}}},
            "quantization.*'hqq'",
        ),
    ],
)
def test_other_models_are_refused(
    changed: dict[str, Any], message: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, _ = saved("llava")
    shutil.copytree(directory, tmp_path / "model")
    write_config(tmp_path / "model", read_config(directory) | changed)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "model")


def test_names_of_kimi_in_transformers_5_are_read(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """transformers 5 gives layers of the language model the name of those for images."""
    directory, _ = saved("kimi_k25")
    load_model(directory).save_pretrained(tmp_path / "model")
    names = load_file(tmp_path / "model/model.safetensors")
    assert "language_model.model.blocks.0.input_layernorm.weight" in names
    renames = ("--rename", "language_model.model.blocks.*=language_model.model.layers.*")
    arguments = ("--load-dir", tmp_path / "model", "--save-dir", tmp_path / "hf", "--saver", "hf")
    done = run_convert(*arguments, "--keep-foreign", *renames)
    assert done.returncode == 0, done.stderr
    assert_same_tensors(tmp_path / "hf", directory)


def test_unknown_names_are_refused(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    directory, _ = saved("llava")
    shutil.copytree(directory, tmp_path / "model")
    rename_tensors(tmp_path / "model", {"language_model.model.": "llm."})
    message = (
        r"lack the embedding of the language model, language_model\.model\.embed_tokens\.weight or "
        r"model\.language_model\.embed_tokens\.weight; they have e\.g\. language_model\.lm_head"
    )
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "model")
    renames = ("--rename", "llm.*=language_model.model.*")
    arguments = ("--load-dir", tmp_path / "model", "--save-dir", tmp_path / "hf", "--saver", "hf")
    done = run_convert(*arguments, "--keep-foreign", *renames)
    assert done.returncode == 0, done.stderr
    assert_same_tensors(tmp_path / "hf", directory)


def test_models_that_the_wrapper_cannot_have_are_refused(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    directory, _ = saved("llava")
    arguments = ("--load-dir", directory, "--save-dir", tmp_path / "hf", "--saver", "hf")
    done = run_convert(*arguments, "--keep-foreign", "--rotary-interleaved")
    assert "the language model llama of a llava model has" in done.stderr
    assert "Leave out --keep-foreign to write the language model alone" in done.stderr
    done = run_convert(*arguments, "--keep-foreign", "--quantize", "fp8-block")
    assert "--quantize fp8-block is not supported for multimodal models" in done.stderr
    assert not (tmp_path / "hf").exists()


def test_checkpoints_of_other_models_are_refused(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """Tensors of a vision tower belong to one language model."""
    convert(saved("llava").directory, tmp_path / "run", "hf")
    save_model("internvl", tmp_path / "other", num_hidden_layers=1)
    arguments = ("--load-dir", tmp_path / "run", "--save-dir", tmp_path / "hf", "--saver", "hf")
    done = run_convert(*arguments, "--keep-foreign", tmp_path / "other")
    assert "num_layers = 1, but " in done.stderr
    assert "different models" in done.stderr
    done = run_convert(*arguments, "--keep-foreign", tmp_path / "run")
    assert "has no tensors that the model does not have" in done.stderr
    assert not (tmp_path / "hf").exists()


def test_recorded_prefix_is_checked(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    source = SourceView(open_checkpoint(saved("llava").directory, read_options=KEEP))
    source.args["hf_text_prefix"] = "../"
    with pytest.raises(ValueError, match="hf_text_prefix is '../', but must be a prefix of llava"):
        write_huggingface(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


# Published config.json files, without vision_config. Fields that they leave out have the defaults of
# transformers.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    },
    "llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    },
    "Ministral-3-3B-Base-2512": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_index": 10,
        "model_type": "mistral3",
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 26,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
            "tie_word_embeddings": True,
            "vocab_size": 131072,
        },
    },
    "Qwen2.5-VL-7B-Instruct": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    },
    "Qwen2.5-VL-3B-Instruct saved by transformers 4.52": {
        "attention_dropout": 0.0,
        "hidden_size": 2048,
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "text_config": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "image_token_id": None,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 128000,
            "max_window_layers": 70,
            "model_type": "qwen2_5_vl_text",
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_section": [16, 24, 24],
                "rope_type": "default",
                "type": "default",
            },
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
            "vision_token_id": 151654,
            "vocab_size": 151936,
        },
        "torch_dtype": "bfloat16",
    },
    "Qwen3-VL-30B-A3B-Instruct": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": False,
    },
    "GLM-4.5V": {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "model_type": "glm4v_moe",
        "text_config": {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338],
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "image_end_token_id": 151340,
            "image_start_token_id": 151339,
            "image_token_id": 151363,
            "initializer_range": 0.02,
            "intermediate_size": 10944,
            "max_position_embeddings": 65536,
            "model_type": "glm4v_moe_text",
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
            "rope_theta": 10000.0,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        "tie_word_embeddings": False,
    },
}
# Fields of transformers -> arguments.
COMPARED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "num_local_experts": "num_experts",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    hf = copy.deepcopy(PUBLISHED[name])
    wrapper = find_wrapper(hf)
    weights = {}
    for weight in ("embed_tokens.weight", "layers.0.input_layernorm.weight"):
        weights[wrapper.prefixes[0].body + weight] = LazyTensor((1, 1), torch.bfloat16, torch.empty)
    language_model = wrapper.find_language_model(hf, weights)
    args = language_model.family.read_config(language_model.text, {})
    config = transformers.AutoConfig.for_model(**copy.deepcopy(hf))
    expected = config.get_text_config()
    for field, argument in COMPARED.items():
        if hasattr(expected, field):
            assert args[argument] == getattr(expected, field), field
    bases = [expected.rope_parameters.get("full_attention", expected.rope_parameters)["rope_theta"]]
    assert [args["rotary_base"]] == bases
    is_tied = config.tie_word_embeddings
    assert args["untie_embeddings_and_output_weights"] == (not is_tied)

    # Nothing is added but the field that releases of transformers look for in different places.
    assert hf == PUBLISHED[name]
    written = language_model.fields
    for fields in (written, written.get("text_config", {}), hf, hf.get("text_config", {})):
        fields.pop("tie_word_embeddings", None)
    assert written == hf
