"""Adapters train on a frozen base model with the same result at every layout."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.options import EditOptions, WriteOptions
from tests.support.lora_runs import FLAGS, LORA, MODEL, SHAPE, TRAINING
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, get_losses, train, whole

BASE = f"--pretrained-checkpoint {MODEL} "
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2": DISTRIBUTED_OPTIMIZER,
    "cp2": "--context-parallel-size 2",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Return the directory of a run of 4 iterations with checkpoints every 2, and its outcome."""
    directory = tmp_path_factory.mktemp("adapters")
    flags = f"{FLAGS} {BASE} --save {directory / 'run'} --save-interval 2 "
    outcomes = pool.run(train, 1, f"{flags} --save-hf {directory / 'adapter'}", "")
    return directory, outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_the_same_adapters(pool, saved, layout):
    _, expected = saved
    outcomes = pool.run(train, 2, f"{FLAGS} {BASE} {LAYOUTS[layout]}", "")
    assert_same(outcomes, expected)


def assert_same(outcomes, expected):
    assert get_losses(outcomes) == pytest.approx(get_losses(expected), abs=1e-5)
    expected_tensors = whole(expected)
    tensors = whole(outcomes)
    assert tensors.keys() == expected_tensors.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected_tensors[key], atol=1e-5, rtol=1e-4, msg=key)


def test_only_adapters_are_trained_and_saved(saved):
    directory, outcomes = saved
    losses = get_losses(outcomes)
    assert losses[3] < losses[0]
    for key in whole(outcomes):
        assert ".lora_" in key

    checkpoint = directory / "run" / "iter_0000004"
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    base_size = (MODEL / "model.safetensors").stat().st_size
    assert size < base_size


@pytest.mark.parametrize("layout", ["", "tp2_sp", "pp2", "dp2"])
def test_resume_at_another_layout(pool, saved, tmp_path, layout):
    """The optimizer state is loaded, too; bitwise at the same layout. The base model is read again
    from the path in the checkpoint.
    """
    directory, expected = saved
    expected_losses = get_losses(expected)[2:]
    run = tmp_path / "run"
    shutil.copytree(directory / "run/iter_0000002", run / "iter_0000002")
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    flags = f"{FLAGS} --load {run} {LAYOUTS.get(layout, '')}"
    losses = get_losses(pool.run(train, 2 if layout else 1, flags, ""))

    if layout:
        assert losses == pytest.approx(expected_losses, abs=1e-5)
    else:
        assert losses == expected_losses


