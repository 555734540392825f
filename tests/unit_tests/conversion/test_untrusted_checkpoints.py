"""Paths in an untrusted checkpoint never leave the directories that the user named."""

import json
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.deepspeed.universal_writer import write_universal
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.model_tokenizer import ExportedTokenizer, copy_processor
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.options import EditOptions, ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.keys import PROCESSOR_FILES
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files.schema import plausible
from tests.support.limited_process import run_limited
from tests.support.memory_source import LLAMA_ARGS, random_source

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face model with the sidecar of a run."""
    write_huggingface(
        random_source(LLAMA_ARGS),
        tmp_path / "model",
        WriteOptions(optim_sidecar=True),
    )
    return tmp_path / "model"


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "iteration",
    ["VICTIM", "../../victim", -1, 2**70, float("nan"), 1.5, True, None, [1]],
)
@pytest.mark.parametrize("saver", ["torch_dist", "legacy", "universal"])
def test_iteration_must_not_be_a_path(iteration, saver: str, model: Path, tmp_path: Path) -> None:
    """It named the directory to be replaced, whose files were deleted."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("data")
    value = str(victim) if iteration == "VICTIM" else iteration
    edit(
        model / "megatron_state/state.json",
        lambda state: state["training"].update(iteration=value),
    )

    with pytest.raises(
        CheckpointError,
        match=r"state\.json: training: iteration is .*, but must be a whole number",
    ):
        convert(model, tmp_path / "out", saver, overwrite=True)

    assert (victim / "precious").read_text() == "data"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "victim"]


@pytest.mark.parametrize(
    "counters",
    [
        {"consumed_train_samples": -1},
        {"consumed_valid_samples": "7"},
        {"num_floating_point_operations_so_far": 1e400},
    ],
)
def test_counters_are_checked_in_every_format(counters: dict) -> None:
    with pytest.raises(CheckpointError, match="the training state: .* must be a"):
        TrainingState(**counters)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/dev/zero", "..", "", "a\nb", 7, None])
def test_file_names_must_not_be_paths(name, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "outside.safetensors")
    tensors = {"lm_head.weight": name}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))

    with pytest.raises(
        CheckpointError,
        match=r"index\.json: weight_map: lm_head\.weight is .* must be",
    ):
        convert(model, tmp_path / "out", "torch_dist")


def test_links_must_stay_in_the_directory_or_cache(model: Path, tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "shard.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model.safetensors").rename(model / "shard.safetensors")
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    snapshot = tmp_path / "models--a--b/snapshots/main"
    snapshot.parent.mkdir()
    (model / "shard.safetensors").rename(blobs / "0123")
    (model / "shard.safetensors").symlink_to(blobs / "0123")

    with pytest.raises(CheckpointError, match=r"shard\.safetensors is a link to .*, outside of"):
        convert(model, tmp_path / "out", "torch_dist")

    model.rename(snapshot)
    (snapshot / "shard.safetensors").unlink()
    (snapshot / "shard.safetensors").symlink_to("../../blobs/0123")
    assert convert(snapshot, tmp_path / "out", "torch_dist").num_tensors > 0


