"""Main parameters: consistent with the weights, never missing, and the loss scaler next to them."""

from pathlib import Path

import pytest
import torch

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedTensor,
    load_common,
    write_tracker,
)
from megatron.core.run_checkpoint.native_reader import load_from_source
from megatron.core.run_checkpoint.source import Source
from megatron.training.checkpoint.launch import TrainingDirectory
from megatron.training.config.run_options import CheckpointConfig
from tests.support.compare import read_whole
from tests.support.memory_source import LLAMA_ARGS, MemorySource, random_source

KEY = "decoder.layers.1.mlp.linear_fc1.weight"  # 96 x 32


def defective(rows: slice) -> MemorySource:
    """Return a source with shifted rows of a main parameter, as Megatron-core can write it."""
    source = random_source(LLAMA_ARGS | {"bf16": True, "use_distributed_optimizer": True})
    main = source.values[f"optimizer.state.param.{KEY}"]
    main[rows] = main[rows].roll(64)
    return source


def write(source: Source, form: str, directory: Path) -> None:
    if form == "torch_dist":
        write_torch_dist(source, directory)
    else:
        write_legacy(source, directory, Layout.of(2, 2, 1))


@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
def test_shifted_tensor_is_refused_on_open(tmp_path: Path, form: str) -> None:
    write(defective(slice(None)), form, tmp_path / "run")
    with pytest.raises(
        CheckpointError,
        match=rf"main parameter of {KEY} at \(0, 0\) is not the stored weight",
    ):
        open_checkpoint(tmp_path / "run")


def test_run_refuses_shifted_optimizer_and_loads_weights_only(tmp_path: Path) -> None:
    write_legacy(defective(slice(None)), tmp_path / "iter_0000007", Layout.of(2, 2, 1))
    write_tracker(tmp_path, 7)
    with pytest.raises(CheckpointError, match="--no-load-optim of a run"):
        TrainingDirectory(CheckpointConfig(load=str(tmp_path))).choose()

    start = TrainingDirectory(CheckpointConfig(load=str(tmp_path), no_load_optim=True)).choose()
    assert start is not None
    assert start.source is not None
    assert KEY in start.source.tensors
    assert not any(key.startswith("optimizer.") for key in start.source.tensors)


@pytest.mark.parametrize("saver", ["torch_dist", "legacy", "hf", "universal"])
@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
def test_shifted_rows_are_refused_on_read(tmp_path: Path, form: str, saver: str) -> None:
    write(defective(slice(20, 24)), form, tmp_path / "run")
    with pytest.raises(
        CheckpointError,
        match=r"--no-optim .* another save of that run \(--ckpt-format torch",
    ):
        convert(tmp_path / "run", tmp_path / "out", saver)
    assert not (tmp_path / "out").exists()


def test_no_optim_reads_the_stored_weights(tmp_path: Path) -> None:
    source = defective(slice(20, 24))
    write_torch_dist(source, tmp_path / "run")
    convert(
        tmp_path / "run",
        tmp_path / "hf",
        "hf",
        options=WriteOptions(optimizer=False),
        read_options=ReadOptions(no_optim=True),
    )
    result = open_checkpoint(tmp_path / "hf")
    assert all(torch.equal(read_whole(result, key), source.values[key]) for key in result.tensors)


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [("torch_dist", "soap"), ("torch_dist", "adaptive_muon"), ("legacy", "soap"),
     ("legacy", "muon"), ("legacy", "lion")],
)  # fmt: skip
def test_unsupported_optimizers_are_refused_by_name(
    tmp_path: Path, form: str, optimizer: str
) -> None:
    args = {"optimizer": optimizer, "use_distributed_optimizer": False}
    write(random_source(LLAMA_ARGS | args), form, tmp_path / "run")

    with pytest.raises(
        CheckpointError,
        match=f"the optimizer is {optimizer}, .* is not supported: leave it out",
    ) as refusal:
        open_checkpoint(tmp_path / "run")

    assert ("second moments belong to the eigenbases" in str(refusal.value)) == (
        optimizer == "soap"
    )
    assert not any(
        key.startswith("optimizer.")
        for key in open_checkpoint(
            tmp_path / "run",
            read_options=ReadOptions(no_optim=True),
        ).tensors
    )