def test_another_base_model_is_an_error(pool, saved, tmp_path):
    directory, _ = saved
    base = tmp_path / "base"
    shutil.copytree(MODEL, base)
    path = base / "model.safetensors"
    tensors = load_file(path)
    flags = f"{FLAGS} --load {directory / 'run'} --pretrained-checkpoint {base} "

    # The same values in another file are the same model.
    save_file(tensors, path, {"format": "pt"})
    outcomes = pool.run(train, 1, f"{flags} --train-iters 5", "")
    assert len(get_losses(outcomes)) == 1

    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{tmp_path}/base is another base model"):
        pool.run(train, 1, flags, "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{LORA} --lora-alpha 16 --load RUN", "--lora-alpha: 8.0 in the checkpoint, 16.0 now"),
        (f"{LORA} --lora-targets q_proj --load RUN", "contains other adapters: --lora-targets"),
        ("--load RUN", "contains adapters, not a model: train them .* --lora-rank 4"),
        (f"{LORA} --load EMPTY", "without a base model"),
        (f"{LORA} --lora-targets linear_qkv router {BASE}", "--lora-targets router: no layer has"),
    ],
)
def test_wrong_launches_are_errors(pool, saved, tmp_path, flags, message):
    directory, _ = saved
    flags = flags.replace("RUN", str(directory / "run"))
    flags = flags.replace("EMPTY", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        pool.run(train, 1, f"{SHAPE} {TRAINING} {flags}", "")


def test_dora_trains_the_same_at_every_layout_and_is_exported(pool, tmp_path):
    flags = f"{FLAGS} {BASE} --lora-dora"
    expected = pool.run(train, 1, flags, "")
    output = f"--save {tmp_path / 'run'} --save-hf {tmp_path / 'adapter'}"
    outcomes = pool.run(train, 2, f"{flags} {output} {LAYOUTS['tp2_sp']}", "")
    assert_same(outcomes, expected)
    assert_same_merged(pool, tmp_path, f"{LORA} --lora-dora")


def test_training_starts_from_files_of_peft(pool, saved, tmp_path):
    """The loss is that of the run that wrote them, at any layout; the files survive a round trip."""
    directory, _ = saved
    once = f"{SHAPE} {TRAINING} --finetune --train-iters 1 "
    expected = pool.run(train, 1, f"{once} --load {directory / 'run'} {LORA}", "")
    flags = f"{once} {LORA} --load {MODEL} --lora-load {directory / 'adapter'} "
    for layout in ("", LAYOUTS["tp2_sp"], LAYOUTS["pp2"]):
        outcomes = pool.run(train, 2 if layout else 1, f"{flags} {layout}", "")
        assert get_losses(outcomes) == pytest.approx(get_losses(expected), abs=1e-6)

    pool.run(train, 1, f"{flags} --lr 0 --save-hf {tmp_path / 'adapter'}", "")
    original = load_file(directory / "adapter/adapter_model.safetensors")
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")

    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-rank 2", "has rank 4, not 2: give --lora-rank 4"),
        ("--lora-rank 4", "scale of .* is 2, not 1: give --lora-alpha 8"),
        (f"{LORA} --lora-dora", "use_dora differs: leave out --lora-dora"),
        (f"{LORA} --lora-targets linear_qkv", "it also adapts .*down_proj"),
    ],
)
def test_files_of_peft_must_fit_the_flags(pool, saved, flags, message):
    directory, _ = saved
    flags = f"{SHAPE} {TRAINING} {flags} {BASE} --lora-load {directory / 'adapter'} "
    with pytest.raises(ValueError, match=message):
        pool.run(train, 1, flags, "")


def assert_same_merged(pool, directory, lora):
    """Assert that the export, merged into the base model, has the losses of the run."""
    options = WriteOptions(edits=EditOptions(adapters=(directory / "adapter",)))
    convert(MODEL, directory / "merged", "hf", options=options)
    once = f"{SHAPE} {TRAINING} --finetune --train-iters 1 --load "
    adapted = pool.run(train, 1, f"{once} {directory / 'run'} {lora}", "")
    merged = pool.run(train, 1, f"{once} {directory / 'merged'}", "")
    assert get_losses(adapted) == pytest.approx(get_losses(merged), abs=1e-6)


def test_export_is_an_adapter_of_peft_for_the_base_model(pool, saved, tmp_path):
    directory, _ = saved
    fields = json.loads((directory / "adapter/adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(MODEL)

    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert fields["target_modules"] == projections
    assert_same_merged(pool, directory, LORA)

    convert(directory / "run", tmp_path / "converted", "hf")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        converted = (tmp_path / "converted" / name).read_bytes()
        exported = (directory / "adapter" / name).read_bytes()
        assert converted == exported

    with pytest.raises(ValueError, match="contains adapters, not a model: --saver hf"):
        convert(directory / "run", tmp_path / "legacy", "legacy")


def test_base_model_may_be_quantized(pool, tmp_path):
    """A base in fp8 trains the same adapters as its decoded copy, and its files refer to it."""
    quantized = tmp_path / "fp8"
    to_fp8 = WriteOptions(dtype="bf16", quantization="fp8-channel")
    convert(MODEL, quantized, "hf", options=to_fp8)
    convert(quantized, tmp_path / "decoded", "hf", options=WriteOptions(dtype="bf16"))
    outcomes = {}
    for name in ("fp8", "decoded"):
        flags = f"{FLAGS} --bf16 --pretrained-checkpoint {tmp_path / name}"
        outcomes[name] = pool.run(train, 1, f"{flags} --save-hf {tmp_path / name}-adapter", "")
    losses = get_losses(outcomes["fp8"])
    assert losses == get_losses(outcomes["decoded"])

    original = pool.run(train, 1, f"{FLAGS} --bf16 {BASE}", "")
    assert losses != get_losses(original)

    fields = json.loads((tmp_path / "fp8-adapter/adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(quantized)
