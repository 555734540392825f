"""Loading flags have the same effect for every format, and a rank reads only the data that it
needs.
"""

import builtins
import io
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import megatron.core.run_checkpoint.native_reader as loading
from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.options import WriteOptions
from megatron.training.checkpoint import contents
from tests import ROOT
from tests.support.compare import assert_same
from tests.support.training_harness import LAYOUTS, MODELS, train, whole

FLAGS = f"--mock-data --train-iters 6 --global-batch-size 4 {MODELS['llama']} --num-layers 2"
FORMATS = ("torch_dist", "legacy", "universal", "hf")


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """Return checkpoints of one run by format, and the state of that run."""
    roots = {"torch_dist": tmp_path_factory.mktemp("run")}
    saved = whole(pool.run(train, 1, f"{FLAGS} --exit-interval 3 --save {roots['torch_dist']}"))
    for form in FORMATS[1:]:
        roots[form] = tmp_path_factory.mktemp("converted") / form
        convert(roots["torch_dist"], roots[form], form, options=WriteOptions(optim_sidecar=True))
    return roots, saved


def counting_train(rank, world_size, flags):
    """Return the result of `train` and the bytes that this rank requested from its reader."""
    counted = []

    def fill(*args, **options):
        counted.append(original(*args, **options))
        return counted[-1]

    original = loading.fill
    loading.fill = fill
    try:
        return train(rank, world_size, flags), counted[0].bytes_needed
    finally:
        loading.fill = original


@pytest.mark.parametrize("form", FORMATS)
def test_replicas_share_reads(pool, runs, form):
    roots, saved = runs
    flags = f"{FLAGS} --load {roots[form]} --skip-train"
    alone = pool.run(counting_train, 2, flags)
    shared = pool.run(counting_train, 2, f"{flags} --ckpt-fully-parallel-load")
    for results in (alone, shared):
        assert_same(whole([outcome for outcome, _ in results]), saved)
    assert sum(count for _, count in shared) == alone[0][1] == alone[1][1]


@pytest.mark.parametrize("form", FORMATS[1:])
def test_verifying_a_format_without_checksums_is_refused_by_name(pool, runs, form):
    with pytest.raises(ValueError, match=rf"--ckpt-verify: .*\({form}\) has neither checksums.bin"):
        pool.run(train, 2, f"{FLAGS} --load {runs[0][form]} --skip-train --ckpt-verify")


TRACKER = "latest_checkpointed_iteration.txt"
DECIDING = ("metadata.json", TRACKER)
WATCHED = ("common.pt", ".metadata", "checksums.bin", *DECIDING)


def watching_train(rank, world_size, flags):
    """Return the result of `train`, and the number of times that this rank opened or queried files
    of the checkpoint, by (call, name).
    """
    seen = Counter()

    def spy(kind, function):
        def call(path, *args, **options):
            if isinstance(path, (str, os.PathLike)) and (
                Path(path).suffix == ".distcp" or Path(path).name in WATCHED
            ):
                seen[kind, Path(path).name] += 1
            return function(path, *args, **options)

        return call

    spied = [
        (os, "stat"),
        (os, "open"),
        (io, "open"),
        (builtins, "open"),
        (Path, "stat"),
    ]  # Python 3.10 keeps its own
    originals = [getattr(module, name) for module, name in spied]
    for (module, name), function in zip(spied, originals, strict=True):
        setattr(module, name, spy(name, function))
    try:
        return train(rank, world_size, flags), seen
    finally:
        for (module, name), function in zip(spied, originals, strict=True):
            setattr(module, name, function)


def test_only_rank_0_looks_for_files_of_other_ranks(pool, tmp_path):
    flags = f"{FLAGS} {LAYOUTS['tp2_dp2'][1]}"
    pool.run(train, 4, f"{flags} --exit-interval 3 --save {tmp_path}")
    results = pool.run(watching_train, 4, f"{flags} --load {tmp_path} --skip-train")
    asked = [{name for operation, name in seen if operation == "stat"} for _, seen in results]
    assert {f"__{rank}_0.distcp" for rank in range(4)} <= asked[0], "one rank looks at all"
    for rank in range(1, 4):
        # They wait until they see the small files, of which metadata.json is one.
        decides = [name for name in asked[rank] if name.endswith(".distcp") or name == TRACKER]
        assert not decides
        assert not any(results[rank][1]["open", name] for name in DECIDING)
    # Blocks of `.metadata` are verified while they are read.
    for name in ("common.pt", ".metadata"):
        assert [seen["open", name] for _, seen in results] == [1] * 4


def train_as_on_a_gpu(rank, world_size, flags):
    """Train, and save the generators of a rank with a GPU: 16 bytes for CUDA."""

    def get_rng_state(rng):
        cuda = torch.arange(16, dtype=torch.uint8)
        return original(rng) | {
            "cuda_rng_state": cuda,
            "rng_tracker_states": {"model-parallel-rng": cuda},
        }

    original = contents.get_rng_state
    contents.get_rng_state = get_rng_state
    try:
        return train(rank, world_size, flags)
    finally:
        contents.get_rng_state = original


def test_generators_of_a_gpu_run_are_skipped_on_a_cpu(pool, tmp_path):
    """Generators that do not fit are seeded again, so that the resumed run can be repeated."""
    flags = (
        f"{FLAGS} --hidden-dropout 0.1 --attention-dropout 0.1 --tensor-model-parallel-size 2 "
        "--sequence-parallel"
    )
    pool.run(train_as_on_a_gpu, 2, f"{flags} --exit-interval 3 --save {tmp_path}")
    first, second = (pool.run(train, 2, f"{flags} --load {tmp_path}") for _ in range(2))
    assert first[0].iteration == 6
    assert_same(whole(first), whole(second))


def test_state_of_another_optimizer_is_rejected_with_alternatives(pool, runs):
    flags = f"{FLAGS} --load {runs[0]['torch_dist']} --skip-train --optimizer sgd"
    with pytest.raises(
        ValueError, match=r"--optimizer adam.*--no-load-optim.*--finetune.*--optimizer adam"
    ):
        pool.run(train, 2, flags)
    loaded = pool.run(train, 2, f"{flags} --no-load-optim")
    assert loaded[0].iteration == 3
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(whole(loaded)[key], runs[1][key])


def test_sgd_with_and_without_momentum_are_not_interchangeable(pool, tmp_path):
    pool.run(
        train, 1, f"{FLAGS} --optimizer sgd --sgd-momentum 0 --exit-interval 1 --save {tmp_path}"
    )
    with pytest.raises(
        ValueError, match=r"--sgd-momentum 0.*--no-load-optim.*--finetune.*--sgd-momentum 0"
    ):
        pool.run(train, 1, f"{FLAGS} --optimizer sgd --load {tmp_path} --skip-train")


def test_gguf_file_is_loaded_at_any_layout(pool, tmp_path):
    path = ROOT / "tests/golden/gguf/llama/model.gguf"
    convert(path, tmp_path / "run", "torch_dist")
    flags = (
        f"--mock-data --train-iters 6 --global-batch-size 4 {MODELS['llama']} --num-layers 2 --hidden-size 16 "
        "--ffn-hidden-size 24 --vocab-size 31 --norm-epsilon 1e-6 --max-position-embeddings 256 "
        "--skip-train --finetune"
    )
    converted = whole(pool.run(train, 1, f"{flags} --load {tmp_path / 'run'}"))
    loaded = pool.run(train, 2, f"{flags} --load {path} --tensor-model-parallel-size 2")
    assert_same(whole(loaded), converted)
