"""Which checkpoint a path means: the requested, the tracker's, or the newest complete one."""

import dataclasses
import json
import shutil

import pytest

from megatron.conversion.checkpoint_conversion import WRITERS, convert
from megatron.conversion.opening import open_checkpoint, open_found
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    Lineage,
    Segment,
    iteration_in_name,
    write_tracker,
)
from megatron.core.dist_checkpointing.policy import CheckpointRef
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.core.run_checkpoint.formats import (
    FORMATS,
    NoCheckpointError,
    find_checkpoint,
    list_newest_first,
)
from tests.support.compare import read_whole
from tests.support.memory_source import GPT_ARGS, random_source

TRACKERS = ("latest_checkpointed_iteration.txt", "latest_universal")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By format: a directory with iterations 5 and 10, and a tracker that names the latter."""
    roots = {}
    for name in ("torch_dist", "legacy", "universal"):
        roots[name] = tmp_path_factory.mktemp(name)
        for iteration in (5, 10):
            source = random_source({**GPT_ARGS, "num_layers": 1}, seed=iteration)
            source.training.iteration = iteration
            for group in source.training.param_groups:
                group["step"] = iteration
            one_rank = tmp_path_factory.mktemp("part")
            WRITERS[name](source, one_rank, WriteOptions(tensor_parallel=2), no_progress)
            shutil.copytree(one_rank, roots[name], dirs_exist_ok=True)
    return roots


@pytest.fixture(params=["torch_dist", "legacy", "universal"])
def run(request, runs, tmp_path):
    """(format, root, old checkpoint, new checkpoint): a copy to be damaged."""
    root = tmp_path / "run"
    shutil.copytree(runs[request.param], root)
    new, old = list_newest_first(root)
    return request.param, root, old, new


def test_names_of_iteration_directories(tmp_path):
    assert CheckpointDirectory("run").path(12).as_posix() == "run/iter_0000012"
    assert iteration_in_name(CheckpointDirectory("run").path(12)) == 12
    for name in ("iter_0000007", "iter_notes", "iter_0000003"):
        (tmp_path / name).mkdir()
    assert CheckpointDirectory(tmp_path).list_iterations() == [3, 7]


def test_empty_directory_has_no_checkpoint(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "absent") is None
    CheckpointDirectory(tmp_path).path(3).mkdir()
    assert find_checkpoint(tmp_path) is None, "an empty directory holds nothing that could be lost"


def test_tracker_names_the_checkpoint(run):
    form, root, old, new = run
    assert find_checkpoint(root) == CheckpointRef(new, form)
    write_tracker(root, 5)
    (root / "latest_universal").unlink(missing_ok=True)
    assert find_checkpoint(root) == CheckpointRef(old, form)


def test_checkpoint_directory_is_found_directly(run):
    form, _, old, _ = run
    assert find_checkpoint(old) == CheckpointRef(old, form)


def test_ckpt_step_overrides_the_tracker(run):
    form, root, old, _ = run
    assert find_checkpoint(root, 5) == CheckpointRef(old, form)
    with pytest.raises(
        ValueError,
        match=rf"--ckpt-step 7.*does not exist; complete are: .*{old.name}",
    ):
        find_checkpoint(root, 7)


@pytest.mark.parametrize("tracker", [None, b"", b"\xff\x00garbage", b"../../etc", b"20"])
def test_unusable_tracker_falls_back_to_the_newest(run, tracker):
    form, root, _, new = run
    for name in TRACKERS:
        if (root / name).exists() and tracker is not None:
            (root / name).write_bytes(tracker)
        else:
            (root / name).unlink(missing_ok=True)

    checkpoint = find_checkpoint(root)
    assert checkpoint[:2] == (new, form)
    assert "the newest complete checkpoint" in checkpoint.note
    assert (
        "there is no tracker file" in checkpoint.note
        or "latest_" in checkpoint.note
        or "tracker names 20" in checkpoint.note
    )


# One of `stride` files of a universal checkpoint, which has many of a kind.
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_missing_or_truncated_files_are_detected(run, stride):
    """A checkpoint reported as complete can be read; otherwise the previous one is used."""
    form, root, old, new = run
    found_out = 0
    files = sorted(path for path in new.rglob("*") if path.is_file())
    if form == "universal":
        files = files[::stride]

    for index, path in enumerate(files):
        content = path.read_bytes()
        damages = (None, content[: len(content) // 2], content[:-1])
        # Each file of a universal checkpoint is damaged in one way, its neighbours in the others.
        for damaged in damages[index % 3 :][:1] if form == "universal" else damages:
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            checkpoint = find_checkpoint(root)
            if checkpoint.directory == old:
                assert path.name in checkpoint.note or "not complete" in checkpoint.note, (
                    checkpoint.note
                )
                with pytest.raises(
                    ValueError,
                    match=f"--ckpt-step 10: .*cannot be loaded.*complete are: {old.name}",
                ):
                    find_checkpoint(root, 10)
                found_out += 1
            else:
                source = open_found(checkpoint)
                assert all(read_whole(source, key).numel() for key in source.tensors), path

            path.write_bytes(content)

    assert find_checkpoint(root) == CheckpointRef(new, form)

    pattern = {"torch_dist": "*.distcp", "legacy": "*.pt", "universal": "zero/*/[fe]*.pt"}[form]
    needed = set(files) & set(new.rglob(pattern))
    assert needed
    assert found_out >= (1 if form == "universal" else 3) * len(needed)


def branch(*segments):
    """A lineage of (generation, last iteration) pairs."""
    return Lineage(
        tuple(Segment(generation, last, "a" * generation or None) for generation, last in segments)
    )


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        # The run of one start, and one that Megatron-LM began.
        ({4: branch((1, 4)), 6: branch((1, 6)), 8: branch((1, 8)), 12: branch((1, 12))}, 8),
        ({4: None, 6: None, 8: branch((0, 6), (1, 8))}, 8),
        # An abandoned branch of Megatron-LM, and one from the start.
        ({4: None, 6: None, 8: branch((1, 8))}, 6),
    ],
)
def test_fallback_from_a_checkpoint_without_its_lineage(runs, tmp_path, saved, expected):
    """A copy of a run in progress may contain parts of the newest checkpoints."""
    intact = CheckpointDirectory(runs["torch_dist"]).path(5)
    checkpoints = CheckpointDirectory(tmp_path)
    for iteration, lineage in saved.items():
        shutil.copytree(intact, checkpoints.path(iteration))
        if lineage is not None:
            (checkpoints.path(iteration) / "lineage.json").write_bytes(lineage.encode(None))

    for iteration in (9, 10):
        checkpoints.path(iteration).mkdir()
        shutil.copy(intact / ".metadata", checkpoints.path(iteration))
    write_tracker(tmp_path, 10)
    checkpoint = find_checkpoint(tmp_path)

    assert checkpoint.directory == checkpoints.path(expected)
    assert "the tracker names 10, but it is damaged: metadata.json is missing" in checkpoint.note


def test_only_damaged_checkpoints_are_an_error(run):
    """Training from scratch would overwrite them."""
    _, root, old, new = run
    for name in TRACKERS:
        (root / name).unlink(missing_ok=True)

    for directory in (old, new):
        max(
            (path for path in directory.rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_size,
        ).unlink()

    with pytest.raises(
        ValueError,
        match=f"(?s)no tracker.*no complete checkpoint.*{new.name}: .*missing.*{old.name}",
    ):
        find_checkpoint(root)


def test_release_directory_is_found(tmp_path):
    source = dataclasses.replace(random_source(GPT_ARGS), training=None)
    WRITERS["torch_dist"](source, tmp_path, WriteOptions(), no_progress)
    assert find_checkpoint(tmp_path) == CheckpointRef(tmp_path / "release", "torch_dist")

    (tmp_path / TRACKERS[0]).unlink()
    assert find_checkpoint(tmp_path).directory == tmp_path / "release"

    (tmp_path / "release/metadata.json").unlink()
    write_tracker(tmp_path, "release")

    with pytest.raises(
        ValueError,
        match=r"names release, but it is damaged: metadata\.json is missing",
    ):
        find_checkpoint(tmp_path)


def test_converter_and_training_find_the_same_checkpoint(run, caplog, tmp_path):
    form, root, old, new = run
    for name in TRACKERS:
        (root / name).unlink(missing_ok=True)
    next(path for path in new.rglob("*") if path.suffix in (".distcp", ".pt")).unlink()
    outcome = convert(root, tmp_path / "hf", "hf")

    assert str(old) in outcome.source
    assert "newest complete checkpoint" in caplog.text
    assert open_checkpoint(tmp_path / "hf", "hf").training is None
    assert form in FORMATS


def test_non_ascii_digits_are_not_iterations(tmp_path):
    for name in ("iter_0000003", "iter_\u00b2", "iter_\u0663"):
        (tmp_path / name).mkdir()
    assert CheckpointDirectory(tmp_path).list_iterations() == [3]


@pytest.mark.parametrize("lost", [None, "tracker"])
def test_run_in_the_directory_of_its_first_model_is_continued(runs, tmp_path, caplog, lost):
    """`--load model --save model` begins with the model, and must continue from the run's saves."""
    root = tmp_path / "model"
    source = random_source({**GPT_ARGS, "num_layers": 1}, seed=1)
    WRITERS["hf"](source, root, WriteOptions(), no_progress)
    assert find_checkpoint(root) == CheckpointRef(root, "hf")

    shutil.copytree(runs["torch_dist"], root, dirs_exist_ok=True)
    if lost == "tracker":
        (root / TRACKERS[0]).unlink()

    checkpoint = find_checkpoint(root)
    assert checkpoint[:2] == (root / "iter_0000010", "torch_dist")

    expected = "no tracker file" if lost else f"{root} is also a checkpoint itself (hf)"
    assert expected in checkpoint.note
    assert find_checkpoint(root, 5).directory == root / "iter_0000005"
    assert find_checkpoint(root, loader="hf") == CheckpointRef(root, "hf")

    # A damaged run must not begin again with the model.
    for path in root.glob("iter_*/.metadata"):
        path.unlink()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        find_checkpoint(root)


