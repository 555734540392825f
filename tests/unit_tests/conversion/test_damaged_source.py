"""A damaged source stops a conversion with an error that names the damaged file."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import CheckpointError
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine") / "run"
    write_torch_dist(random_source(LLAMA_ARGS | {"bf16": True}), directory)
    return directory


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("seed", range(24))
def test_single_bit_flip_is_refused(tmp_path: Path, pristine: Path, seed: int) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    random_bits = random.Random(seed)
    # The other shard file contains empty extra states, which no conversion reads.
    path = run / random_bits.choice(["__0_0.distcp", "common.pt", ".metadata"])
    flip_bit(path, random_bits.randrange(8 * path.stat().st_size))

    with pytest.raises(CheckpointError, match=rf"{path.name}.*damaged"):
        convert(run, tmp_path / "hf", "hf", options=WriteOptions(optim_sidecar=True))
    assert not (tmp_path / "hf").exists()


def test_damage_is_not_blamed_on_the_writer(tmp_path: Path, pristine: Path) -> None:
    """Without checksums a flipped main parameter looks like a defect of Megatron-core."""
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    weights = run / "__0_0.distcp"
    flip_bit(weights, 4 * weights.stat().st_size)
    arguments = ["--load-dir", run, "--save-dir", tmp_path / "hf", "--saver", "hf"]
    done = run_convert(*arguments)

    assert done.returncode == 1
    assert "Megatron" not in done.stderr
    assert "__0_0.distcp: damaged" in done.stderr

    done = run_convert(*arguments, "--no-verify-source")
    assert "damaged" not in done.stderr


def test_required_checksums_may_be_megatrons(tmp_path: Path, pristine: Path) -> None:
    """--ckpt-verify accepts the hashes that Megatron-LM's --verify-integrity leaves."""
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    (run / "checksums.bin").unlink()

    with pytest.raises(CheckpointError, match=r"has neither checksums.bin nor integrity.json"):
        open_checkpoint(run, read_options=ReadOptions(verify_source=True))

    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.iterdir()}
    (run / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    open_checkpoint(run, read_options=ReadOptions(verify_source=True))
    flip_bit(run / "__0_0.distcp", 4000)

    with pytest.raises(CheckpointError, match=r"__0_0.distcp: damaged: .* integrity.json"):
        open_checkpoint(run, read_options=ReadOptions(verify_source=True))
