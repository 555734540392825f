"""Reading checkpoints of DeepSpeed's engine, which DeepSpeed 0.19.8 wrote (see tests/golden)."""

import hashlib
import json
import logging
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.deepspeed.engine import TransformersEngineSource
from megatron.conversion.deepspeed.engine_files import EngineFiles
from megatron.conversion.deepspeed.universal import UniversalSource
from megatron.conversion.deepspeed.universal_writer import write_universal
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.formats import NoCheckpointError, find_checkpoint
from megatron.core.safe_files import FileTensor
from tests import GOLDEN
from tests.support.compare import assert_same, read_all
from tests.support.distributed import DistributedPool
from tests.support.memory_source import GPT_ARGS, random_source
from tests.support.training_harness import train, whole
from tests.unit_tests.conversion.deepspeed.test_universal import adamw
from tests.unit_tests.conversion.filled_model import chunk

ARCHIVES = GOLDEN / "deepspeed_engine"
ALL = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))
CASES = [name for name in ALL if name.startswith("zero")]
MEGATRON = [name for name in ALL if name.startswith("megatron")]  # TP2 x PP2
STATE_FILES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    for name in ALL:
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
            archive.extractall(root, filter="data")
    return root


def read_oracle(directory: Path) -> dict:
    return json.loads((directory / "oracle.json").read_text())


def digest(tensor: LazyTensor) -> str:
    """Return the digest of the interop script."""
    values = tensor.read_all().float().contiguous()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def test_cases_contain_every_stage() -> None:
    assert {name[:5] for name in CASES} == {"zero1", "zero2", "zero3"}


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_those_of_deepspeed(name: str, golden: Path) -> None:
    """Parameters and moments, bitwise, as DeepSpeed gathers them and as its script merges them."""
    directory = golden / name
    (rank,) = EngineFiles(directory / (directory / "latest").read_text().strip()).ranks
    oracle = read_oracle(directory)
    merged = {key: digest(tensor) for key, tensor in rank.param.items()}
    assert merged == oracle["zero_to_fp32"]
    for key, states in oracle["states"].items():
        assert "param" in states
        for state, expected in states.items():
            if state == "param":
                assert merged[key] == expected
            else:
                assert digest(rank.moments[state][key]) == expected
    assert rank.steps == {3}


@pytest.mark.parametrize("name", CASES)
def test_training_continues_as_in_deepspeed(name: str, golden: Path) -> None:
    """Covers weights, both moments, the step and the groups."""
    oracle = read_oracle(golden / name)
    source = open_checkpoint(golden / name)
    model = chunk(source, main=True)
    optimizer = adamw(model, source)
    frozen = _list_frozen_keys(source)
    tolerance = 2e-4 if source.args["bf16"] else 1e-6
    for batch, loss_of_deepspeed in zip(oracle["batches"], oracle["losses"], strict=True):
        tokens = torch.tensor(batch)
        positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, labels=tokens[:, 1:]).mean()
        loss.backward()
        assert loss.item() == pytest.approx(loss_of_deepspeed, abs=tolerance)
        for key, entry in model.sharded_state_dict().items():
            if key in frozen:
                entry.local.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _list_frozen_keys(source: TransformersEngineSource) -> set[str]:
    """Return the parameters whose moments are zero."""
    return {
        key
        for key in source.tensors
        if not key.startswith("optimizer.")
        and not source.tensors[f"optimizer.state.exp_avg_sq.{key}"].read_all().any()
    }


@pytest.mark.parametrize("saver", ["torch_dist", "hf"])
def test_conversion_keeps_weights_and_optimizer(saver: str, golden: Path, tmp_path: Path) -> None:
    source = open_checkpoint(golden / "zero2-bf16-tied")
    options = WriteOptions(optim_sidecar=saver == "hf")
    convert(golden / "zero2-bf16-tied", tmp_path / "to", saver, options=options, verify=True)
    result = open_checkpoint(tmp_path / "to")
    assert_same(read_all(result), read_all(source))
    assert result.training is not None
    assert source.training is not None
    assert result.training.param_groups == source.training.param_groups
    assert result.training.iteration == 3


