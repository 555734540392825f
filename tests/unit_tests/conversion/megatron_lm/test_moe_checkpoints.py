"""Models with experts in Megatron-LM's files: all forms are equal, and our files equal its own."""

import dataclasses
import math
import shutil

import pytest
import torch

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist_writer import StackedLayers, write_torch_dist
from megatron.conversion.model_space.layouts import Layout, plan_load, rank_parameters
from megatron.conversion.model_space.model import model_config
from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedTensor,
    load_common,
    read_metadata,
    save,
)
from megatron.core.run_checkpoint.formats import find_checkpoint, find_problem, open_found
from megatron.core.run_checkpoint.keys import is_extra_state
from megatron.core.run_checkpoint.native_reader import RunCheckpoint
from megatron.core.safe_files import safe_load
from tests.support.compare import assert_same, read_all
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.unpacked import unpacked
from tests.unit_tests.conversion.megatron_lm.test_megatron_checkpoints import (
    assert_equal,
    comparable,
)

WEIGHTS = 17  # of the model: an embedding, two layers of seven, a norm, a head


@pytest.fixture
def archive(tmp_path_factory):
    return lambda name: unpacked(tmp_path_factory, f"megatron_moe/mixtral_fp32/{name}")


# (a form, another of the same run)
SIBLINGS = [
    ("single_legacy", "single_fully_reshardable"),
    ("ep2_dp_reshardable", "ep2_te_norm_keys"),
    ("tp2ep2etp2_legacy", "tp2ep2etp2_dp_reshardable"),
]


@pytest.mark.parametrize("form,other", SIBLINGS)
def test_all_forms_of_a_state_are_equal_in_model_space(archive, form, other):
    """Experts in a separate or a shared buffer, transposed over ETP or whole, in any file."""
    one = open_checkpoint(archive(form))
    two = open_checkpoint(archive(other))

    assert len(one.tensors) == 4 * WEIGHTS
    assert one.unused == two.unused == []
    assert one.tensors["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (
        4,
        64,
        16,
    )
    assert_same(read_all(one), read_all(two))
    assert one.training.param_groups == two.training.param_groups
    assert len(one.training.param_groups) == 2
    assert (one.training.iteration, one.training.consumed_train_samples) == (5, 40)


def test_lost_file_of_an_expert_rank_is_reported(archive, tmp_path):
    """Directories are named after the expert rank as well."""
    whole = require_checkpoint(archive("tp2ep2etp2_legacy")).directory
    assert find_problem(whole) is None
    shutil.copytree(whole, tmp_path / "run")
    lost = sorted((tmp_path / "run").glob("mp_rank_*"))[-1]
    shutil.rmtree(lost)
    assert f"{lost.name}/model_optim_rng.pt is missing" in find_problem(tmp_path / "run")


def test_read_without_distributed_optimizer(archive):
    """Numbered states of dense layers and of experts, each counted from 0."""
    source = open_checkpoint(archive("ep2_nodistopt_legacy"))
    assert len(source.tensors) == 4 * WEIGHTS
    assert source.unused == []

    weights = {
        key: value for key, value in read_all(source).items() if not key.startswith("optimizer.")
    }
    other = open_checkpoint(archive("ep2_dp_reshardable"))
    for key, value in weights.items():  # another run of the same model: to rounding
        assert (
            value - other.tensors[key].read((0,) * value.dim(), tuple(value.shape))
        ).abs().max() < 1e-6


# (a form to write from, files of Megatron-LM with the same state, their names)
THEIR_FILES = [
    ("mixtral_fp32/single_fully_reshardable", "mixtral_fp32/single_legacy", 2),
    ("mixtral_fp32/tp2ep2etp2_dp_reshardable", "mixtral_fp32/tp2ep2etp2_legacy", 8),
    ("mixtral_fp32/ep2_nodistopt_legacy", "mixtral_fp32/ep2_nodistopt_legacy", 2),
    ("deepseek_fp32/pp2ep2_legacy", "deepseek_fp32/pp2ep2_legacy", 8),
]


@pytest.mark.parametrize("form,legacy,count", THEIR_FILES)
def test_written_legacy_files_equal_megatrons(tmp_path_factory, tmp_path, form, legacy, count):
    """Bitwise, in its order of modules and of flat optimizer state, for every rank."""
    source = open_checkpoint(unpacked(tmp_path_factory, f"megatron_moe/{form}"))
    write_legacy(source, tmp_path / "out", Layout.from_args(source.args))
    theirs = sorted(unpacked(tmp_path_factory, f"megatron_moe/{legacy}").rglob("*.pt"))
    assert len(theirs) == count

    for path in theirs:
        expected = safe_load(path)
        got = safe_load(tmp_path / "out" / path.parent.name / path.name)
        for content in [content for content in (expected, got) if "args" in content]:
            content.pop("rerun_state_machine", None)
            content.pop("rng_state", None)
            content["args"] = comparable(content["args"])
        if "args" in got:
            assert got["args"].pop("model_vocab_size") == 288
            assert got["args"].pop("norm_epsilon") == expected["args"]["layernorm_epsilon"]
        assert_equal(expected, got, path.name)


