"""Adapters on a quantized base that keeps its encoding train as on its decoded copy, bitwise."""

import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.options import EditOptions, WriteOptions
from megatron.planning.run_plan import plan_run
from megatron.training.config.parsing import parse_args
from pretrain_gpt import model_provider
from tests.support.lora_runs import LORA, TRAINING, WIDE_SHAPE, write_wide_model
from tests.support.quantized_models import GROUP, write_gpt_oss, write_packed_model
from tests.support.training_harness import get_losses, train, whole

FLAGS = f"{WIDE_SHAPE} {TRAINING} {LORA} --adam-eps 1e-4 "
KEEP = "--lora-base-encoding keep"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def write_release(models, directory, method):
    """Write a quantized model, and its decoded copy; return their directories."""
    release = directory / method
    if method == "nvfp4":
        convert(models / "base", release, "hf", options=WriteOptions(quantization=method))
    else:
        write_packed_model(models / "base", release, method)
    decoded = directory / f"{method}_decoded"
    convert(release, decoded, "hf")
    return release, decoded


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    write_wide_model(directory / "base")
    return directory


def assert_same_training(pool, size, flags, release, decoded):
    """Compare losses and adapters on both models."""
    kept = pool.run(train, size, f"{flags} --pretrained-checkpoint {release} {KEEP}", "")
    expected = pool.run(train, size, f"{flags} --pretrained-checkpoint {decoded}", "")
    assert get_losses(kept) == get_losses(expected)
    expected_tensors = whole(expected)
    for key, tensor in whole(kept).items():
        assert torch.equal(tensor, expected_tensors[key]), key


@pytest.mark.parametrize(
    ("method", "size", "flags"),
    [
        ("awq", 1, ""),
        ("awq", 2, TP2),
        ("gptq", 2, f"{TP2} --bf16"),
        ("int4", 2, f"{TP2} --bf16"),
        ("nvfp4", 2, TP2),
        ("awq", 1, "--lora-dora --bf16"),
        ("int4", 2, f"{TP2} --lora-dora"),
        pytest.param("gptq", 1, "", marks=pytest.mark.slow),
        pytest.param("int4", 1, "", marks=pytest.mark.slow),
        pytest.param("nvfp4", 1, "--bf16", marks=pytest.mark.slow),
    ],
)
def test_losses_and_adapters_are_those_of_the_decoded_release(
    pool, models, tmp_path, method, size, flags
):
    release, decoded = write_release(models, tmp_path, method)
    assert_same_training(pool, size, f"{FLAGS} {flags}", release, decoded)


@pytest.mark.parametrize("size", [1, 2])
def test_experts_of_gpt_oss_keep_mxfp4(pool, tmp_path, size):
    """Experts are split over EP; attention is not quantized, and stays decoded."""
    release = tmp_path / "release"
    write_gpt_oss(release)
    convert(release, tmp_path / "decoded", "hf")
    flags = f"{TRAINING} {LORA} --bf16 --tokenizer-type NullTokenizer --seq-length 32"
    losses = []
    for base, encoding in ((release, KEEP), (tmp_path / "decoded", "")):
        layout = "" if size == 1 else "--expert-model-parallel-size 2"
        load = f"--load {base} --finetune --use-checkpoint-args"
        outcomes = pool.run(train, size, f"{flags} {load} {layout} {encoding}", "")
        losses.append(get_losses(outcomes))
    assert losses[0] == losses[1]


def test_resume_at_another_layout_and_merge(pool, models, tmp_path):
    """The adapters fit the release and its decoded copy."""
    release, decoded = write_release(models, tmp_path, "awq")
    flags = f"{FLAGS} {KEEP} --save {tmp_path / 'run'} --save-interval 2"
    saved = pool.run(train, 1, f"{flags} --pretrained-checkpoint {release}", "")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "run/iter_0000004")
    load = f"{FLAGS} {KEEP} --load {tmp_path / 'run'} --save {tmp_path / 'run'}"
    outcomes = pool.run(train, 2, f"{load} {TP2} --save-hf {tmp_path / 'adapter'}", "")
    assert get_losses(outcomes) == pytest.approx(get_losses(saved)[2:], abs=1e-5)

    convert(tmp_path / "run", tmp_path / "exported", "hf")
    merged = []
    for base, adapter in ((release, "adapter"), (decoded, "exported")):
        options = WriteOptions(edits=EditOptions(adapters=(tmp_path / adapter,)))
        convert(base, tmp_path / f"merged_{adapter}", "hf", options=options)
        merged.append(load_file(tmp_path / f"merged_{adapter}/model.safetensors"))
    assert merged[0].keys() == merged[1].keys()
    for name, tensor in merged[0].items():
        assert torch.equal(tensor, merged[1][name]), name


def test_base_without_encoding_is_an_error(pool, models):
    with pytest.raises(ValueError, match="keep: .* is not a quantized model of transformers"):
        pool.run(train, 1, f"{FLAGS} {KEEP} --pretrained-checkpoint {models / 'base'}", "")


def test_plan_counts_the_bytes_of_the_encoding(models, tmp_path):
    weights = []
    for base, encoding in zip(write_release(models, tmp_path, "awq"), (KEEP, ""), strict=True):
        flags = f"{FLAGS} --pretrained-checkpoint {base} {encoding}"
        config = parse_args(shlex.split(flags), 1)
        config.set_vocab_size(258)
        planned = plan_run(config, 1, model_provider, "cpu")
        weights.append(planned.stages[0].memory.weights)
    # Sizes of qkv, proj, fc1 and fc2 of two layers; codes, scales and zero points per weight.
    num_weights = 2 * (256 * 128 + 128 * 128 + 512 * 128 + 128 * 256)
    bytes_per_weight = 1 / 2 + 2 / GROUP + 1 / GROUP
    assert weights[1] - weights[0] == num_weights * (4 - bytes_per_weight)