def test_bf16_weights_are_the_stored_ones(golden: Path) -> None:
    """The weights are main parameters, cast; DeepSpeed also stores them as it computes with them."""
    directory = golden / "zero2-bf16-tied"
    (rank,) = EngineFiles(directory / "global_step3").ranks
    for name, tensor in rank.state["module"].items():
        assert isinstance(tensor, FileTensor)
        assert torch.equal(rank.param[name].read_all().bfloat16(), tensor.read())


def test_frozen_parameters_have_zero_moments(golden: Path) -> None:
    source = open_checkpoint(golden / "zero3-frozen")
    assert "embedding.word_embeddings.weight" in _list_frozen_keys(source)
    assert source.unused == ["state: 10 frozen parameters, which are trained here"]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_deepspeed_is_read_as_its_universal_form(name: str, golden: Path) -> None:
    """DeepSpeed's ds_to_universal has joined the ranks of TP and PP, bitwise as here."""
    oracle = read_oracle(golden / name)
    source = open_checkpoint(golden / name)
    assert isinstance(source, UniversalSource)
    assert len(oracle) == 14
    names = source._files.names
    assert set(names.values()) == set(oracle)
    for key, name in names.items():
        for state, file in STATE_FILES.items():
            tensor = source.tensors[optimizer_key(state, key)]
            assert digest(tensor) == oracle[name][file]
    training = source.training
    assert training is not None
    assert training.param_groups is not None
    steps = [group["step"] for group in training.param_groups]
    assert steps == [2, 2]
    assert training.iteration == 2
    assert training.consumed_train_samples == 8


def test_stages_of_another_size_are_refused(golden: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(golden / MEGATRON[0], root)
    for path in (root / "global_step2").glob("*mp_rank_03*"):
        path.unlink()
    with pytest.raises(ValueError, match="3 model-parallel ranks, which are not stages of 2"):
        open_checkpoint(root)


RUN = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 22 --num-attention-heads 4 --swiglu "
    "--group-query-attention --num-query-groups 2 --disable-bias-linear --normalization RMSNorm "
    "--norm-epsilon 1e-6 --position-embedding-type rope --seq-length 12 --vocab-size 36 "
    "--max-position-embeddings 12 --micro-batch-size 2 --global-batch-size 4 --train-iters 5 "
    "--lr 1e-3 --adam-beta2 0.95 --bf16 --mock-data --num-workers 0 --num-threads 1 --eval-iters 0 "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --use-distributed-optimizer "
)


def test_a_run_loads_it_at_another_layout(pool: DistributedPool, golden: Path) -> None:
    root = golden / "zero2-bf16-tied"
    flags = f"{RUN} --tensor-model-parallel-size 2 --load {root} --skip-train"
    outcomes = pool.run(train, 2, flags, "")
    assert outcomes[0].iteration == 3
    assert outcomes[0].consumed_train_samples == 12
    source = read_all(open_checkpoint(root))
    loaded = whole(outcomes)
    assert {key for key in source if "optimizer" in key} <= set(loaded)
    for key, tensor in loaded.items():
        assert torch.equal(source[key], tensor), key


# ---- Finding ----