@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
def test_sgd_without_momentum_keeps_its_main_parameters(tmp_path: Path, form: str) -> None:
    """In fp32 without the distributed optimizer the files contain parameter groups only."""
    source = random_source(LLAMA_ARGS | {"optimizer": "sgd", "use_distributed_optimizer": False})
    for key in [key for key in source.values if key.startswith("optimizer.state.")]:
        del source.values[key]

    if form == "torch_dist":
        write_torch_dist(source, tmp_path / "run")
    else:
        weights = dict(source.values)
        source.values |= {optimizer_key("param", key): value for key, value in weights.items()}
        write_legacy(source, tmp_path / "run", Layout.of(2, 2, 1))

    result = open_checkpoint(tmp_path / "run")
    for key in [key for key in source.values if not key.startswith("optimizer.")]:
        main = read_whole(result, optimizer_key("param", key))
        assert torch.equal(main, source.values[key])
    assert len(result.tensors) == 2 * len(weights if form == "legacy" else source.values)


@pytest.mark.parametrize("strictness", ["log_all", "ignore_all", "return_all", "raise_unexpected"])
def test_missing_main_parameters_are_read_from_fp32_weights(strictness: str) -> None:
    source = random_source(LLAMA_ARGS)
    del source.values[optimizer_key("param", KEY)]
    state = {
        key: ShardedTensor.replicated(key, torch.full(info.shape, 9.0))
        for key, info in source.tensors.items()
        if key.startswith("optimizer.")
    }
    main = optimizer_key("param", KEY)
    state[main] = ShardedTensor.replicated(main, torch.full(source.values[KEY].shape, 9.0))
    report = load_from_source(state, source, strictness=strictness, skip=lambda key: False)

    assert torch.equal(state[main].local, source.values[KEY])
    assert report.unexpected == []
    assert KEY not in report.missing


def test_missing_main_parameters_are_read_from_rounded_weights_if_tolerated(caplog) -> None:
    source = random_source(LLAMA_ARGS | {"bf16": True})
    main = optimizer_key("param", KEY)
    del source.values[main]
    state = {main: ShardedTensor.replicated(main, torch.full(source.values[KEY].shape, 9.0))}

    with pytest.raises(CheckpointError, match=f"requested but not in the checkpoint.*\n.*{KEY}"):
        load_from_source(state, source, strictness="raise_unexpected")

    load_from_source(state, source, strictness="log_unexpected")
    assert torch.equal(state[main].local, source.values[KEY].float())
    assert f"1 main parameters are not in the checkpoint, {main} first" in caplog.text


@pytest.mark.parametrize("form", ["torch_dist", "legacy", "universal"])
def test_loss_scaler_state_survives_every_format(tmp_path: Path, form: str) -> None:
    """Megatron-LM stores the scale as a tensor, the JSON sidecar of an export as a number."""
    source = random_source(LLAMA_ARGS | {"fp16": True})
    assert source.training is not None

    scaler = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}
    source.training.grad_scaler = dict(scaler)
    write_torch_dist(source, tmp_path / "run")
    grad_scaler = load_common(tmp_path / "run")["optimizer"]["grad_scaler"]
    assert grad_scaler["scale"].tolist() == [1024.0]

    convert(tmp_path / "run", tmp_path / form, form)
    sidecar = WriteOptions(optim_sidecar=True)
    convert(tmp_path / form, tmp_path / "hf", "hf", options=sidecar, verify=True)
    convert(tmp_path / "hf", tmp_path / "again", "torch_dist")
    training = open_checkpoint(tmp_path / "again").training

    assert training is not None
    assert training.grad_scaler == scaler
