"""--save-hf-interval: models next to checkpoints are those that convert.py makes of them."""

import os
import re
from unittest import mock

import pytest

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.core import object_storage
from megatron.core.dist_checkpointing import CheckpointDirectory
from megatron.core.object_path import path_of
from tests.support.object_server import FaultyProxy, object_server
from tests.support.training_harness import (
    COMMON,
    DISTRIBUTED_OPTIMIZER,
    GPT2,
    LAYOUTS,
    LLAMA,
    train,
)
from tests.unit_tests.conversion.convert_tool import run_convert

RUN = "--mock-data --train-iters 4 --global-batch-size 4 --save-interval 1 --save-hf-interval 2 "
MOE = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
EP2 = (2, f"--expert-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}")
TP2_ZERO = (4, f"--tensor-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}")


def launch(pool, layout, flags, root):
    world_size, layout_flags = layout
    directories = f"--save {root / 'run'} --save-hf {root / 'hf'}"
    return pool.run(train, world_size, f"{RUN} {layout_flags} {flags} {directories}")


def list_names(root):
    return sorted(path.name for path in root.iterdir())


def read_files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def check_exports(root, iterations, options=None):
    """Each export is, byte by byte, the conversion of the checkpoint of its iteration."""
    assert list_names(root / "hf") == [f"iter_{iteration:07d}" for iteration in iterations]
    for iteration in iterations:
        expected = root / f"converted{iteration}"
        convert(root / "run", expected, "hf", step=iteration, options=options)
        exported = read_files(root / "hf" / f"iter_{iteration:07d}")
        assert exported.keys() == read_files(expected).keys()
        for name, content in read_files(expected).items():
            assert exported[name] == content, name


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (LAYOUTS["tp2_pp2"], f"{LLAMA} --bf16 --async-save"),
        (LAYOUTS["dp2_distributed_optimizer"], f"{LLAMA} --bf16 --async-save"),
        (EP2, f"{MOE} --bf16 --async-save"),
        (TP2_ZERO, LLAMA),
        (LAYOUTS["tp2_pp2"], f"{GPT2} --async-save"),
    ],
    ids=["tp2_pp2", "zero", "ep2", "tp2_zero_fp32_synchronous", "gpt2_tp2_pp2"],
)
def test_exports_equal_conversions(pool, tmp_path, layout, flags):
    launch(pool, layout, flags, tmp_path)
    check_exports(tmp_path, [2, 4])


def test_end_of_the_run_is_exported(pool, tmp_path):
    flags = f"{LLAMA} --bf16 --async-save --train-iters 3 --save-hf-keep-last 1"
    launch(pool, LAYOUTS["dp2"], flags, tmp_path)
    check_exports(tmp_path, [3])


@pytest.mark.parametrize("iteration", [2, 4])
def test_export_lost_between_commit_and_export_is_reported(launcher, tmp_path, iteration):
    """No later launch would train iteration 4, the last one."""
    directories = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-hf {tmp_path / 'hf'}"
    flags = f"{COMMON}{RUN}{LLAMA} --num-layers 1 --lr-decay-iters 8 --save-hf-dtype bf16 "
    flags += directories
    launcher.run(1, f"{flags} --train-iters {iteration}")
    # A kill after the commit of the checkpoint leaves this state.
    export = tmp_path / "hf" / f"iter_{iteration:07d}"
    expected = read_files(export)
    export.rename(tmp_path / "hf" / f".{export.name}.converting")
    job = launcher.run(1, flags)
    assert f"was saved without its export {export}" in job.output()
    command = re.search(r"To make it: python (\S+) (.*)", job.output())
    assert command[1] == "tools/checkpoint/convert.py"
    converted = run_convert(*command[2].split())
    assert converted.returncode == 0, converted.stderr
    assert read_files(export) == expected
    assert "without its export" not in launcher.run(1, flags).output()


def test_weights_are_cast(pool, tmp_path):
    """The shards of an fp32 run are cast one by one."""
    flags = f"{LLAMA} --async-save --save-hf-dtype bf16"
    launch(pool, TP2_ZERO, flags, tmp_path)
    check_exports(tmp_path, [2, 4], WriteOptions(dtype="bf16"))


def test_final_model_is_quantized(pool, tmp_path):
    flags = f"{LLAMA} --save {tmp_path / 'run'} --save-hf {tmp_path / 'hf'}"
    run = "--mock-data --train-iters 4 --save-hf-dtype fp8-block"
    pool.run(train, 2, f"{run} --tensor-model-parallel-size 2 {flags}")
    convert(
        tmp_path / "run",
        tmp_path / "expected",
        "hf",
        options=WriteOptions(quantization="fp8-block"),
    )
    assert read_files(tmp_path / "hf") == read_files(tmp_path / "expected")


def test_local_checkpoints_are_exported_when_they_are_copied(pool, tmp_path):
    local = (
        "--non-persistent-ckpt-type local --non-persistent-save-interval 1 "
        f"--non-persistent-local-ckpt-dir {tmp_path / 'local'}"
    )
    launch(pool, LAYOUTS["dp2_distributed_optimizer"], f"{LLAMA} --async-save {local}", tmp_path)
    check_exports(tmp_path, [2, 4])


