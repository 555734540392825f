"""Checkpoints of Megatron-LM: all forms of a state are equal, and our files equal its own."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.conversion.megatron_lm.args import read_arguments
from megatron.conversion.megatron_lm.legacy_reader import LegacySource
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist import TorchDistSource
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedObject,
    ShardedTensor,
    load_common,
    save,
)
from megatron.core.safe_files import safe_load
from tests import ROOT
from tests.support.boxes import index_box
from tests.support.compare import assert_same, read_all, read_whole
from tests.support.memory_source import LLAMA_ARGS, random_source

GOLDEN = ROOT / "tests/golden" / "megatron_lm"
TORCH_DIST = sorted(
    path.parent for path in GOLDEN.glob("mcore_*/*/torch_dist*/iter_0000005/.metadata")
)
IDS = ["-".join(path.parts[-4:-1]) for path in TORCH_DIST]


def legacy_sibling(iteration: Path) -> Path:
    return iteration.parents[1] / "legacy" / iteration.name


@pytest.mark.parametrize("directory", TORCH_DIST, ids=IDS)
def test_all_forms_of_a_state_are_equal_in_model_space(directory):
    source = TorchDistSource(directory)
    legacy = LegacySource(legacy_sibling(directory))
    assert_same(read_all(source), read_all(legacy))
    assert len(source.tensors) % 4 == 0, "a weight, a main parameter and two moments each"
    assert source.training.param_groups == legacy.training.param_groups
    assert source.training.scheduler == legacy.training.scheduler
    assert (source.training.iteration, source.training.consumed_train_samples) == (5, 40)
    assert source.unused == legacy.unused == []


@pytest.mark.parametrize("directory", TORCH_DIST, ids=IDS)
def test_written_legacy_directory_equals_megatrons(directory, tmp_path):
    source = TorchDistSource(directory)
    write_legacy(source, tmp_path / "out", Layout.from_args(source.args))
    theirs = sorted(legacy_sibling(directory).rglob("*.pt"))

    assert theirs
    assert len(theirs) == len(list((tmp_path / "out").rglob("*.pt")))

    for path in theirs:
        expected = safe_load(path)
        got = safe_load(tmp_path / "out" / path.parent.name / path.name)
        for content in (expected, got):
            content.pop("rerun_state_machine", None)
            if "args" in content:
                content["args"] = comparable(content["args"])
            sharded = content.get("optimizer", {}).get("optimizer", {})
            if "state" not in sharded and "param_groups" in sharded:
                sharded["param_groups"] = by_weight_decay(sharded["param_groups"])

        if "args" in got:
            assert_equal(own_generators(source, path.parent.name), got["rng_state"], "rng_state")
            assert_equal(seeds(expected.pop("rng_state")), seeds(got.pop("rng_state")), "seeds")
            assert got["args"].pop("model_vocab_size") == 288
            assert got["args"]["norm_epsilon"] == expected["args"].setdefault("norm_epsilon", 1e-5)
            if not expected["args"]["group_query_attention"]:  # theirs is 1, and is not used
                expected["args"]["num_query_groups"] = expected["args"]["num_attention_heads"]

        assert_equal(expected, got, path.name)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"layernorm_epsilon": 1e-6}, 1e-6),
        ({"norm_epsilon": 1e-7}, 1e-7),
        ({"layernorm_epsilon": 1e-6, "norm_epsilon": 1e-7}, 1e-7),
    ],
)
def test_older_name_of_norm_epsilon_is_read(stored, expected):
    args = Namespace(num_layers=1, hidden_size=8, num_attention_heads=2, **stored)
    assert (
        read_arguments({"args": args, "checkpoint_version": 3.0}, "here")["norm_epsilon"]
        == expected
    )


def own_generators(source, folder):
    """Return the generators of this form: its sibling was saved later, after they had advanced."""
    tp = int(folder[8:10])
    pp = int(folder[11:] or 0)
    sizes = source.args["pipeline_model_parallel_size"], source.args["tensor_model_parallel_size"]
    return source.training.rng[f"rng_state/shard_{pp}.{tp}_{sizes[0]}.{sizes[1]}"]()


def seeds(state):
    return {name: value[:8] for name, value in state[0]["rng_tracker_states"].items()}


def comparable(args):
    """Return the arguments without those that differ between the sibling runs, and enums."""
    own = {
        "save",
        "ckpt_format",
        "use_dist_ckpt",
        "dist_ckpt_optim_fully_reshardable",
        "rank",
        "local_rank",
    }
    own |= {"attention_backend", "model_type", "inference_cuda_graph_scope"}
    return {name: value for name, value in vars(args).items() if name not in own}


def assert_equal(expected, got, where):
    """Compare structure, the order of names in a model, and bits."""
    assert type(expected) is type(got) or isinstance(expected, dict), where

    if isinstance(expected, torch.Tensor):
        assert expected.dtype == got.dtype, where
        assert torch.equal(expected, got), where
    elif isinstance(expected, dict):
        assert set(expected) == set(got), where
        if where.endswith(("model", "model0", "model1")):
            assert list(expected) == list(got), where
        for key in expected:
            assert_equal(expected[key], got[key], f"{where}/{key}")
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(expected, got), where
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(got), where
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_equal(a, b, f"{where}/{index}")
    else:
        assert expected == got, where


def by_weight_decay(groups):
    """Sort the groups by weight decay; 0.12 has them in either order."""
    return sorted(groups, key=lambda group: -group["wd_mult"])


def list_reshardings():
    """Return (case, TP, PP, VPP): Llama at all layouts, the others where they differ from it.

    A pipeline separates the tied embeddings of GPT-2; the state of an unsharded optimizer is cut
    by TP.
    """
    cases = []
    for tp, pp, vpp in ((1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 2, 2)):
        cases.append(("llama_fp32_tp2pp2", tp, pp, vpp))
        for case, is_default in (
            ("gpt2_fp32_tp2pp2", pp > 1),
            ("llama_bf16_tp2_nodistopt", tp > 1),
        ):
            marks = [] if is_default else [pytest.mark.slow]
            cases.append(pytest.param(case, tp, pp, vpp, marks=marks))
    return cases


@pytest.mark.parametrize("case,tp,pp,vpp", list_reshardings())
def test_resharding_round_trip_is_bitwise(case, tp, pp, vpp, tmp_path):
    source = LegacySource(GOLDEN / "mcore_0.16.1" / case / "legacy/iter_0000005")
    expected = read_all(source)
    write_legacy(source, tmp_path / "reshaped", Layout.of(4, tp, pp, vpp))
    reshaped = LegacySource(tmp_path / "reshaped")
    assert_same(read_all(reshaped), expected)

    write_torch_dist(reshaped, tmp_path / "torch_dist", files=2)
    back = TorchDistSource(tmp_path / "torch_dist")
    assert_same(read_all(back), expected)
    assert back.training.param_groups == source.training.param_groups


def test_plain_dcp_reads_our_files(tmp_path):
    source = LegacySource(GOLDEN / "mcore_0.16.1/llama_fp32_tp2pp2/legacy/iter_0000005")
    write_torch_dist(source, tmp_path / "out", files=3)
    expected = read_all(source)
    state = {key: torch.empty_like(value) for key, value in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    assert_same(state, expected)


def test_read_box_across_pieces():
    source = TorchDistSource(
        GOLDEN / "mcore_0.12.0/llama_fp32_tp2pp2/torch_dist_fully_sharded_model_space/iter_0000005"
    )
    key = "optimizer.state.exp_avg.decoder.layers.2.mlp.linear_fc1.weight"
    whole = read_whole(source, key)
    for offset, shape in [
        ((0, 0), (1, 1)),
        ((20, 3), (50, 9)),
        ((47, 0), (2, 16)),
        ((95, 15), (1, 1)),
    ]:
        slices = index_box(offset, shape)
        assert torch.equal(source.tensors[key].read(offset, shape), whole[slices])


def test_damaged_legacy_directories_are_refused(tmp_path):
    source = LegacySource(GOLDEN / "mcore_0.16.1/llama_fp32_tp2pp2/legacy/iter_0000005")
    write_legacy(source, tmp_path / "c", Layout.of(4, 2, 1))
    (tmp_path / "c/mp_rank_01/model_optim_rng.pt").rename(tmp_path / "moved.pt")

    with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng.pt is missing"):
        LegacySource(tmp_path / "c")

    whole = (tmp_path / "moved.pt").read_bytes()
    (tmp_path / "c/mp_rank_01/model_optim_rng.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not an intact torch.save archive"):
        LegacySource(tmp_path / "c")


def test_impossible_target_layout_is_refused():
    source = LegacySource(GOLDEN / "mcore_0.16.1/llama_fp32_tp2pp2/legacy/iter_0000005")
    with pytest.raises(ValueError, match="not divisible"):
        write_legacy(source, Path("/nowhere"), Layout.of(source.args["num_layers"], 4, 1))
    with pytest.raises(ValueError, match="3"):
        Layout.of(4, 1, 3)


def _wrapped(optimizer: dict) -> dict:
    return {"optimizer": [optimizer]}


LEGACY_DAMAGE = [
    (lambda content: content.update(optimizer=[]), "optimizer"),
    (
        lambda content: content.update(
            optimizer={0: content["optimizer"], "a": content["optimizer"]}
        ),
        "optimizer",
    ),
    (lambda content: content.update(optimizer=[content["optimizer"]]), "optimizer"),
    (
        lambda content: content.update(optimizer=_wrapped(content["optimizer"])),
        "optimizer: optimizer",
    ),
    (
        lambda content: content["optimizer"]["state"][0].update(fp32_param=torch.zeros(2)),
        "fp32_param",
    ),
    (
        lambda content: vars(content["args"]).update(
            num_experts=4,
            expert_model_parallel_size="a",
            expert_tensor_parallel_size="b",
        ),
        "expert_model_parallel_size is 'a', but must be",
    ),
    (lambda content: vars(content["args"]).update(world_size=[1]), "world_size"),
]


@pytest.mark.parametrize("number", range(len(LEGACY_DAMAGE)))
def test_malformed_legacy_files_are_refused(tmp_path: Path, number: int) -> None:
    change, message = LEGACY_DAMAGE[number]
    write_legacy(
        random_source(LLAMA_ARGS | {"use_distributed_optimizer": False}),
        tmp_path / "run",
        Layout.of(2, 1, 1),
    )
    path = tmp_path / "run/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)

    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "run")


def test_tensor_step_becomes_a_number(tmp_path: Path) -> None:
    """Some optimizers of torch count in tensors."""
    write_legacy(
        random_source(LLAMA_ARGS | {"use_distributed_optimizer": False}),
        tmp_path / "run",
        Layout.of(2, 1, 1),
    )
    path = tmp_path / "run/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    for group in content["optimizer"]["param_groups"]:
        group |= {"step": torch.tensor(7.0), "wd_mult": torch.tensor(group["wd_mult"])}
    torch.save(content, path)
    groups = open_checkpoint(tmp_path / "run").training.param_groups
    assert [(group["step"], float(group["wd_mult"])) for group in groups] == [(7, 1.0), (7, 0.0)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "embedding.word_embeddings.weight",
            torch.tensor(1.0),
            r"has \[\] as embedding\.word_embeddings\.weight",
        ),
        (
            "decoder.layers.mlp.linear_fc1.weight",
            torch.tensor(1.0),
            "the arguments specify 2 layers",
        ),
        (
            "optimizer.state.step.output_layer.weight",
            torch.ones(67, 32),
            "whose state .*step.* is not supported",
        ),
        (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(x).bucket_idx_0.param",
            torch.ones(2, 2),
            "not flat",
        ),
    ],
)
def test_malformed_tensors_are_refused(
    tmp_path: Path, key: str, value: torch.Tensor, message: str
) -> None:
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_torch_dist(source, tmp_path / "plain")
    state = {
        name: ShardedTensor.replicated(name, tensor)
        for name, tensor in (source.values | {key: value}).items()
    }
    save(state, tmp_path / "run", common=load_common(tmp_path / "plain"))

    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "run")


def test_optimizer_of_core_0_7_is_read(tmp_path: Path) -> None:
    """Buffers of core 0.7 have no gaps; in later ones parameters start at multiples of 64."""
    args = LLAMA_ARGS | {"use_distributed_optimizer": True}
    source = random_source(args)
    write_legacy(source, tmp_path, Layout.of(args["num_layers"], 1, 1))
    folder = tmp_path / "mp_rank_00"
    model = torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
    sizes = [value.numel() for value in model.values() if isinstance(value, torch.Tensor)]

    content = torch.load(folder / "distrib_optim.pt", weights_only=False)
    (states,) = content[0].values()
    num_elements = states.pop("numel_unpadded")
    for name, aligned in states.items():
        pieces = []
        start = 0
        for size in reversed(sizes):  # buffers are in the reverse order of the modules
            start = -(-start // 64) * 64
            pieces.append(aligned[start : start + size])
            start += size
        assert start == num_elements
        states[name] = torch.cat(pieces)

    states["numel_unpadded"] = sum(sizes)
    assert sum(sizes) < num_elements, "the aligned buffer has gaps"

    torch.save(content, folder / "distrib_optim.pt")
    assert_same(read_all(LegacySource(tmp_path)), read_all(source))

    del content["buckets_coalesced"]  # core 0.6 and earlier
    torch.save(content, folder / "distrib_optim.pt")
    with pytest.raises(CheckpointError, match="not one buffer of coalesced buckets.*--no-optim"):
        LegacySource(tmp_path)


def test_optimizer_gathered_on_a_rank_is_refused(tmp_path: Path) -> None:
    """Without --ckpt-fully-parallel-save, older releases store it as an object, which was lost."""
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_torch_dist(source, tmp_path / "plain")
    state = {name: ShardedTensor.replicated(name, value) for name, value in source.values.items()}
    key = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    gathered = ShardedObject(key, {"buckets_coalesced": True})
    save(state | {key: gathered}, tmp_path / "run", common=load_common(tmp_path / "plain"))

    with pytest.raises(CheckpointError, match=r"gathered on a rank \(.*--no-optim"):
        open_checkpoint(tmp_path / "run")

    weights = open_checkpoint(tmp_path / "run", read_options=ReadOptions(no_optim=True))
    assert_same(read_all(weights), read_all(source))
