"""Checkpoints of any layout resume at any other one, and bitwise at the same one."""

import shlex

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.dist_checkpointing import Reader
from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.run_checkpoint.keys import is_extra_state
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.compare import assert_same
from tests.support.training_harness import (
    COMMON,
    DISTRIBUTED_OPTIMIZER,
    LAYOUTS,
    MODELS,
    train,
    whole,
)

# The iteration of a checkpoint, of four. The second loss after a resume depends on the optimizer.
SAVED = 2
BATCH = 4  # samples of an iteration
DATA = f"--mock-data --train-iters 4 --global-batch-size {BATCH} "
SINGLE = {"single": (1, ""), **LAYOUTS}
ROUNDING = 1e-5


def losses(outcomes):
    return outcomes[0].measured.losses


def close(a, b):
    return (
        len(a) == len(b) and max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)) < ROUNDING
    )


@pytest.fixture(scope="module")
def uninterrupted(pool):
    return {name: losses(pool.run(train, 1, DATA + flags)) for name, flags in MODELS.items()}


def train_and_save(pool, model, layout, directory, more=""):
    world_size, flags = SINGLE[layout]
    save = f"--exit-interval {SAVED} --save {directory}"
    return pool.run(train, world_size, f"{DATA} {MODELS[model]} {flags} {save} {more}")


def load_and_stop(pool, model, layout, directory):
    """Return the state of a run at `layout` right after loading, without training."""
    world_size, flags = SINGLE[layout]
    return pool.run(
        train,
        world_size,
        f"{DATA} {MODELS[model]} {flags} --load {directory} --skip-train",
    )


def choose_saves():
    """Return (model, layout): tied embeddings where a pipeline separates them, the rest slow."""
    cases = []
    for layout in SINGLE:
        if layout in ("tp2", "dp2"):
            continue
        for model in MODELS:
            is_slow = (model == "gpt2") != ("pp2" in layout)
            marks = [pytest.mark.slow] if is_slow else []
            cases.append(pytest.param(model, layout, marks=marks))
    return cases


@pytest.mark.parametrize(("model", "layout"), choose_saves())
def test_saved_at_any_layout_loads_at_one_process(pool, tmp_path, uninterrupted, model, layout):
    saved = train_and_save(pool, model, layout, tmp_path)
    assert losses(saved)[-1] == pytest.approx(uninterrupted[model][SAVED - 1], rel=ROUNDING)
    loaded = load_and_stop(pool, model, "single", tmp_path)
    assert_same(whole(loaded), whole(saved))
    assert (loaded[0].iteration, loaded[0].consumed_train_samples) == (SAVED, BATCH * SAVED)


@pytest.mark.parametrize("model", MODELS)
def test_one_checkpoint_resumes_at_every_layout(pool, tmp_path, uninterrupted, model):
    """Every bit of the state is the same everywhere, so that one model is enough to see it
    go on. The other one has tied embeddings, which a pipeline separates.
    """
    saved = whole(train_and_save(pool, model, "tp2_pp2", tmp_path, DISTRIBUTED_OPTIMIZER))
    for layout, (world_size, flags) in SINGLE.items():
        if model == "gpt2" and "pp2" not in layout and layout != "tp2_dp2":
            continue
        assert_same(whole(load_and_stop(pool, model, layout, tmp_path)), saved)
        if model == "llama":
            resumed = pool.run(
                train,
                world_size,
                f"{DATA} {MODELS[model]} {flags} --load {tmp_path}",
            )
            assert close(losses(resumed), uninterrupted[model][SAVED:]), layout


def test_save_contains_keys_required_by_megatron_core(pool, tmp_path):
    """An extra state of every module that has one, and the generators of each model-parallel rank
    in its form.
    """
    train_and_save(pool, "llama", "tp2_pp2", tmp_path)
    reader = Reader(tmp_path / f"iter_{SAVED:07}")
    modules = [f"self_attention.{name}" for name in ("linear_qkv", "linear_proj", "core_attention")]
    modules += ["mlp.linear_fc1", "mlp.linear_fc2"]
    expected = {f"decoder.layers.{layer}.{module}" for layer in range(4) for module in modules}
    actual = {
        key.removesuffix("._extra_state/shard_0_1")
        for key in reader.metadata.objects
        if is_extra_state(key)
    }
    assert actual == expected | {"decoder.final_layernorm"}

    for pp, tp in np.ndindex(2, 2):
        (theirs,) = reader.read_object(f"rng_state/shard_{pp}.{tp}_2.2")
        ours = reader.read_object(f"rng_state/shard_{pp}.{tp}.0_2.2.1")
        assert theirs["random_rng_state"] == ours["random_rng_state"]
        assert torch.equal(theirs["torch_rng_state"], ours["torch_rng_state"])


DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("single", ""),
        ("tp2_sp", ""),
        ("pp2_interleaved", "--bf16"),
        ("tp2_dp2", "--bf16"),
        ("pp2_cp2", ""),
        pytest.param("single", "--bf16", marks=pytest.mark.slow),
        pytest.param("tp2_sp", "--bf16", marks=pytest.mark.slow),
        pytest.param("pp2_interleaved", "", marks=pytest.mark.slow),
        pytest.param("tp2_dp2", "", marks=pytest.mark.slow),
        pytest.param("pp2_cp2", "--bf16", marks=pytest.mark.slow),
    ],
)
def test_resuming_at_the_same_layout_is_bitwise(pool, tmp_path, layout, precision):
    """The model has dropout, so that the random numbers must continue, too."""
    world_size, flags = SINGLE[layout]
    flags = f"{DATA} {MODELS['gpt2']} {DROPOUT} {precision} {flags}"
    straight = pool.run(train, world_size, flags)
    first = pool.run(train, world_size, f"{flags} --save {tmp_path} --exit-interval {SAVED}")
    second = pool.run(train, world_size, f"{flags} --load {tmp_path}")

    assert losses(first) + losses(second) == losses(straight)
    assert_same(whole(second), whole(straight))


def test_fp16_resumes_with_its_loss_scale(pool, tmp_path):
    scale = "--initial-loss-scale 4294967296 --loss-scale-window 2 --hysteresis 1"
    flags = f"{DATA} {MODELS['llama']} --train-iters 8 --fp16 {scale}"
    straight = pool.run(train, 1, flags)
    pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval 4")
    second = pool.run(train, 1, f"{flags} --load {tmp_path}")
    assert losses(second) == losses(straight)[4:]
    assert_same(whole(second), whole(straight))


def test_bf16_checkpoint_reshards(pool, tmp_path):
    """bf16 weights and fp32 main parameters both."""
    saved = whole(train_and_save(pool, "llama", "tp2_dp2", tmp_path, "--bf16"))
    assert saved["decoder.layers.0.mlp.linear_fc1.weight"].dtype == torch.bfloat16
    assert (
        saved["optimizer.state.param.decoder.layers.0.mlp.linear_fc1.weight"].dtype == torch.float32
    )

    loaded = pool.run(
        train,
        2,
        f"{DATA} {MODELS['llama']} --bf16 {LAYOUTS['pp2'][1]} --load {tmp_path} --skip-train",
    )
    assert_same(whole(loaded), saved)


def test_other_layouts_reseed_reproducibly(pool, tmp_path):
    flags = f"{DATA} {MODELS['gpt2']} {DROPOUT}"
    pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval {SAVED}")
    first, second = (
        pool.run(train, 2, f"{flags} {LAYOUTS['tp2'][1]} --load {tmp_path}") for _ in range(2)
    )
    assert losses(first) == losses(second)
    assert_same(whole(first), whole(second))


def test_finetune_loads_weights_only(pool, tmp_path):
    flags = f"{DATA} {MODELS['llama']}"
    saved = pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval {SAVED}")
    tuned = pool.run(train, 1, f"{flags} --load {tmp_path} --finetune --skip-train")
    assert (tuned[0].iteration, tuned[0].consumed_train_samples, tuned[0].learning_rate) == (
        0,
        0,
        0.0,
    )

    before = whole(saved)
    after = whole(tuned)
    for key, tensor in after.items():
        if key.startswith("optimizer.state.exp_avg"):
            assert not tensor.any()
        else:
            assert torch.equal(tensor, before[key]), key


def test_no_load_optim_keeps_the_position(pool, tmp_path):
    flags = f"{DATA} {MODELS['llama']}"
    saved = pool.run(
        train,
        1,
        f"{flags} --save {tmp_path} --exit-interval {SAVED} --no-save-optim --no-save-rng",
    )
    objects = Reader(tmp_path / f"iter_{SAVED:07}").metadata.objects.keys()

    assert all(map(is_extra_state, objects - {COMMON_STATE}))
    with pytest.raises(ValueError, match=r"holds no optimizer.*--no-load-optim"):
        pool.run(train, 1, f"{flags} --load {tmp_path}")

    resumed = pool.run(train, 1, f"{flags} --load {tmp_path} --no-load-optim --skip-train")
    assert (resumed[0].iteration, resumed[0].consumed_train_samples) == (SAVED, BATCH * SAVED)
    assert resumed[0].learning_rate == saved[0].learning_rate > 0

    key = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(whole(resumed)[key], whole(saved)[key])
    assert not whole(resumed)[f"optimizer.state.exp_avg.{key}"].any()