@pytest.mark.parametrize("lost", [None, "tracker"])
def test_run_in_the_directory_of_its_first_deepspeed_checkpoint_is_continued(runs, tmp_path, lost):
    root = tmp_path / "run"
    shutil.copytree(runs["universal"], root)
    (root / TRACKERS[0]).unlink(missing_ok=True)
    old = (root / TRACKERS[1]).read_text()
    shutil.copytree(runs["torch_dist"] / "iter_0000010", root / "iter_0000012")
    if lost is None:
        write_tracker(root, 12)
    checkpoint = find_checkpoint(root)

    assert checkpoint[:2] == (root / "iter_0000012", "torch_dist")
    assert ("no tracker file" if lost else f"{TRACKERS[1]} names {old}") in checkpoint.note

    write_tracker(root, 20)
    assert find_checkpoint(root)[:2] == (root / "iter_0000012", "torch_dist")

    # The tracker of Megatron-DeepSpeed also names checkpoints that are not universal.
    shutil.rmtree(root / "iter_0000012")
    assert find_checkpoint(root)[:2] == (root / old, "universal")


def test_zarr_checkpoint_is_refused_with_the_way_to_convert_it(tmp_path):
    directory = tmp_path / "iter_0000004"
    directory.mkdir()
    metadata = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(metadata))
    message = f"(?s){directory} is in Megatron-core's zarr format.*--ckpt-format torch_dist"

    with pytest.raises(NoCheckpointError, match=message):
        find_checkpoint(directory)

    write_tracker(tmp_path, 4)
    for step in (None, 4):
        with pytest.raises(NoCheckpointError, match=message):
            find_checkpoint(tmp_path, step)