@pytest.mark.parametrize("name", ["../model", "/etc", ".", "a/b"])
def test_latest_universal_must_name_a_subdirectory(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another name is not followed: the newest checkpoint in the directory is used."""
    write_universal(random_source(LLAMA_ARGS), tmp_path / "universal")
    (tmp_path / "universal/latest_universal").write_text(name)
    convert(tmp_path / "universal", tmp_path / "out", "torch_dist")

    assert "latest_universal: the name in it is" in caplog.text
    assert "but must be the name of a file" in caplog.text
    assert f"taking {tmp_path}/universal/global_step" in caplog.text


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "../x", "/dev/zero"])
def test_pipes_and_devices_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    """Runs in a thread, which would otherwise wait forever."""
    state = model / "megatron_state/state.json"
    if name == "state.json":
        state.unlink()
        os.mkfifo(state)
    elif name == "optimizer.safetensors":
        (model / "megatron_state" / name).unlink()
        os.mkfifo(model / "megatron_state" / name)
    else:
        edit(state, lambda content: content.update(files=[name]))

    said: list[str] = []

    def attempt() -> None:
        try:
            convert(model, tmp_path / "out", "torch_dist")
        except CheckpointError as error:
            said.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=120)

    assert said
    assert "regular file" in said[0] or "the name of a file" in said[0]


# Files that are published with a model.


def exported(
    tmp_path: Path, args: dict, options: WriteOptions | None = None
) -> tuple[set[str], list[str]]:
    """Return the exported files of a run with these arguments, and the notes."""
    source = random_source(LLAMA_ARGS | args, optimizer=False)
    write_torch_dist(source, tmp_path / "run")
    outcome = convert(tmp_path / "run", tmp_path / "out", "hf", options=options)
    return {path.name for path in (tmp_path / "out").iterdir()}, outcome.not_carried


@pytest.mark.parametrize("kind", ["tokenizer_model", "vocab_file", "directory"])
def test_user_files_are_not_exported_as_tokenizer(kind: str, tmp_path: Path) -> None:
    """The checkpoint names files of the user as its tokenizer."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("id_rsa", "merges.txt", "vocab.json", "tokenizer.json", "chat_template.jinja"):
        (home / name).write_text(SECRET if name != "vocab.json" else json.dumps({"password": 1}))
    args = {
        "tokenizer_model": {"tokenizer_model": str(home / "id_rsa")},
        "vocab_file": {"vocab_file": str(home / "vocab.json"), "merge_file": str(home / "id_rsa")},
        "directory": {"tokenizer_model": str(home)},
    }[kind]
    files, lost = exported(tmp_path, args)

    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    assert lost
    assert all("outside of its directory; give --tokenizer" in line for line in lost)


def test_confirmed_tokenizer_path_must_be_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text(SECRET)
    files, lost = exported(tmp_path, {}, WriteOptions(tokenizer=tmp_path / "id_rsa"))
    assert "tokenizer.model" not in files
    assert "is not a SentencePiece model" in lost[0]


def test_only_tokenizer_files_are_copied_and_reported(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (tokenizer / "chat_template.jinja").write_text(SECRET)
    (tokenizer / "merges.txt").write_text(SECRET)
    notes: list[str] = []
    files, lost = exported(tmp_path, {}, WriteOptions(tokenizer=tokenizer, note=notes.append))

    assert files >= {"tokenizer.json"}
    assert not files & {"chat_template.jinja", "merges.txt"}
    assert len(lost) == 2
    assert notes == [f"tokenizer: {tokenizer / 'tokenizer.json'} -> tokenizer.json"]


def test_links_out_of_a_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"model": {}, "password": 1}')
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to"):
        exported(tmp_path, {}, WriteOptions(tokenizer=tmp_path / "tokenizer"))


# Planted links, sizes, headers, names.


def test_target_of_a_planted_link_is_kept(model: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("data")
    (tmp_path / ".out.converting").symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.out\.converting is a link"):
        convert(model, tmp_path / "out", "torch_dist")
    assert (victim / "precious").read_text() == "data"


@pytest.mark.parametrize(
    "field, value, wanted",
    [
        (
            "num_hidden_layers",
            10**8,
            r"at most 10000 \(the environment variable MEGATRON_MAX_LAYERS raises the limit",
        ),
        ("num_hidden_layers", 2**40, "at most 10000"),
        (
            "hidden_size",
            2**40,
            r"at most 2147483647 \(the environment variable MEGATRON_MAX_SIZE raises the limit",
        ),
        ("vocab_size", -1, "a whole number"),
    ],
)
def test_implausible_sizes_are_refused(
    field: str, value: int, wanted: str, model: Path, tmp_path: Path
) -> None:
    """A loop over 10^8 layers would run out of memory."""
    edit(model / "config.json", lambda config: config.update({field: value}))

    with pytest.raises(
        CheckpointError,
        match=rf"config\.json: {field} is {value}, but must be {wanted}",
    ):
        convert(model, tmp_path / "out", "torch_dist")


def test_size_limits_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = plausible("RANKS", 10)
    with pytest.raises(
        CheckpointError,
        match="here is 11, but must be at most 10 .*MEGATRON_MAX_RANKS raises",
    ):
        ranks(11, "here")

    monkeypatch.setenv("MEGATRON_MAX_RANKS", "11")
    assert plausible("RANKS", 10)(11, "here") == 11

    monkeypatch.setenv("MEGATRON_MAX_RANKS", "many")
    with pytest.raises(ValueError, match="MEGATRON_MAX_RANKS='many' must be a whole number"):
        plausible("RANKS", 10)


def rewrite_header(path: Path, change) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end])
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def with_entry(name: str, **fields):
    def change(header: bytes) -> bytes:
        value = json.loads(header)
        value[name] |= fields
        return json.dumps(value).encode()

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        # overlaps another
        (with_entry("model.norm.weight", data_offsets=[0, 128]), "begins at byte"),
        (with_entry("model.norm.weight", data_offsets=[-128, 0]), "data_offsets.* must be a whole "
                                                                  "number"),
        (with_entry("model.norm.weight", shape=[1] * 100), "shape is .* must be a list of 0 to 64 "
                                                           "entries"),
        (with_entry("model.norm.weight", shape=[2**40]), "shape .* needs"),
        (with_entry("model.norm.weight", dtype="I32"), "weights must be floating point"),
        (lambda header: header.replace(b"{", b'{"model.norm.weight":{},', 1), "a name occurs "
                                                                              "twice"),
        (lambda header: b"[" * 5000 + b"]" * 5000, "nested (too|more than 200) deep"),
        (lambda header: header.replace(b"model.norm.weight", b"model\\nintact\\u001b[2Jx"), "a printable name"),
    ],
)  # fmt: skip
def test_safetensors_headers(change, message: str, tmp_path: Path) -> None:
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "model")
    rewrite_header(tmp_path / "model/model.safetensors", change)
    with pytest.raises(ValueError, match=message) as caught:
        convert(tmp_path / "model", tmp_path / "out", "torch_dist")
    assert str(caught.value).isprintable()