def test_full_disk_does_not_fail_the_checkpoint(pool, tmp_path, disk):
    """The run goes on, and its checkpoints are complete."""
    disk.mount("size=64k")
    run = f"{RUN} {LLAMA} --async-save --exit-on-save-failure"
    flags = f"--save {tmp_path / 'run'} --save-hf {disk.path / 'hf'}"
    outcomes = pool.run(train, 2, f"{run} {flags}")
    assert outcomes[0].iteration == 4
    assert list_names(disk.path / "hf") == []
    for iteration in (2, 4):
        open_checkpoint(tmp_path / "run", step=iteration)


def test_exports_are_quantized(pool, tmp_path):
    """No rank has whole blocks, so the committed checkpoints are converted.

    The leftovers of a killed conversion are removed.
    """
    (tmp_path / "hf/.iter_0000001.converting").mkdir(parents=True)
    flags = f"{LLAMA} --bf16 --async-save --save-hf-dtype fp8-block --save-hf-keep-last 1"
    launch(pool, TP2_ZERO, flags, tmp_path)
    check_exports(tmp_path, [4], WriteOptions(quantization="fp8-block"))


@pytest.fixture
def bucket():
    """A prefix in object storage, and the environment in which it exists."""
    with object_server():
        names = [name for name in os.environ if name.startswith("AWS_")]
        yield path_of("s3://bucket"), {name: os.environ[name] for name in names}
    object_storage.open_store.cache_clear()


def train_with(rank, world_size, flags, environment):
    with mock.patch.dict(os.environ, environment):
        object_storage.open_store.cache_clear()
        return train(rank, world_size, flags)


@pytest.mark.parametrize("save_to_bucket", [False, True], ids=["save_to_disk", "save_to_bucket"])
def test_object_storage_has_the_files_of_conversions(pool, tmp_path, bucket, save_to_bucket):
    """The leftovers of a killed export are removed, others than models are left alone."""
    root, environment = bucket
    unfinished = root / "hf/iter_0000001/model.safetensors"
    notes = root / "hf/notes/readme.txt"
    unfinished.store.put(unfinished.key, b"half")
    notes.store.put(notes.key, b"mine")
    save = root / "run" if save_to_bucket else tmp_path / "run"
    run = f"{RUN} {LLAMA} --num-layers 2 --bf16 --async-save --save-interval 2 --lr-decay-iters 40"
    run += f" {DISTRIBUTED_OPTIMIZER}"
    flags = f"{run} --save {save} --save-hf {root / 'hf'}"
    pool.run(train_with, 2, flags, environment)
    assert list_names(root / "hf") == ["iter_0000002", "iter_0000004", "notes"]
    for iteration in (2, 4):
        expected = tmp_path / f"converted{iteration}"
        convert(CheckpointDirectory(save).path(iteration), expected, "hf")
        assert read_files(root / f"hf/iter_{iteration:07d}") == read_files(expected)

    # A longer run replaces nothing, and keeps the last two.
    more = f"--load {save} --train-iters 6 --save-hf-keep-last 2"
    pool.run(train_with, 2, f"{flags} {more}", environment)
    assert list_names(root / "hf") == ["iter_0000004", "iter_0000006", "notes"]


def test_outage_of_object_storage_does_not_fail_the_checkpoint(pool, tmp_path, bucket):
    """The second export fails, with a warning; the run continues."""
    root, environment = bucket

    def fault(method, path, headers):
        return "refuse" if "iter_0000002" in path and method in ("PUT", "POST") else None

    with FaultyProxy(environment["AWS_ENDPOINT_URL"], fault) as proxy:
        environment |= {"AWS_ENDPOINT_URL": proxy.url, "MEGATRON_STORAGE_DEADLINE": "0.3"}
        flags = f"{RUN} {LLAMA} --async-save --exit-on-save-failure --save {tmp_path / 'run'}"
        outcomes = pool.run(train_with, 2, f"{flags} --save-hf {root / 'hf'}", environment)
    assert outcomes[0].iteration == 4
    assert list_names(root / "hf") == ["iter_0000004"]
    open_checkpoint(tmp_path / "run", step=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--save-hf-interval 2",
            "--save-hf-interval 2 requires --save and --save-hf and --save-interval: models are saved",
        ),
        (
            "--save-hf-interval 3 --save-interval 2 --save x --save-hf y",
            "is not a multiple of --save-interval 2",
        ),
        (
            "--save-hf-interval 2 --save-interval 2 --save x --save-hf x/",
            "is the directory of --save",
        ),
        ("--save-hf-keep-last 2", "requires --save-hf-interval"),
        ("--save-hf-dtype bf16", "--save-hf-dtype bf16 requires --save-hf"),
        (
            f"{GPT2} --save-hf y --save-hf-dtype fp8-block",
            "--quantize: .* is stored transposed or packed",
        ),
        ("--bf16 --save-hf y --save-hf-dtype fp16", "which would be rounded twice"),
        (
            "--save x --save-interval 2 --save-hf s3://bucket/hf",
            "models in object storage are converted from checkpoints: give --save-hf-interval",
        ),
    ],
)
def test_impossible_flags_are_rejected(pool, tmp_path, monkeypatch, flags, message):
    model = "" if GPT2 in flags else LLAMA
    with pytest.raises(ValueError, match=message):
        pool.run(train, 1, f"--mock-data --train-iters 4 {model} {flags}")
