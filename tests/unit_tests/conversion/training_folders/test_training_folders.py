"""Checkpoints of programs that train models of transformers (see golden/training_folders)."""

import json
import pickle
import shutil
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.formats import NoCheckpointError
from tests.support.training_folders import FOLDERS, assert_is_gathered
from tests.support.unpacked import unpacked
from tests.unit_tests.conversion.deepspeed.test_universal import adamw
from tests.unit_tests.conversion.filled_model import chunk


def copy_golden(name, tmp_path, tmp_path_factory):
    """Return a copy of a golden folder, and the tensors in it as the program gathers them."""
    root = shutil.copytree(unpacked(tmp_path_factory, f"training_folders/{name}"), tmp_path / name)
    expected = torch.load(root / "expected.pt", weights_only=True)
    (root / "expected.pt").unlink()
    return root / FOLDERS[name], expected


@pytest.fixture
def folder(tmp_path, tmp_path_factory):
    """A copy of the folder of FSDP 2."""
    directory, _ = copy_golden("accelerate_fsdp2", tmp_path, tmp_path_factory)
    return directory.rename(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_and_moments_are_those_of_the_gathered_state(name, tmp_path, tmp_path_factory):
    directory, expected = copy_golden(name, tmp_path, tmp_path_factory)
    assert_is_gathered(directory, expected, tmp_path)


@pytest.mark.parametrize("decay_of_norms", [0.0, 0.1])
def test_training_continues_as_in_torch(decay_of_norms, tmp_path, tmp_path_factory):
    """Covers weights, both moments, the step and the groups."""
    directory, expected = copy_golden("accelerate_fsdp2", tmp_path, tmp_path_factory)
    if decay_of_norms:
        group = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        shutil.rmtree(directory / "optimizer_0")
        groups = [group | {"params": list(expected["model"])}]
        state = {"state": expected["optimizer"], "param_groups": groups}
        torch.save(state, directory / "optimizer.bin")

    source = open_checkpoint(directory)
    model = chunk(source, main=True)
    optimizer = adamw(model, source)

    # The model of transformers with the optimizer of torch
    reference = LlamaForCausalLM(LlamaConfig.from_pretrained(directory))
    reference.load_state_dict(expected["model"])
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": decay_of_norms}]
    for name, parameter in reference.named_parameters():
        groups["norm" in name]["params"].append(parameter)
    torch_optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for name, parameter in reference.named_parameters():
        torch_optimizer.state[parameter] = expected["optimizer"][name]

    tokens = torch.arange(34).view(2, 17) % 29
    positions = torch.arange(16).expand(2, -1)
    for _ in range(3):
        loss = model(tokens[:, :-1], positions, labels=tokens[:, 1:]).mean()
        reference_loss = reference(input_ids=tokens, labels=tokens).loss
        assert loss.item() == pytest.approx(reference_loss.item(), abs=1e-6)
        for step_loss, step_optimizer in ((loss, optimizer), (reference_loss, torch_optimizer)):
            step_optimizer.zero_grad()
            step_loss.backward()
            step_optimizer.step()


def test_whole_state_of_accelerate_is_read(folder, tmp_path, tmp_path_factory):
    """FULL_STATE_DICT: the dictionaries that torch gathers, in files of torch.save."""
    _, expected = copy_golden("accelerate_fsdp2", tmp_path, tmp_path_factory)
    decayed = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": []}
    groups = [decayed, decayed | {"weight_decay": 0.0, "params": []}]
    for name in expected["model"]:
        groups["norm" in name]["params"].append(name)
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.rmtree(folder / name)
    torch.save(expected["model"], folder / "pytorch_model_fsdp.bin")
    state = {"state": expected["optimizer"], "param_groups": groups}
    torch.save(state, folder / "optimizer.bin")
    assert_is_gathered(folder, expected, tmp_path)


def test_optimizer_without_weight_decay_keeps_its_hyperparameters(folder, tmp_path_factory):
    """The default of the trainer of transformers is 0."""
    groups = [{"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.0, "params": []}]
    _, expected = copy_golden("accelerate_fsdp2", folder.parent, tmp_path_factory)
    shutil.rmtree(folder / "optimizer_0")
    state = {"state": expected["optimizer"], "param_groups": groups}
    torch.save(state, folder / "optimizer.bin")

    for group in open_checkpoint(folder).training.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-7)
        assert group["weight_decay"] == 0.0


def test_folder_becomes_a_checkpoint_of_a_run(folder, tmp_path):
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 0.5}))
    convert(folder, tmp_path / "run", "torch_dist")
    run = open_checkpoint(tmp_path / "run")
    source = open_checkpoint(folder)

    assert compare(source, run) == len(source.tensors) == 4 * 15
    assert run.training.iteration == 5

    weights = open_checkpoint(folder, read_options=ReadOptions(no_optim=True))
    assert len(weights.tensors) == 15
    assert weights.training.param_groups is None


