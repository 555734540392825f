"""Links inside a checkpoint may not lead out of it, unless the user enables that."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.formats import find_checkpoint
from megatron.core.safe_files.reading import FOLLOW_LINKS, confine_links, find_outside_target
from tests.support.memory_source import LLAMA_ARGS, random_source

# Format -> names of the checkpoint that an attacker could replace with links.
LINKED = {
    "torch_dist": (
        "iter_*", "iter_*/.metadata", "iter_*/common.pt", "iter_*/checksums.bin",
        "iter_*/__0_0.distcp",
    ),
    "legacy": (
        "iter_*", "iter_*/mp_rank_00", "iter_*/mp_rank_00/model_optim_rng.pt",
        "iter_*/mp_rank_00/distrib_optim.pt",
    ),
    "universal": (
        "global_step*", "global_step*/zero", "global_step*/zero/*embed*",
        "global_step*/zero/*embed*/fp32.pt", "global_step*/mp_rank_00_model_states.pt",
    ),
    "hf": (
        "config.json", "model.safetensors", "megatron_state", "megatron_state/state.json",
        "megatron_state/optimizer.safetensors",
    ),
}  # fmt: skip
CASES = []
for kind, names in LINKED.items():
    CASES += [(kind, name) for name in names]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint in each format."""
    root = tmp_path_factory.mktemp("checkpoints")
    source = random_source(LLAMA_ARGS | {"consumed_train_samples": 28})
    write_torch_dist(source, root / "source")
    write_huggingface(source, root / "hf", WriteOptions(optim_sidecar=True))
    for form in ("torch_dist", "legacy", "universal"):
        convert(root / "source", root / form, form)
    return root


def replace_with_link(run: Path, pattern: str) -> None:
    """Move files that match `pattern` out of `run` and replace them by links."""
    inside = sorted(run.glob(pattern))[0]
    outside = run.with_name("private") / inside.name
    outside.parent.mkdir()
    inside.rename(outside)
    inside.symlink_to(outside)


@pytest.mark.parametrize("kind,pattern", CASES)
def test_links_that_leave_the_checkpoint_are_refused(
    kind: str, pattern: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    out = tmp_path / "out"
    shutil.copytree(checkpoints / kind, run)
    replace_with_link(run, pattern)
    target = "torch_dist" if kind == "hf" else "hf"
    with pytest.raises(ValueError, match=r"(?s)is a link to .*private.*outside of"):
        convert(run, out, target)
    assert not out.exists()
    monkeypatch.setenv(FOLLOW_LINKS, "1")
    report = convert(run, out, target)
    assert report.num_tensors > 0


@pytest.mark.parametrize(
    "kind,tracker",
    [("torch_dist", "latest_checkpointed_iteration.txt"), ("universal", "latest_universal")],
)
def test_tracker_that_leaves_the_run_is_not_read(
    kind: str, tracker: str, checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest checkpoint is used, as for a damaged tracker."""
    run = tmp_path / "run"
    shutil.copytree(checkpoints / kind, run)
    replace_with_link(run, tracker)
    report = convert(run, tmp_path / "out", "hf")
    assert report.num_tensors > 0
    assert f"{tracker} is a link to" in caplog.text
    assert "the newest complete" in caplog.text


def test_links_inside_the_checkpoint_are_followed(checkpoints: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoints / "torch_dist", run)
    (iteration,) = run.glob("iter_*")
    (run / "shared").mkdir()
    (iteration / "__0_0.distcp").rename(run / "shared/__0_0.distcp")
    (iteration / "__0_0.distcp").symlink_to("../shared/__0_0.distcp")
    assert convert(run, tmp_path / "out", "hf").num_tensors > 0


def test_named_directory_may_be_a_link(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(checkpoints / "torch_dist")
    assert convert(tmp_path / "latest", tmp_path / "out", "hf").num_tensors > 0
    (iteration,) = (checkpoints / "torch_dist").glob("iter_*")
    (tmp_path / "step").symlink_to(iteration)
    actual = find_checkpoint(tmp_path / "step")
    assert actual is not None
    assert actual.directory == tmp_path / "step"


def test_named_directory_may_move_and_leave_a_link(checkpoints: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoints / "torch_dist", run)
    before = find_checkpoint(run)
    run.rename(tmp_path / "moved")
    run.symlink_to(tmp_path / "moved")
    assert find_checkpoint(run) == before is not None


def test_cache_of_hugging_face_keeps_working(checkpoints: Path, tmp_path: Path) -> None:
    """Every file of a snapshot in the cache is a link to a blob of the same model."""
    blobs = tmp_path / "models--a--b/blobs"
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted((checkpoints / "hf").glob("*.*"))):
        shutil.copy(path, blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    assert convert(snapshot, tmp_path / "out", "torch_dist").num_tensors > 0
    (tmp_path / "models--other/blobs").mkdir(parents=True)
    shutil.copy(checkpoints / "hf/config.json", tmp_path / "models--other/blobs/0")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "models--other/blobs/0")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to .*models--other"):
        convert(snapshot, tmp_path / "out2", "torch_dist")


def test_decisions_are_those_of_real_paths(tmp_path):
    """All paths of up to three components through a directory with links of every kind."""
    run = tmp_path / "link_to_run"
    (tmp_path / "run/a/b").mkdir(parents=True)
    (tmp_path / "private/b").mkdir(parents=True)
    run.symlink_to(tmp_path / "run")
    targets = {
        "inside": "a",
        "a/up": "..",
        "a/out": "../../private",
        "a/b/far": str(tmp_path / "private"),
        "loop": "loop",
        "chain": "a/out",
    }
    for name, target in targets.items():
        (run / name).symlink_to(target)
    confine_links(run)
    names = ["a", "b", "inside", "up", "out", "far", "loop", "chain", "..", "missing"]
    decisions = set()
    for length in (1, 2, 3):
        for components in itertools.product(names, repeat=length):
            path = os.path.join(run, *components)
            if not os.path.abspath(path).startswith(f"{run}/"):
                continue  # `..` leads out of the confined directory
            is_inside = os.path.realpath(path).startswith(f"{os.path.realpath(run)}/")
            assert (find_outside_target(path) is None) == is_inside, path
            decisions.add(is_inside)
    assert decisions == {True, False}
