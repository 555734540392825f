"""`--ckpt-format torch`: runs save Megatron-LM's legacy files and resume from them at any layout."""

import shutil

import pytest
import torch

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from tests.support.compare import assert_same
from tests.support.training_harness import (
    DISTRIBUTED_OPTIMIZER,
    LAYOUTS,
    LLAMA,
    MODELS,
    train,
    whole,
)

DATA = "--mock-data --train-iters 4 --global-batch-size 4 --num-layers 2"
FLAGS = f"{DATA} --use-distributed-optimizer {LLAMA}"


def files(directory):
    """Return the files that Megatron-LM has, too, without our records of launches, owners and
    lineage.
    """
    names = []
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        is_owner = name.startswith(".generation")
        is_launch = name.startswith("runs/")
        is_record = is_owner or is_launch or name.endswith(".json")
        if path.is_file() and not is_record:
            names.append(name)
    return sorted(names)


EXPECTED = {
    "single": ["mp_rank_00"],
    "tp2_dp2": ["mp_rank_00", "mp_rank_01"],
    "pp2_interleaved": ["mp_rank_00_000", "mp_rank_00_001"],
    "tp2_pp2": [
        "mp_rank_00_000",
        "mp_rank_00_001",
        "mp_rank_01_000",
        "mp_rank_01_001",
    ],
}


@pytest.mark.parametrize("layout", EXPECTED)
def test_legacy_checkpoints_resume(pool, tmp_path, layout):
    """A run resumes from its own legacy checkpoint bit for bit, and another layout reads the same
    tensors.
    """
    layouts = {"single": (1, ""), **LAYOUTS}
    world_size, layout_flags = layouts[layout]
    model = FLAGS
    if layout == "pp2_interleaved":
        model += " --num-layers 4"
    straight_flags = f"{model} {layout_flags} --ckpt-format torch"
    straight = pool.run(train, world_size, straight_flags)

    # The first half has the files of Megatron-LM.
    flags = f"{straight_flags} --save {tmp_path} --load {tmp_path}"
    half = f"{flags} --exit-interval 2 --save-interval 1 --keep-last-n 1"
    first = pool.run(train, world_size, half)
    entries = {name.partition("/")[0] for name in files(tmp_path)}
    assert entries == {"iter_0000002", "latest_checkpointed_iteration.txt"}
    names = ("distrib_optim.pt", "model_optim_rng.pt")
    expected = []
    for rank in EXPECTED[layout]:
        expected += [f"{rank}/{name}" for name in names]
    assert files(tmp_path / "iter_0000002") == expected

    # Another layout loads the same tensors.
    pp2 = f"{model} --pipeline-model-parallel-size 2 --load {tmp_path} --skip-train"
    elsewhere = pool.run(train, 2, pp2)
    assert_same(whole(elsewhere), whole(first))

    # The second half ends as the uninterrupted run.
    second = pool.run(train, world_size, flags)
    assert second[0].iteration == 4
    assert_same(whole(second), whole(straight))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (2, "--pipeline-model-parallel-size 2"),
    ],
)
def test_dropout_continues_after_a_resume(pool, tmp_path, world_size, layout):
    """The generators are those of the run on any device, unless there are replicas."""
    flags = f"{DATA} {LLAMA} {layout} --hidden-dropout 0.2 --ckpt-format torch"
    straight = pool.run(train, world_size, flags)
    pool.run(train, world_size, f"{flags} --save {tmp_path} --exit-interval 2")
    resumed = pool.run(train, world_size, f"{flags} --load {tmp_path}")
    assert_same(whole(resumed), whole(straight))


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_legacy_without_the_distributed_optimizer_resumes(pool, tmp_path, precision):
    """Keys are those of Megatron-core's local modules, without Transformer Engine."""
    flags = f"{DATA} {MODELS['gpt2']} {precision}"
    tp2 = f"{flags} --tensor-model-parallel-size 2 --ckpt-format torch"
    saved = pool.run(train, 2, f"{tp2} --save {tmp_path}")
    checkpoint = tmp_path / "iter_0000004"
    assert files(checkpoint) == [
        "mp_rank_00/model_optim_rng.pt",
        "mp_rank_01/model_optim_rng.pt",
    ]
    path = checkpoint / "mp_rank_01/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    assert content["iteration"] == 4
    assert content["args"].consumed_train_samples == 16
    assert "decoder.layers.1.input_layernorm.weight" in content["model"]
    loaded = pool.run(train, 2, f"{flags} {DISTRIBUTED_OPTIMIZER} --load {tmp_path} --skip-train")
    assert_same(whole(loaded), whole(saved))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_legacy_sgd_resumes(pool, tmp_path, momentum):
    """convert.py reads legacy files of SGD, with and without momentum, and converts them with and
    without their optimizer.
    """
    flags = f"{DATA} {MODELS['gpt2']} --optimizer sgd --sgd-momentum {momentum} --bf16"
    legacy = tmp_path / "legacy"
    again = tmp_path / "torch_dist"
    tp2 = f"{flags} --tensor-model-parallel-size 2 --ckpt-format torch"
    saved = pool.run(train, 2, f"{tp2} --save {legacy}")

    # Converted with its optimizer
    convert(legacy, again, "torch_dist", verify=True)
    loaded = pool.run(train, 2, f"{flags} {DISTRIBUTED_OPTIMIZER} --load {again} --skip-train")
    assert_same(whole(loaded), whole(saved))

    # Converted without it
    convert(
        again,
        tmp_path / "hf",
        "hf",
        options=WriteOptions(optimizer=False),
        read_options=ReadOptions(no_optim=True),
    )
    weights = open_checkpoint(tmp_path / "hf").tensors
    expected = {key for key in whole(saved) if not key.startswith("optimizer.")}
    assert weights.keys() == expected


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_legacy_sgd_in_fp32_resumes_bitwise(pool, tmp_path, momentum):
    """Without momentum the files contain neither main parameters nor other optimizer tensors."""
    flags = f"{DATA} {MODELS['gpt2']} --optimizer sgd --sgd-momentum {momentum}"
    straight = pool.run(train, 2, f"{flags} --tensor-model-parallel-size 2")
    flags += (
        f" --tensor-model-parallel-size 2 --ckpt-format torch --save {tmp_path} --load {tmp_path}"
    )
    pool.run(train, 2, f"{flags} --exit-interval 2")
    for strictness in ("assume_ok_unexpected", "log_all"):
        resumed = pool.run(train, 2, f"{flags} --ckpt-step 2 --dist-ckpt-strictness {strictness}")
        assert_same(whole(resumed), whole(straight))