def test_use_checkpoint_args_restores_the_model(pool, tmp_path):
    """Flags of the model, its tokenizer and its schedule are not required."""
    saved = pool.run(
        train,
        1,
        f"{DATA} {MODELS['llama']} --save {tmp_path} --exit-interval {SAVED}",
    )
    run = (
        "--num-threads 1 --lr 1 --train-iters 4 --mock-data --eval-iters 0 --skip-train "
        "--num-layers 2 "
    )
    from_checkpoint = (
        f"--load {tmp_path} --use-checkpoint-args --use-checkpoint-opt_param-scheduler"
    )
    loaded = pool.run(train, 2, f"{from_checkpoint} --tensor-model-parallel-size 2", run)
    assert_same(whole(loaded), whole(saved))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Return documents of random tokens, which distinguish samples."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for length in generator.integers(5, 60, 40):
            builder.add(generator.integers(0, 60, length))
    return prefix


def train_and_record_tokens(rank, world_size, flags):
    """(dp rank, tokens [samples, s] in the order they were trained on), from the first stage."""
    seen = []

    def recording_forward_step(chunk, batch, activation):
        seen.append(batch["tokens"].clone())
        return forward_step(chunk, batch, activation)

    common = COMMON.replace("--lr-warmup-iters 2", "")
    config = parse_args(shlex.split(common + flags), world_size)
    run = pretrain(config, model_provider, datasets_provider, recording_forward_step)
    return run.ps.dp.rank, torch.stack(seen), run.config.training.micro_batch_size


def stream(results):
    """The samples of all replicas in the order of the stream: micro-batch by micro-batch, replica
    by replica.
    """
    replicas = [tokens for _, tokens, _ in sorted(results, key=lambda result: result[0])]
    return torch.stack(replicas, 1).flatten(0, 2)


def test_samples_are_neither_lost_nor_repeated(pool, tmp_path, tokens):
    """Other data-parallel size, micro-batch and global batch on resume: the stream does not
    notice.
    """
    data = f"--data-path {tokens} --split 100,0,0 {MODELS['llama']} --train-samples 48 "
    data += f"--save {tmp_path} --load {tmp_path}"
    straight = stream(
        pool.run(
            train_and_record_tokens,
            1,
            data.replace(str(tmp_path), str(tmp_path / "straight")),
        )
    )
    parts = [
        pool.run(train_and_record_tokens, 1, f"{data} --exit-interval 2"),
        pool.run(
            train_and_record_tokens,
            2,
            f"{data} --global-batch-size 4 --micro-batch-size 1 --exit-interval 5",
        ),
        pool.run(train_and_record_tokens, 4, f"{data} --global-batch-size 8 --micro-batch-size 2"),
    ]
    assert [len(stream(part)) for part in parts] == [16, 12, 20 // 8 * 8]

    together = torch.cat([stream(part) for part in parts])
    assert torch.equal(together, straight[: len(together)])
    assert len({tuple(sample.tolist()) for sample in straight}) == 48


def test_replicas_share_reads(pool, tmp_path):
    flags = f"{DATA} {MODELS['llama']}"
    saved = whole(pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval {SAVED}"))
    for layout in ("dp2", "tp2_dp2"):
        world_size, layout_flags = LAYOUTS[layout]
        load = f"--load {tmp_path} --skip-train --ckpt-fully-parallel-load --ckpt-verify"
        assert_same(whole(pool.run(train, world_size, f"{flags} {layout_flags} {load}")), saved)


def test_damaged_blocks_are_detected_when_read(pool, tmp_path):
    flags = f"{DATA} {MODELS['llama']}"
    pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval {SAVED}")
    shard = tmp_path / f"iter_{SAVED:07}/__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    with pytest.raises(ValueError, match=r"__0_0\.distcp"):
        pool.run(train, 1, f"{flags} --load {tmp_path} --skip-train --ckpt-verify")


def test_missing_keys_are_an_error_by_default(pool, tmp_path):
    """A model with QK norms loads a checkpoint without them, whose arguments do not mention them."""
    flags = f"{DATA} {MODELS['gpt2']}"
    saved = whole(
        pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval {SAVED} --no-save-optim")
    )
    common = tmp_path / f"iter_{SAVED:07}/common.pt"
    state = torch.load(common, weights_only=False)
    del state["args"].qk_layernorm
    torch.save(state, common)
    (tmp_path / f"iter_{SAVED:07}/checksums.bin").unlink()  # has the checksum of the old common.pt
    load = f"{flags} --qk-layernorm --load {tmp_path} --no-load-optim --skip-train"

    with pytest.raises(
        ValueError,
        match=r"decoder\.layers\.0\.self_attention\.q_layernorm\.weight",
    ):
        pool.run(train, 1, load)

    loaded = whole(pool.run(train, 1, f"{load} --dist-ckpt-strictness log_unexpected"))
    num_new = 0
    for key, weight in loaded.items():
        if key.startswith("optimizer."):
            continue
        if key in saved:
            assert torch.equal(weight, saved[key]), key
        elif key.endswith(".weight"):
            assert (weight == 1).all(), "new weights keep their initial values"
            num_new += 1
    assert num_new > 0