def add_empty_tensor(path: Path, name: str, shape: list[int]) -> None:
    """Add a tensor without elements, whose shape the size of the file does not limit."""

    def change(header: bytes) -> bytes:
        value = json.loads(header)
        end = max(entry["data_offsets"][1] for key, entry in value.items() if key[0] != "_")
        value[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}
        return json.dumps(value).encode()

    rewrite_header(path, change)


@pytest.mark.parametrize("shape", [[2**53 - 1, 0, 5], [0, 2**53 - 1, 2**53 - 1], [2] * 54 + [0]])
def test_implausible_shapes_without_elements_are_refused(shape: list[int], tmp_path: Path) -> None:
    """They were written row by row, or the product of their strides was too large for torch."""
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "model")
    add_empty_tensor(tmp_path / "model/model.safetensors", "foreign.weight", shape)
    with pytest.raises(CheckpointError, match=r"foreign\.weight: shape is .* multiply to at most"):
        convert(tmp_path / "model", tmp_path / "out", "torch_dist")


def test_foreign_tensors_without_elements_are_copied(tmp_path: Path) -> None:
    """Writing 2^50 rows of 0 bytes would take days."""
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "model")
    for name, shape in {"foreign.wide": [0, 2**52], "foreign.long": [2**50, 0]}.items():
        add_empty_tensor(tmp_path / "model/model.safetensors", name, shape)
    keeping = ReadOptions(keep_foreign=True)
    convert(tmp_path / "model", tmp_path / "out", "hf", read_options=keeping)
    with safetensors.safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.get_slice("foreign.wide").get_shape() == [0, 2**52]
        assert file.get_slice("foreign.long").get_shape() == [2**50, 0]


# Files next to a model: adapters, and the processor of --keep-foreign CHECKPOINT.


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_files_of_an_adapter_are_regular_and_inside(
    name: str, kind: str, model: Path, tmp_path: Path
) -> None:
    module = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(3, 32),
        f"{module}.lora_B.weight": torch.ones(48, 3),
    }
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, adapter / "adapter_model.safetensors")
    options = WriteOptions(edits=EditOptions(adapters=(adapter,)))
    convert(model, tmp_path / "intact", "hf", options=options)

    (adapter / name).rename(tmp_path / "secret")
    if kind == "link":
        (adapter / name).symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(adapter / name)

    message = f"{name} is a link to" if kind == "link" else f"not a regular file|has no {name}"
    with pytest.raises(CheckpointError, match=message):
        convert(model, tmp_path / "out", "hf", options=options)


@pytest.mark.parametrize("name", PROCESSOR_FILES)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_processor_files_of_another_checkpoint_are_regular_and_inside(
    name: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "secret.json").write_text('{"password": 1}')
    original = tmp_path / "original"
    original.mkdir()
    (tmp_path / "out").mkdir()
    if kind == "link":
        (original / name).symlink_to(tmp_path / "secret.json")
    else:
        os.mkfifo(original / name)

    message = f"{name} is {'a link to' if kind == 'link' else 'not a regular file'}"
    with pytest.raises(CheckpointError, match=message):
        copy_processor(ExportedTokenizer({}, [], []), original, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("saver", ["torch_dist", "legacy", "hf"])
def test_implausible_layouts_in_arguments_need_no_time(saver: str, tmp_path: Path) -> None:
    """The layout that a run had is not the one that is written."""
    axes = ("tensor", "pipeline", "expert")
    layout = {f"{axis}_model_parallel_size": 100_000 for axis in axes}
    source = random_source(LLAMA_ARGS | layout | {"world_size": 10**10}, optimizer=False)
    write_torch_dist(source, tmp_path / "run")

    def attempt() -> str:
        try:
            convert(tmp_path / "run", tmp_path / "out", saver)
        except ValueError as error:
            return f"error: {error}"
        return "converted"

    result = run_limited(attempt, memory=1 << 30, seconds=20)
    assert result == "converted" or result.startswith("error: "), result
