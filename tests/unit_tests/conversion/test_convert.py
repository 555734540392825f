"""Conversion between all pairs of formats, a chain through all, and refused conversions."""

import functools
import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from megatron.conversion.checkpoint_conversion import WRITERS, compare, convert
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import CheckpointError, read_metadata, write_tracker
from megatron.core.run_checkpoint.formats import FORMATS as READABLE
from megatron.core.run_checkpoint.keys import TRAINING_FOLDERS
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, random_source
from tests.unit_tests.core.dist_checkpointing.test_integrity import with_older_checksums

FORMATS = list(WRITERS)
LAYOUT = WriteOptions(tensor_parallel=2, pipeline_parallel=2, optim_sidecar=True)


def first_checkpoint(root: Path, args=LLAMA_ARGS, **changes):
    source = random_source({**args, **changes})
    source.args |= {
        "make_vocab_size_divisible_by": 8,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    write_torch_dist(source, root / "iter_0000007")
    write_tracker(root, 7)
    return source


@pytest.fixture(scope="module")
def convert_model(tmp_path_factory):
    """Return the function that returns a model and its checkpoint in a format."""

    @functools.cache
    def convert_model(model, form):
        directory = tmp_path_factory.mktemp("first")
        source = first_checkpoint(directory / "run", CONVERTED_MODELS[model])
        options = WriteOptions(optim_sidecar=True)
        convert(directory / "run", directory / form, form, options=options)
        return source, directory / form

    return convert_model


CONVERTED_MODELS = {"llama": LLAMA_ARGS, "gpt2": GPT_ARGS}


def list_pairs():
    """Return (model, source, target): all of Llama, and each format once in each role of GPT-2."""
    pairs = []
    for model, first, second in itertools.product(CONVERTED_MODELS, FORMATS, FORMATS):
        is_next = FORMATS.index(second) == (FORMATS.index(first) + 1) % len(FORMATS)
        marks = [] if model == "llama" or is_next else [pytest.mark.slow]
        pairs.append(pytest.param(model, first, second, marks=marks))
    return pairs


@pytest.mark.parametrize(("model", "source_format", "target_format"), list_pairs())
def test_every_pair_of_formats_keeps_weights_and_optimizer(
    tmp_path, convert_model, model, source_format, target_format
):
    source, path = convert_model(model, source_format)
    outcome = convert(path, tmp_path / "b", target_format, options=LAYOUT, verify=True)
    result = open_checkpoint(tmp_path / "b")

    assert outcome.verified == compare(source, result) == len(source.tensors)
    assert result.training.iteration == 7
    assert result.training.param_groups == source.training.param_groups
    assert result.training.scheduler == source.training.scheduler


@pytest.mark.parametrize(
    ("args", "distributed"),
    [
        ({}, True),
        ({"bf16": True}, False),
        ({"optimizer": "sgd"}, False),
        ({"optimizer": "sgd", "bf16": True}, True),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param({"bf16": True}, True, marks=pytest.mark.slow),
        pytest.param({"optimizer": "sgd"}, True, marks=pytest.mark.slow),
        pytest.param({"optimizer": "sgd", "bf16": True}, False, marks=pytest.mark.slow),
    ],
)
def test_chain_through_all_formats_and_back(tmp_path, args, distributed):
    source = first_checkpoint(tmp_path / "0", use_distributed_optimizer=distributed, **args)
    for step, saver in enumerate(
        ["legacy", "universal", "hf", "torch_dist", "universal", "legacy", "hf", "torch_dist"]
    ):
        convert(
            tmp_path / f"{step}",
            tmp_path / f"{step + 1}",
            saver,
            options=LAYOUT if step % 2 else WriteOptions(optim_sidecar=True),
        )

    assert compare(source, open_checkpoint(tmp_path / "8")) == len(source.tensors)


def test_without_optimizer_and_in_another_dtype(tmp_path):
    source = first_checkpoint(tmp_path / "run")
    convert(
        tmp_path / "run",
        tmp_path / "out",
        "legacy",
        options=WriteOptions(optimizer=False, dtype="bf16"),
    )
    result = open_checkpoint(tmp_path / "out")

    assert not any(key.startswith("optimizer.") for key in result.tensors)
    assert {info.dtype for info in result.tensors.values()} == {torch.bfloat16}

    key = "decoder.layers.1.mlp.linear_fc1.weight"
    main = source.values[f"optimizer.state.param.{key}"]
    assert torch.equal(result.tensors[key].read((0, 0), tuple(main.shape)), main.bfloat16())


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("saver", FORMATS)
def test_progress_reaches_the_estimated_bytes(tmp_path, saver, sidecar):
    write_torch_dist(random_source(LLAMA_ARGS | {"bf16": True}, vocab_size=4000), tmp_path / "run")
    announced = []
    written = []
    options = WriteOptions(optim_sidecar=sidecar, workers=2)
    convert(
        tmp_path / "run",
        tmp_path / "out",
        saver,
        options=options,
        progress=written.append,
        starting=announced.append,
    )

    assert len(written) > 1
    assert len(announced) == 1
    assert abs(sum(written) - announced[0]) < 0.05 * announced[0]


def test_existing_target_requires_overwrite(tmp_path):
    first_checkpoint(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")

    with pytest.raises(ValueError, match="exists: choose another --save-dir, or give --overwrite"):
        convert(tmp_path / "run", tmp_path / "out", "hf")
    assert (tmp_path / "out/precious").exists()

    convert(tmp_path / "run", tmp_path / "out", "hf", overwrite=True)
    assert not (tmp_path / "out/precious").exists()
    assert (tmp_path / "out/config.json").exists()
    with pytest.raises(ValueError, match="is or contains the source"):
        convert(tmp_path / "run", tmp_path / "run", "legacy", overwrite=True)


@pytest.mark.parametrize("saver", FORMATS)
def test_interrupted_conversion_leaves_nothing(tmp_path, saver, monkeypatch):
    first_checkpoint(tmp_path / "run")

    def out_of_patience(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(
        (KeyboardInterrupt, CheckpointError)
    ):  # the saver's threads report the error that stopped them
        convert(tmp_path / "run", tmp_path / "out", saver, progress=out_of_patience)

    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_concurrent_conversion_to_one_target_is_refused(tmp_path):
    first_checkpoint(tmp_path / "run")
    refused = []

    def another_one(nbytes):
        if not refused:
            with pytest.raises(
                ValueError,
                match=r"out\.converting: another conversion to the same --save-dir",
            ) as error:
                convert(tmp_path / "run", tmp_path / "out", "legacy")
            refused.append(error)

    convert(tmp_path / "run", tmp_path / "out", "hf", progress=another_one, verify=True)
    assert refused
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_invalid_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing: no such directory$"):
        convert(tmp_path / "nothing", tmp_path / "out", "hf")

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file: give the directory of a checkpoint"):
        convert(tmp_path / "file", tmp_path / "out", "hf")

    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked/model_config.yaml").write_text("")
    with pytest.raises(ValueError, match="unpacked is an unpacked archive of NeMo without model_w"):
        convert(tmp_path / "unpacked", tmp_path / "out", "hf")

    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no checkpoint in a known format .*; it is empty"):
        convert(tmp_path / "empty", tmp_path / "out", "hf")

    first_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match="--ckpt-step 3: .* complete are: iter_0000007"):
        convert(tmp_path / "run", tmp_path / "out", "hf", step=3)
    assert set(READABLE) - set(WRITERS) == {*TRAINING_FOLDERS, "deepspeed", "gguf", "nemo"}


def test_checksums_of_earlier_releases_are_verified(tmp_path):
    first_checkpoint(tmp_path / "run")
    with_older_checksums(tmp_path / "run" / "iter_0000007")
    assert (
        open_checkpoint(
            tmp_path / "run",
            read_options=ReadOptions(verify_source=True),
        ).training.iteration
        == 7
    )

    (tmp_path / "run" / "iter_0000007" / "checksums.json").unlink()

    with pytest.raises(
        ValueError,
        match=r"--ckpt-verify: .* has neither checksums.bin nor integrity.json",
    ):
        open_checkpoint(tmp_path / "run", read_options=ReadOptions(verify_source=True))


def test_damaged_source_is_refused(tmp_path):
    """Every flipped bit of tensor data stops the conversion, unless verification is
    switched off.
    """
    first_checkpoint(tmp_path / "run")
    draw = random.Random(2)
    directory = tmp_path / "run" / "iter_0000007"
    tensors = read_metadata(directory).tensors.values()
    files = {chunk.location.file for tensor in tensors for chunk in tensor.chunks}
    shards = [directory / name for name in sorted(files)]
    for _ in range(6):
        shard = draw.choice(shards)
        intact = shard.read_bytes()
        damaged = bytearray(intact)
        damaged[draw.randrange(len(intact))] ^= 1 << draw.randrange(8)
        shard.write_bytes(damaged)
        message = rf"{shard.name}: damaged: wrong checksum of bytes \d+\.\.\d+"
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "run", tmp_path / "out", "torch_dist")
        assert os.listdir(tmp_path) == ["run"]
        shard.write_bytes(intact)

    damaged = bytearray(intact)
    damaged[-1] ^= 1  # in the padding of a file
    shard.write_bytes(damaged)
    convert(tmp_path / "run", tmp_path / "out", "hf", read_options=ReadOptions(verify_source=False))


def test_wrong_loader_is_refused(tmp_path):
    first_checkpoint(tmp_path / "run")
    for loader in ("legacy", "universal"):
        with pytest.raises(
            ValueError,
            match="is not a (legacy|DeepSpeed universal) checkpoint: it has no",
        ):
            convert(tmp_path / "run" / "iter_0000007", tmp_path / "out", "hf", loader=loader)


def test_nan_values_are_compared_bitwise(tmp_path):
    source = random_source(LLAMA_ARGS, optimizer=False)
    source.values["output_layer.weight"][0, 0] = float("nan")
    write_torch_dist(source, tmp_path / "run")
    assert convert(tmp_path / "run", tmp_path / "out", "legacy", verify=True).verified == len(
        source.tensors
    )


@pytest.mark.parametrize(
    "groups,distributed",
    [(None, True), (None, False), ([1.0], False), ([1.0, 1.0, 0.0], False)],
)
def test_legacy_refuses_unsupported_parameter_groups(tmp_path, groups, distributed):
    """Missing groups, and groups other than one with and one without weight decay."""
    source = random_source(GPT_ARGS | {"use_distributed_optimizer": distributed})
    group = source.training.param_groups[0]
    source.training.param_groups = groups and [group | {"wd_mult": decay} for decay in groups]

    with pytest.raises(
        ValueError,
        match="not its parameter groups|groups of wd_mult .* legacy files have one with",
    ):
        write_legacy(source, tmp_path / "out", Layout.of(2, 1, 1))

    assert not list(tmp_path.iterdir())
