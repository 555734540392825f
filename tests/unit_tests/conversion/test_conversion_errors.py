"""Failing conversions: one message that names the file, an intact source, no partial result."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import write_tracker
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.programs import run_program
from tests.unit_tests.conversion.convert_tool import run_convert

FORMATS = ("torch_dist", "legacy", "hf", "universal")


def shards(directory):
    return sorted(directory.glob("model-*.safetensors"))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)
    return path.name


def remove(path):
    path.unlink()
    return path.name


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def config_of_another_model(directory):
    edit(directory / "config.json", intermediate_size=64)
    return "gate_proj.weight has shape .*config.json and weights are of different models"


def unknown_architecture(directory):
    edit(directory / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    return "mamba"


def field_that_changes_the_model(directory):
    edit(directory / "config.json", quantization_config={"bits": 4})
    return "quantization_config"


def broken_config(directory):
    (directory / "config.json").write_text('{"model_type": "llama", ')
    return r"config\.json is not valid JSON"


def only(directory, pattern):
    """Return the largest matching file."""
    return max(directory.rglob(pattern), key=lambda path: path.stat().st_size)


DAMAGES = {  # format -> damage of the source, which returns the expected message
    "hf": [
        lambda directory: remove(shards(directory)[1]),
        lambda directory: truncate(shards(directory)[1]),
        lambda directory: truncate(directory / "model.safetensors.index.json"),
        config_of_another_model,
        unknown_architecture,
        field_that_changes_the_model,
        broken_config,
    ],
    "torch_dist": [
        lambda directory: truncate(only(directory, "*.distcp")),
        lambda directory: remove(only(directory, "*.distcp")),
        lambda directory: truncate(only(directory, ".metadata")),
        lambda directory: truncate(only(directory, "common.pt")),
    ],
    "legacy": [
        lambda directory: truncate(only(directory, "mp_rank_01_001/model_optim_rng.pt")),
        lambda directory: remove(only(directory, "mp_rank_01_001/model_optim_rng.pt")),
    ],
    "universal": [
        lambda directory: truncate(only(directory, "exp_avg_sq.pt")),
        lambda directory: remove(only(directory, "exp_avg_sq.pt")),
        lambda directory: truncate(only(directory, "mp_rank_00_model_states.pt")),
    ],
}
CASES = [(form, number) for form, damages in DAMAGES.items() for number in range(len(damages))]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One checkpoint in every format, each larger than a megabyte."""
    root = tmp_path_factory.mktemp("sources")
    source = random_source(LLAMA_ARGS, vocab_size=4000)
    write_torch_dist(source, root / "torch_dist" / "iter_0000007", files=2)
    write_tracker(root / "torch_dist", 7)
    options = WriteOptions(tensor_parallel=2, pipeline_parallel=2, max_shard_size=600_000)
    for form in FORMATS[1:]:
        convert(root / "torch_dist", root / form, form, options=options)
    return root


def content(directory):
    """Return names, modes and bytes of all files in the directory."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in directory.rglob("*")
    }


def process(code, *words):
    """Run `code` in a Python process of its own, for tests that end or stop it."""
    return run_program(code, *words)


@pytest.mark.parametrize("form,number", CASES, ids=[f"{form}-{number}" for form, number in CASES])
def test_damaged_source_is_refused_by_name(sources, tmp_path, form, number):
    shutil.copytree(sources / form, tmp_path / "source")
    reason = DAMAGES[form][number](tmp_path / "source")
    before = content(tmp_path / "source")
    saver = "legacy" if form == "torch_dist" else "torch_dist"
    with pytest.raises((ValueError, OSError), match=reason):
        convert(tmp_path / "source", tmp_path / "target", saver, options=WriteOptions(workers=2))
    assert content(tmp_path / "source") == before
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("saver", FORMATS)
def test_full_disk_leaves_no_partial_result(sources, disk, saver):
    disk.mount("size=768k")
    form = "legacy" if saver == "torch_dist" else "torch_dist"
    before = content(sources / form)
    said = run_convert(
        "--saver", saver, "--load-dir", sources / form, "--save-dir", disk.path / "target"
    )
    last = said.stderr.strip().splitlines()[-1]
    assert said.returncode == 1, said.stderr
    assert last.startswith("error: "), said.stderr
    assert "No space left" in last, said.stderr
    assert str(disk.path) in last
    assert "Traceback" not in said.stderr
    assert content(sources / form) == before
    assert os.listdir(disk.path) == []


@pytest.mark.parametrize("saver", FORMATS)
def test_quota_leaves_no_partial_result(sources, tmp_path, saver):
    """A limit of the file size, for machines without permission to mount a file system."""
    form = "legacy" if saver == "torch_dist" else "torch_dist"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        said = run_convert(
            "--saver", saver, "--load-dir", sources / form, "--save-dir", tmp_path / "target"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    last = said.stderr.strip().splitlines()[-1]
    assert said.returncode == 1, said.stderr
    assert last.startswith("error: "), said.stderr
    assert "File too large" in last, said.stderr
    assert str(tmp_path) in last
    assert "Traceback" not in said.stderr
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.options import WriteOptions

calls = 0

def progress(nbytes):
    global calls
    calls += 1
    if calls == int(sys.argv[4]):
        os.kill(os.getpid(), signal.{signal})

convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], progress=progress, overwrite=True)
"""