def test_folder_without_the_model_names_the_missing_file(folder):
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"there is no config.json in .*: copy it there, or"):
        open_checkpoint(folder)

    (folder.parent / "config.json").write_text(config)
    options = ReadOptions(hf_config=folder.parent)
    assert len(open_checkpoint(folder, read_options=options).tensors) == 4 * 15

    (folder.parent / "config.json").unlink()
    with pytest.raises(NoCheckpointError, match="give one of them, e.g. .*checkpoint-2"):
        open_checkpoint(folder.parent)


def test_other_models_and_optimizers_are_rejected(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ValueError, match="config.json and weights are of different models"):
        open_checkpoint(folder)

    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(folder / "optimizer_0")
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "optimizer_0")

    with pytest.raises(CheckpointError, match="leave the optimizer out"):
        open_checkpoint(folder)


@pytest.fixture
def actor(tmp_path, tmp_path_factory):
    """A copy of the folder of verl with FSDP 2, in the directory `verl_fsdp2`."""
    directory, _ = copy_golden("verl_fsdp2", tmp_path, tmp_path_factory)
    return directory


def test_verl_decays_all_parameters(actor):
    source = open_checkpoint(actor)
    assert source.unused == ["state: lr_scheduler, rng"]
    groups = source.training.param_groups
    assert [group["wd_mult"] for group in groups] == [1.0, 1.0]
    assert groups[0]["weight_decay"] == groups[1]["weight_decay"] > 0


def test_verl_folder_without_a_rank_is_rejected(actor):
    root = actor.parents[1]
    for tracker in (None, root / "latest_checkpointed_iteration.txt"):  # verl writes one, too
        if tracker is not None:
            tracker.write_text("2")
        with pytest.raises(NoCheckpointError, match="has checkpoints of verl: .* e.g. .*/actor"):
            open_checkpoint(root)

    other_rank = actor / "model_world_size_2_rank_1.pt"
    shutil.copy(actor / "model_world_size_2_rank_0.pt", other_rank)
    with pytest.raises(CheckpointError, match="rank 0 has shape .* or some are missing"):
        open_checkpoint(actor)

    other_rank.unlink()

    with pytest.raises(
        CheckpointError,
        match=r"lacks 1 of 2 files, e.g. model_world_size_2_rank_1",
    ):
        open_checkpoint(actor)


def set_step(step, content):
    for state in content["state"].values():
        state["step"] = step


def add_to_group(parameter, content):
    content["param_groups"][0]["params"][0] = parameter


def shift_states(content):
    states = content["state"]
    content["state"] = {index + 1: state for index, state in states.items()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (partial(set_step, torch.tensor(float("inf"))), "step of .* is inf, but must be a finite"),
        (partial(set_step, torch.tensor(1j)), "step of .* is 1j, but must be a finite"),
        (partial(set_step, torch.zeros(3)), r"step of .* is \(3,\), but must be one number"),
        (partial(add_to_group, "0"), r"params\[0\] is '0', but must be a whole number"),
        (partial(add_to_group, [0]), r"params\[0\] is \[0\], but must be a whole number"),
        (shift_states, "not numbered like the 3 parameters of the model: leave the optimizer"),
    ],
)
def test_damaged_optimizers_of_verl_are_rejected(change, problem, tmp_path, tmp_path_factory):
    directory, _ = copy_golden("verl_fsdp1", tmp_path, tmp_path_factory)
    for rank in range(2):
        path = directory / f"optim_world_size_2_rank_{rank}.pt"
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(directory)