@pytest.mark.parametrize(
    "model,form",
    [("mixtral_fp32", "ep2_te_norm_keys"), ("deepseek_fp32", "ep2_dp_reshardable")],
)
def test_extra_states_and_expert_optimizer_are_written(tmp_path_factory, tmp_path, model, form):
    """An empty entry for each expert; with EP 2 a separate optimizer for experts."""
    root = unpacked(tmp_path_factory, f"megatron_moe/{model}/{form}")
    source = open_checkpoint(root)
    checkpoint = root / "iter_0000005"
    stacked = model == "mixtral_fp32"
    write_torch_dist(StackedLayers(source) if stacked else source, tmp_path / "ours")
    theirs = {key for key in read_metadata(checkpoint).objects if is_extra_state(key)}

    assert any(key.endswith("_2.4" if stacked else "_8") for key in theirs)
    assert theirs <= set(read_metadata(tmp_path / "ours").objects)

    written = load_common(tmp_path / "ours")["optimizer"]
    groups = [
        group for optimizer in written.values() for group in optimizer["optimizer"]["param_groups"]
    ]
    assert [group["is_expert_parallel"] for group in groups] == [False, False, True]
    if stacked:  # the other form has its groups elsewhere
        assert written == load_common(checkpoint)["optimizer"]


def test_run_of_an_earlier_version_is_read(archive, tmp_path):
    """It used another key for the norm before experts."""
    write_torch_dist(open_checkpoint(archive("single_fully_reshardable")), tmp_path / "now")
    now = open_found(find_checkpoint(tmp_path / "now"))
    assert isinstance(now, RunCheckpoint)

    norm = "pre_mlp_layernorm.weight"
    earlier = "mlp.linear_fc1.layer_norm_weight"
    values = read_all(now)
    state = [
        ShardedTensor.replicated(key.replace(norm, earlier), value) for key, value in values.items()
    ]
    common = load_common(tmp_path / "now")
    save({entry.key: entry for entry in state}, tmp_path / "earlier", common=common)

    assert f"decoder.layers.1.{earlier}" in read_metadata(tmp_path / "earlier").tensors
    assert_same(
        read_all(open_found(find_checkpoint(tmp_path / "earlier"))),
        values,
    )