def test_the_trainers_directory_is_read_with_the_optimizer(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It contains the model of transformers, too, which is read when it is named."""
    root = tmp_path / "checkpoint-3"
    shutil.copytree(golden / "zero1", root)
    convert(golden / "zero1", tmp_path / "model", "hf")
    shutil.copy(tmp_path / "model/model.safetensors", root)
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(root).training is not None
    assert "is also a checkpoint itself (hf)" in caplog.text
    assert open_checkpoint(root, "hf").training is None
    assert open_checkpoint(root / "global_step3").training is not None
    assert open_checkpoint(root, step=3).training is not None


def test_directory_without_tracker_is_described(tmp_path: Path) -> None:
    """With the same --load and --save, an empty directory is the first launch of a run."""
    directory = tmp_path / "pytorch_model"
    directory.mkdir()
    (directory / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(NoCheckpointError, match=r"engine \(pytorch_model\), but no file 'latest'"):
        find_checkpoint(tmp_path)


def test_config_can_be_elsewhere(golden: Path, tmp_path: Path) -> None:
    """The state of accelerate has no config.json."""
    shutil.copytree(golden / "zero1/global_step3", tmp_path / "pytorch_model")
    (tmp_path / "latest").write_text("pytorch_model")
    with pytest.raises(ValueError, match=r"no config.json in .* or .*: copy it there, or.*--hf-"):
        open_checkpoint(tmp_path)
    source = open_checkpoint(tmp_path, read_options=ReadOptions(hf_config=golden / "zero1"))
    assert_same(read_all(source), read_all(open_checkpoint(golden / "zero1")))
    shutil.copy(golden / "zero1/config.json", tmp_path / "pytorch_model")
    assert open_checkpoint(tmp_path).training is not None


def test_newer_checkpoint_that_is_not_converted_is_reported(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_universal(random_source(GPT_ARGS), tmp_path)
    converted = (tmp_path / "latest_universal").read_text()
    (tmp_path / "latest").write_text(converted.removesuffix("_universal"))
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tmp_path)
        assert not caplog.records
        shutil.copytree(golden / "zero1/global_step3", tmp_path / "global_step900")
        (tmp_path / "latest").write_text("global_step900")
        open_checkpoint(tmp_path)
    assert f"latest names global_step900, but latest_universal names {converted}" in caplog.text


def test_tracker_of_deepspeed_selects_the_checkpoint(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron-DeepSpeed writes two trackers, and loads what `latest` names."""
    for step in (3, 6):
        shutil.copytree(golden / "zero1/global_step3", tmp_path / f"global_step{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    (tmp_path / "latest").write_text("global_step6")
    assert find_checkpoint(tmp_path).directory == tmp_path / "global_step6"
    assert find_checkpoint(tmp_path).note is None

    (tmp_path / "latest").write_text("global_step3")
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.directory == tmp_path / "global_step3"
    assert "names global_step3, but latest_checkpointed_iteration.txt names 6" in checkpoint.note


# ---- Damage ----


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def create(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).touch()


DAMAGE = {
    "first rank": (
        "zero1",
        remove("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing",
    ),
    "last rank": (
        "zero2-frozen",
        remove("zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "optimizer states of 2 data-parallel ranks, but was saved by 3",
    ),
    "last rank of ZeRO-3": (
        "zero3-frozen",
        remove("zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "optimizer states of 2 data-parallel ranks, but was saved by 3",
    ),
    "model states of ZeRO-3": (
        "zero3-frozen",
        remove("zero_pp_rank_1_mp_rank_00_model_states.pt"),
        "zero_pp_rank_1_mp_rank_00_model_states.pt is missing",
    ),
    "experts": (
        "zero1",
        create("layer_0_expert_0_mp_rank_00_model_states.pt"),
        "experts of DeepSpeed's MoE",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str, golden: Path, tmp_path: Path) -> None:
    name, change, message = DAMAGE[damage]
    root = tmp_path / name
    shutil.copytree(golden / name, root)
    change(root / "global_step3")
    with pytest.raises(ValueError, match=message):
        open_checkpoint(root)


# ---- Bounded memory ----


def test_a_box_reads_its_own_bytes(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads no tensors, and a row of a matrix its own elements, not those of its shard."""
    counts: list[int] = []
    original = FileTensor.read_flat

    def count(tensor: FileTensor, start: int, numel: int) -> torch.Tensor:
        counts.append(numel)
        return original(tensor, start, numel)

    monkeypatch.setattr(FileTensor, "read_flat", count)
    source = open_checkpoint(golden / "zero3-bf16-tied")
    assert sum(counts) <= 32  # steps
    counts.clear()
    key = "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc2.weight"
    rows = source.tensors[key].read((3, 0), (2, 22))
    assert rows.shape == (2, 22)
    assert sum(counts) == 44