@pytest.mark.parametrize(
    "saver,existing",
    [
        ("torch_dist", False),
        ("hf", True),
        *(pytest.param(saver, False, marks=pytest.mark.slow) for saver in ("hf", "legacy")),
        pytest.param("universal", False, marks=pytest.mark.slow),
        pytest.param("torch_dist", True, marks=pytest.mark.slow),
    ],
)
def test_killed_conversion_can_be_repeated(sources, tmp_path, saver, existing):
    form = "legacy" if saver == "torch_dist" else "torch_dist"
    target = tmp_path / "target"
    if existing:
        shutil.copytree(sources / form, target)
    old = content(target) if existing else None
    said = process(KILLED.format(signal="SIGKILL"), sources / form, target, saver, 1)
    assert said.returncode == -signal.SIGKILL
    if old is None:
        assert not target.exists()
    else:
        assert content(target) == old
    convert(sources / form, target, saver, overwrite=existing)
    assert os.listdir(tmp_path) == ["target"]
    compare(open_checkpoint(sources / form), open_checkpoint(target))


STOPPED = """
import os, signal
import megatron.conversion.checkpoint_conversion as c
from tools.checkpoint.convert import main

write = c.WRITERS["{saver}"]

def stopped(source, root, options, progress):
    def stopping(nbytes):
        written = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        if written > 100_000:
            print("midway", flush=True)
            os.kill(os.getpid(), signal.{signal})
    return write(source, root, options, stopping)

c.WRITERS["{saver}"] = stopped
main()
"""


@pytest.mark.parametrize(
    "saver,how",
    [("torch_dist", "SIGTERM"), ("legacy", "SIGINT"), ("hf", "SIGINT"), ("universal", "SIGTERM")],
)
def test_stopped_conversion_removes_its_files(sources, tmp_path, saver, how):
    """Repeated signals do not interrupt the clean-up."""
    form = "legacy" if saver == "torch_dist" else "torch_dist"
    before = content(sources / form)
    code = STOPPED.format(saver=saver, signal=how)
    said = process(
        code, "--saver", saver, "--load-dir", sources / form, "--save-dir", tmp_path / "target"
    )
    assert said.returncode == 128 + getattr(signal, how), said.stderr
    assert "interrupted: nothing was written" in said.stderr
    assert "Traceback" not in said.stderr
    assert "midway" in said.stdout
    assert content(sources / form) == before
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("when", [0, 1], ids=["first", "second"])
def test_stop_between_renames_restores_the_old_target(sources, tmp_path, monkeypatch, when):
    shutil.copytree(sources / "universal", tmp_path / "target")
    old = content(tmp_path / "target")
    rename = os.replace
    done = []

    def stopped(source, target):
        if Path(target).parent == tmp_path and len(done) < 2:
            if len(done) == when:
                done.extend([None, None])
                raise KeyboardInterrupt
            done.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert(sources / "torch_dist", tmp_path / "target", "legacy", overwrite=True)
    assert content(tmp_path / "target") == old
    assert os.listdir(tmp_path) == ["target"]


def test_leftovers_of_a_replacement_are_removed(sources, tmp_path):
    """The conversion was killed between the renames and the removal of the old target."""
    shutil.copytree(sources / "hf", tmp_path / ".replaced-target")
    shutil.copytree(sources / "hf", tmp_path / "target")
    convert(sources / "legacy", tmp_path / "target", "hf", overwrite=True)
    assert os.listdir(tmp_path) == ["target"]


def test_failed_conversion_keeps_the_existing_target(sources, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/precious").write_text("x")
    said = run_convert(
        "--saver", "hf", "--load-dir", sources / "legacy", "--save-dir", tmp_path / "target"
    )
    assert said.returncode == 1
    assert "give --overwrite" in said.stderr
    assert str(tmp_path / "target") in said.stderr
    assert os.listdir(tmp_path / "target") == ["precious"]