TP2 = f"{FLAGS} --tensor-model-parallel-size 2 --ckpt-format torch"


@pytest.fixture(scope="module")
def stopped(pool, tmp_path_factory):
    """Return the results of an uninterrupted run, and the checkpoints of one that stopped after
    two iterations.
    """
    directory = tmp_path_factory.mktemp("stopped")
    straight = pool.run(train, 2, TP2)
    pool.run(train, 2, f"{TP2} --save {directory} --save-interval 1 --exit-interval 2")
    return straight, directory


@pytest.mark.parametrize("damage", ["lost tracker", "garbled tracker", "truncated checkpoint"])
def test_damaged_legacy_checkpoints_never_restart_from_scratch(pool, stopped, tmp_path, damage):
    straight, directory = stopped
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    newest = tmp_path / "iter_0000002"
    if damage == "lost tracker":
        tracker.unlink()
    elif damage == "garbled tracker":
        tracker.write_bytes(bytes(16))
    else:
        model = newest / "mp_rank_01/model_optim_rng.pt"
        model.write_bytes(model.read_bytes()[:-100])

    resumed = pool.run(train, 2, f"{TP2} --save {tmp_path} --load {tmp_path}")
    first = 2 if damage == "truncated checkpoint" else 3
    assert resumed[0].measured.losses == straight[0].measured.losses[first - 1 :]
    assert_same(whole(resumed), whole(straight))


def test_asynchronous_legacy_save(pool, tmp_path):
    """Asynchronous saves write the same files as synchronous ones."""
    world_size, flags = LAYOUTS["tp2_dp2"]
    flags = f"{FLAGS} {flags} --ckpt-format torch --save-interval 1"
    pool.run(train, world_size, f"{flags} --save {tmp_path / 'sync'}")
    pool.run(train, world_size, f"{flags} --save {tmp_path / 'async'} --async-save")
    names = [name for name in files(tmp_path / "sync") if name.endswith(".pt")]
    assert len(names) == 4 * 4
    assert files(tmp_path / "async") == files(tmp_path / "sync")
    for name in names:
        synchronous = torch.load(tmp_path / "sync" / name, weights_only=False)
        asynchronous = torch.load(tmp_path / "async" / name, weights_only=False)
        # They name the directories.
        synchronous.pop("args", None)
        asynchronous.pop("args", None)
        assert_same(asynchronous, synchronous, name)
