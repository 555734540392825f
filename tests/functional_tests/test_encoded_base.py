"""Adapters on a base model in nf4 train as on its decoded copy, at every layout."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.options import WriteOptions
from megatron.training.adapters.base_encodings import ENCODINGS
from tests.support.lora_runs import LORA, TRAINING, WIDE_SHAPE, write_wide_model
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, get_losses, train, whole

# Without the larger epsilon, the sign of gradients close to zero would decide on updates.
FLAGS = f"{WIDE_SHAPE} {TRAINING} {LORA} --adam-eps 1e-4 "
NF4 = f"{FLAGS} --lora-base-encoding nf4 "
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2": DISTRIBUTED_OPTIMIZER,
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}

SLOW_LAYOUTS = ("tp2", "dp2", "recompute")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the directories of a model of transformers, and of its copy decoded from nf4."""
    directory = tmp_path_factory.mktemp("models")
    write_wide_model(directory / "base")
    write_wide_model(directory / "decoded", decode_copy)
    return directory


def decode_copy(values):
    """Return the values after encoding in nf4."""
    return ENCODINGS["nf4"].encode(values).decode(torch.float32)


@pytest.fixture(scope="module")
def saved(pool, models):
    """Return the outcome of a run on the encoded base model with checkpoints every 2 iterations."""
    flags = f"{NF4} --pretrained-checkpoint {models / 'base'} --save {models / 'run'}"
    return pool.run(train, 1, f"{flags} --save-interval 2 --save-hf {models / 'adapter'}", "")


def assert_same_adapters(outcomes, expected, **tolerances):
    expected_tensors = whole(expected)
    tensors = whole(outcomes)
    assert tensors.keys() == expected_tensors.keys()
    for key, tensor in tensors.items():
        assert ".lora_" in key
        torch.testing.assert_close(tensor, expected_tensors[key], **tolerances, msg=key)


def test_losses_and_adapters_are_those_of_the_decoded_copy(pool, models, saved):
    """Compare bitwise."""
    flags = f"{FLAGS} --pretrained-checkpoint {models / 'decoded'}"
    expected = pool.run(train, 1, flags, "")
    assert get_losses(saved) == get_losses(expected)
    assert_same_adapters(saved, expected, atol=0, rtol=0)
    original = pool.run(train, 1, f"{FLAGS} --pretrained-checkpoint {models / 'base'}", "")
    assert get_losses(saved) != get_losses(original)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2_sp",
        "pp2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS),
    ],
)
def test_layouts_train_the_same_adapters(pool, models, saved, layout):
    flags = f"{NF4} --pretrained-checkpoint {models / 'base'} {LAYOUTS[layout]}"
    outcomes = pool.run(train, 2, flags, "")
    assert get_losses(outcomes) == pytest.approx(get_losses(saved), abs=1e-5)
    assert_same_adapters(outcomes, saved, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["", "tp2_sp"])
def test_resume_encodes_the_base_model_again(pool, models, saved, tmp_path, layout):
    """Bitwise at the same layout; the identity of the base model does not depend on the layout."""
    shutil.copytree(models / "run/iter_0000002", tmp_path / "run/iter_0000002")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("2")
    flags = f"{NF4} --load {tmp_path / 'run'} {LAYOUTS.get(layout, '')}"
    losses = get_losses(pool.run(train, 2 if layout else 1, flags, ""))

    if layout:
        assert losses == pytest.approx(get_losses(saved)[2:], abs=1e-5)
    else:
        assert losses == get_losses(saved)[2:]


def test_another_encoding_is_an_error(pool, models, saved):
    with pytest.raises(ValueError, match="--lora-base-encoding: nf4 in the checkpoint, None now"):
        pool.run(train, 1, f"{FLAGS} --load {models / 'run'}", "")


def write_bitsandbytes(source, directory):
    """Write a model in nf4 with double quantization, whose scales are not bf16 numbers."""
    shutil.copytree(source, directory)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config_file.write_text(json.dumps(config))

    model_file = directory / "model.safetensors"
    tensors = {}
    for name, values in load_file(model_file).items():
        if name.endswith("_proj.weight"):
            tensors |= encode_for_bitsandbytes(name, values)
        else:
            tensors[name] = values

    save_file(tensors, model_file, {"format": "pt"})


def encode_for_bitsandbytes(name, values):
    """Return the stored tensors of a weight."""
    encoding = ENCODINGS["nf4"]
    weight = encoding.encode(values)
    num_blocks = weight.scales.numel()
    codes = torch.arange(num_blocks) * 7 % 256
    num_nested_blocks = -(-num_blocks // 256)
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(values.shape),
        "nested_blocksize": 256,
        "nested_offset": 0.15,
    }
    content = json.dumps(state).encode()
    return {
        name: weight.packed.view(-1, 1),
        f"{name}.absmax": codes.byte(),
        f"{name}.quant_map": torch.tensor(encoding.values),
        f"{name}.nested_absmax": torch.full((num_nested_blocks,), 0.0377),
        f"{name}.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(content)).byte(),
    }


@pytest.mark.parametrize(
    ("encoding", "method", "layout"),
    [
        ("nf4", "bitsandbytes", ""),
        ("fp8", "fp8-block", "tp2_sp"),
        pytest.param("fp8", "fp8-channel", "", marks=pytest.mark.slow),
    ],
)
def test_quantized_base_keeps_its_encoding(pool, models, tmp_path, encoding, method, layout):
    """Losses are those of the decoded copy, bitwise, which encoding again would change."""
    quantized = tmp_path / "quantized"
    if method == "bitsandbytes":
        write_bitsandbytes(models / "base", quantized)
    else:
        options = WriteOptions(dtype="bf16", quantization=method)
        convert(models / "base", quantized, "hf", options=options)

    convert(quantized, tmp_path / "decoded", "hf", options=WriteOptions(dtype="bf16"))
    decoded = tmp_path / "decoded"
    keep = f"--lora-base-encoding {encoding}"
    losses = []
    for base, encoding_flags in ((quantized, keep), (decoded, ""), (decoded, keep)):
        flags = f"{FLAGS} --bf16 --pretrained-checkpoint {base} {encoding_flags}"
        flags = f"{flags} {LAYOUTS.get(layout, '')}"
        outcomes = pool.run(train, 2 if layout else 1, flags, "")
        losses.append(get_losses(outcomes))

    kept, expected, encoded_again = losses
    assert kept == expected
    assert encoded_again != expected