def test_load_plan_counts_every_expert(archive):
    source = open_checkpoint(archive("single_legacy"))
    weights = [info for key, info in source.tensors.items() if not key.startswith("optimizer.")]
    (whole,) = plan_load(source, Layout.of(2, 1, 1))
    assert whole.parameters == sum(math.prod(info.shape) for info in weights)
    halves = plan_load(source, Layout.of(2, 2, 1))
    experts = sum(math.prod(info.shape) for info in weights if len(info.shape) == 3)
    assert all(half.parameters < whole.parameters - experts // 2 for half in halves)


def test_sidecar_of_a_mixtral_round_trip(archive, tmp_path):
    """The unused width of dense layers does not count as a difference of shape."""
    source = open_checkpoint(archive("tp2ep2etp2_legacy"))
    convert(
        archive("tp2ep2etp2_legacy"),
        tmp_path / "hf",
        "hf",
        options=WriteOptions(optim_sidecar=True),
    )
    convert(tmp_path / "hf", tmp_path / "back", "torch_dist")
    assert compare(source, open_checkpoint(tmp_path / "back")) == 4 * WEIGHTS


@pytest.mark.parametrize(
    "tp,pp,ep,etp",
    [(1, 1, 1, None), (2, 1, 1, None), (1, 2, 1, None), (2, 2, 4, 1)],
)
def test_resharding_round_trip_is_bitwise(archive, tmp_path, tp, pp, ep, etp):
    """Convert from EP 2 and ETP 2 to legacy files at other layouts, then to torch_dist."""
    source = open_checkpoint(archive("tp2ep2etp2_dp_reshardable"))
    expected = read_all(source)
    write_legacy(source, tmp_path / "iter_0000005", Layout.of(2, tp, pp, experts=(ep, etp)))
    reshaped = open_checkpoint(tmp_path / "iter_0000005")

    assert reshaped.args["expert_model_parallel_size"] == ep
    assert_same(read_all(reshaped), expected)

    write_torch_dist(reshaped, tmp_path / "torch_dist/iter_0000005")
    assert_same(read_all(open_checkpoint(tmp_path / "torch_dist/iter_0000005")), expected)


def test_layouts_without_unique_directories_are_refused(archive, tmp_path):
    """Two ranks of one (tp, pp, ep), or a dense rank that writes no directory."""
    source = open_checkpoint(archive("single_legacy"))
    for tp, ep, etp in ((1, 2, 2), (4, 2, 1)):
        with pytest.raises(
            ValueError,
            match=f"TP {tp} with expert tensor parallelism {etp} and expert parallelism {ep}",
        ):
            write_legacy(source, tmp_path / "out", Layout.of(2, tp, 1, experts=(ep, etp)))

    assert not list(tmp_path.iterdir())


def test_legacy_grouped_gemm_experts_are_read(archive, tmp_path):
    """One tensor for all experts of a rank, each transposed; their optimizer is refused."""
    plain = open_checkpoint(archive("single_legacy"))
    for etp in (1, 2):
        directory = tmp_path / f"etp{etp}" / "iter_0000005"
        write_legacy(plain, directory, Layout.of(2, etp, 1))

        for path in directory.glob("mp_rank_*/model_optim_rng.pt"):
            content = torch.load(path, weights_only=False)
            model = content["model"]
            layers = [
                name.removesuffix("router.weight")
                for name in model
                if name.endswith("router.weight")
            ]
            for layer in layers:
                names = [f"{layer}experts.local_experts.{{}}.linear_fc{n}.weight" for n in (1, 2)]
                first, second = (
                    torch.stack([model.pop(name.format(e)).t() for e in range(4)]) for name in names
                )
                model[f"{layer}experts.weight1"] = first.view(16, -1).clone()  # [h, n * 2f]
                model[f"{layer}experts.weight2"] = second.view(-1, 16).clone()  # [n * f, h]

            torch.save(content, path)

        source = open_checkpoint(directory.parent, read_options=ReadOptions(no_optim=True))
        weights = {
            key: value for key, value in read_all(plain).items() if not key.startswith("optimizer.")
        }
        assert_same(read_all(source), weights)

        with pytest.raises(
            CheckpointError,
            match="gemm is transposed like their weights and is not read: leave it",
        ):
            open_checkpoint(directory.parent)

    for path in directory.glob("mp_rank_*/model_optim_rng.pt"):  # of a run with --no-save-optim
        content = torch.load(path, weights_only=False)
        path.with_name("distrib_optim.pt").unlink(missing_ok=True)
        torch.save({name: value for name, value in content.items() if name != "optimizer"}, path)

    assert_same(read_all(open_checkpoint(directory.parent)), weights)

    content["model"][f"{layer}experts.weight1"] = torch.zeros(16, 100)
    torch.save(content, path)

    with pytest.raises(
        CheckpointError,
        match=r"experts.weight1 has shape \(16, 100\), but the stored arguments make",
    ):
        open_checkpoint(directory.parent, read_options=ReadOptions(no_optim=True))


@pytest.mark.parametrize("distributed", [True, False])
def test_experts_with_biases_have_two_parameter_groups(tmp_path, distributed):
    """The biases are those of gpt-oss, with EP 2."""
    sizes = {"num_experts": 4, "moe_ffn_hidden_size": 24, "use_distributed_optimizer": distributed}
    source = random_source(LLAMA_ARGS | sizes | {"add_bias_linear": True})
    assert "decoder.layers.0.mlp.experts.experts.linear_fc1.bias" in source.values

    write_legacy(source, tmp_path / "legacy", Layout.of(2, 1, 1, experts=(2, None)))
    legacy = open_checkpoint(tmp_path / "legacy")
    assert compare(source, legacy) == len(source.tensors)
    assert len(legacy.training.param_groups) == 2

    write_torch_dist(legacy, tmp_path / "torch_dist")
    dense, experts = load_common(tmp_path / "torch_dist")["optimizer"].values()
    assert [group["wd_mult"] for group in experts["optimizer"]["param_groups"]] == [1.0, 0.0]
    assert {group["is_expert_parallel"] for group in experts["optimizer"]["param_groups"]} == {True}
    assert {group["is_expert_parallel"] for group in dense["optimizer"]["param_groups"]} == {False}


def test_rows_that_local_modules_cannot_split_are_refused(tmp_path_factory, tmp_path):
    """Their latent attention splits the key inputs over TP, so no row may be dropped."""
    source = open_checkpoint(unpacked(tmp_path_factory, "megatron_moe/deepseek_fp32/pp2ep2_legacy"))
    layout = Layout.of(source.args["num_layers"], 2, 1, experts=(1, None))
    source.args |= {"transformer_impl": "local", "tensor_model_parallel_size": 2}
    config = model_config(source.args, 288, "a model")
    odd = dataclasses.replace(config, kv_lora_rank=config.kv_lora_rank + 1)

    with pytest.raises(
        ValueError,
        match="linear_kv_down_proj.weight has .* rows, which 2 ranks cannot split evenly",
    ):
        rank_parameters(odd, layout, 0, 0, args=source.args)