def test_verl_optimizer_of_original_parameters_is_read(tmp_path, tmp_path_factory):
    """`use_orig_params` of FSDP 1: a rank has no state of a parameter without its elements."""
    directory, expected = copy_golden("verl_fsdp1", tmp_path, tmp_path_factory)
    names = list(torch.load(directory / "model_world_size_2_rank_0.pt", weights_only=False))
    states = [{}, {}]
    for index, name in enumerate(names):
        state = expected["optimizer"][name]
        flat = {key: state[key].flatten() for key in ("exp_avg", "exp_avg_sq")}
        if index > 0:
            states[index % 2][index] = {"step": state["step"], **flat}
            continue
        # The ranks share the elements of the first parameter.
        for rank, elements in enumerate((slice(5), slice(5, None))):
            shard = {key: value[elements].clone() for key, value in flat.items()}
            states[rank][index] = {"step": state["step"], **shard}

    for rank in range(2):
        path = directory / f"optim_world_size_2_rank_{rank}.pt"
        content = torch.load(path, weights_only=False)
        group = content["param_groups"][0]
        group["params"] = list(range(len(names)))
        torch.save({"state": states[rank], "param_groups": [group]}, path)

    assert_is_gathered(directory, expected, tmp_path)


def test_verl_folder_without_ranks_is_rejected(actor):
    for path in actor.glob("model_world_size_*"):
        path.unlink()
    names = {0: "the weights of .* ranks", 999_999: "at most 100000 .*MEGATRON_MAX_RANKS"}
    for world_size, problem in names.items():
        path = actor / f"model_world_size_{world_size}_rank_0.pt"
        path.touch()
        with pytest.raises(CheckpointError, match=problem):
            open_checkpoint(actor)
        path.unlink()


def test_other_models_of_olmo_core_are_rejected(tmp_path, tmp_path_factory):
    directory, _ = copy_golden("olmo_core", tmp_path, tmp_path_factory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    block = config["model"]["block"]
    block["sequence_mixer"]["sliding_window"] = {"pattern": [4096, -1]}
    path.write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match="attention has sliding_window = .*, which is not"):
        open_checkpoint(directory)

    del block["sequence_mixer"]["sliding_window"]
    path.write_text(
        json.dumps(config | {"model": config["model"] | {"block": block | {"name": "peri"}}})
    )
    with pytest.raises(CheckpointError, match="blocks 'peri' with norms of queries and keys"):
        open_checkpoint(directory)


def test_parts_of_automodel_must_cover_the_tensors(tmp_path, tmp_path_factory):
    directory, _ = copy_golden("automodel", tmp_path, tmp_path_factory)
    files = sorted((directory / "model").glob("shard-*.safetensors"))
    files[1].unlink()
    config = directory / "model/.hf_metadata/config.json"

    assert config.is_file()
    with pytest.raises(ValueError, match="weights are of different models"):
        open_checkpoint(directory)

    files[0].unlink()
    with pytest.raises(NoCheckpointError, match="no checkpoint in a known format"):
        open_checkpoint(directory)


def test_parts_of_automodel_must_not_overlap(tmp_path, tmp_path_factory):
    """Two parts that overlap, and leave as many elements out: their number alone is right."""
    directory, _ = copy_golden("automodel", tmp_path, tmp_path_factory)
    last = sorted((directory / "model").glob("shard-*.safetensors"))[-1]
    with safe_open(last, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(last)
    offsets = json.loads(metadata["DCP_SHARDING_INFO"])
    name = "model.layers.0.mlp.down_proj.weight"
    value = tensors[name]
    assert offsets[name]["saved_offsets"] == [len(value), 0]

    tensors[name] = value.reshape(2 * len(value), -1)
    offsets[name]["saved_offsets"] = [0, value.shape[1] // 2]
    save_file(tensors, last, metadata | {"DCP_SHARDING_INFO": json.dumps(offsets)})

    with pytest.raises(CheckpointError, match=f"parts of {name} do not cover its shape"):
        open_checkpoint(directory)


def test_other_layouts_of_torch_checkpointing_are_rejected(tmp_path, tmp_path_factory):
    directory, _ = copy_golden("torch_checkpointing", tmp_path, tmp_path_factory)
    path = directory / "metadata.pkl"
    metadata = pickle.loads(path.read_bytes())
    layouts = metadata["metadata"]["model"]["rank_to_layout_info"]
    layouts[0] = {"file_path": "weights.pt", "serialization_format": {"type": "TorchSerialization"}}
    path.write_bytes(pickle.dumps(metadata))

    with pytest.raises(CheckpointError, match=r"files of its own names: only model_RANK\.pt"):
        open_checkpoint(directory)

    layouts.clear()
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="model has no ranks"):
        open_checkpoint(directory)

    del metadata["metadata"]["model"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="has the items optimizer, but no 'model'"):
        open_checkpoint(directory)
