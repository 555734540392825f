"""tools/checkpoint/inspect_checkpoint.py: displayed contents, damage and differences."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import xxhash

from megatron.commands.inspection.checkpoint_contents import compute_file_shares
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import (
    Lineage,
    Segment,
    ShardedObject,
    ShardedTensor,
    save,
    write_tracker,
)
from megatron.core.dist_checkpointing.files import run_name
from megatron.core.dist_checkpointing.format.checksums import (
    encode_checksum_records,
    seal_checksums,
)
from tests import ROOT

spec = importlib.util.spec_from_file_location(
    "inspect_tool", ROOT / "tools/checkpoint/inspect_checkpoint.py"
)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool
spec.loader.exec_module(tool)
main = tool.main
GOLDEN = ROOT / "tests" / "golden" / "megatron_lm" / "mcore_0.16.1"
LLAMA = GOLDEN / "llama_fp32_tp2pp2"
PNG = b"\x89PNG"


def save_run(root, iteration, **tensors):
    state = {key: ShardedTensor.replicated(key, tensor) for key, tensor in tensors.items()}
    state["rng_state/shard_0.0_1.1"] = ShardedObject("rng_state/shard_0.0_1.1", [1])
    save(state, root / f"iter_{iteration:07d}", common={"iteration": iteration})
    write_tracker(root, iteration)
    return root


@pytest.fixture
def run(tmp_path):
    """Return the directory of a run with a weight and a bias."""
    torch.manual_seed(1)
    weight = torch.randn(30, 20)
    bias = torch.randn(20).bfloat16()
    return save_run(tmp_path / "run", 30, weight=weight, bias=bias)


def inspect(*arguments):
    """Return the exit code of a command."""
    return main([str(argument) for argument in arguments])


def inspect_json(capsys, *arguments):
    """Return the exit code of a command, and its output."""
    code = inspect(*arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def test_show(run, capsys):
    code, shown = inspect_json(capsys, "show", run)
    assert code == 0
    assert shown["iteration"] == 30
    assert shown["format"] == "torch_dist"
    assert shown["tensors"] == {
        "weight": {"shape": [30, 20], "dtype": "float32", "bytes": 2400, "chunks": 1},
        "bias": {"shape": [20], "dtype": "bfloat16", "bytes": 40, "chunks": 1},
    }
    assert shown["objects"] == ["rng_state/shard_0.0_1.1"]
    assert shown["bytes"] == 2440
    assert shown["checksums"]

    directory = run / "iter_0000030"
    assert shown["files"] == measure_files(directory)
    assert inspect("show", directory, "--keys", "w*") == 0
    text = capsys.readouterr().out

    assert "30x20" in text
    assert "bias" not in text


def measure_files(directory):
    """Return the sizes of the files of tensors by name."""
    return {path.name: path.stat().st_size for path in directory.glob("*.distcp")}


def test_show_prints_the_largest_tensors(tmp_path, capsys):
    tensors = {f"w{index:02d}": torch.zeros(index + 1) for index in range(12)}
    run = save_run(tmp_path / "run", 1, **tensors)
    assert inspect("show", run) == 0
    text = capsys.readouterr().out

    assert "w11" in text
    assert "w01" not in text
    assert "... and 2 smaller tensors" in text
    assert inspect("show", run, "--all") == 0
    text = capsys.readouterr().out

    for key in tensors:
        assert key in text
    assert "smaller" not in text


def test_shares_of_files_add_up_to_their_sizes(run):
    directory = run / "iter_0000030"
    sizes = measure_files(directory)
    shares = compute_file_shares(directory)
    assert shares.keys() == sizes.keys()

    weight_bytes = 0
    num_objects = 0
    for name, groups in shares.items():
        file_bytes = 0
        for bytes_by_content in groups.values():
            file_bytes += sum(bytes_by_content.values())
            weight_bytes += bytes_by_content.get("weights", 0)
            num_objects += "objects" in bytes_by_content
        padding = sizes[name] - file_bytes
        assert 0 <= padding < 128

    assert weight_bytes >= 2440
    assert num_objects == 1


def test_show_plots_the_content_of_files(run, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    picture = tmp_path / "files.png"
    assert inspect("show", run, "--plot", picture) == 0
    assert picture.read_bytes().startswith(PNG)
    assert inspect("show", LLAMA / "legacy", "--plot", tmp_path / "none.png") == 2
    assert "use plan --plot" in capsys.readouterr().err


def test_show_of_megatron_checkpoints(capsys):
    code, shown = inspect_json(capsys, "show", LLAMA / "torch_dist_fully_reshardable")
    assert shown["iteration"] == 5
    assert shown["args"]["num_layers"] == 4
    assert not shown["checksums"]
    assert shown["layout"] == {"tp": 2, "pp": 2, "dp": 1, "world": 4}

    code, legacy = inspect_json(capsys, "show", LLAMA / "legacy")
    assert code == 0
    assert legacy["format"] == "legacy"
    assert legacy["layout"] == shown["layout"]
    assert legacy["bytes"] == shown["bytes"]

    inspect("show", LLAMA / "torch_dist_fully_reshardable")
    output = capsys.readouterr().out
    (objects,) = [line for line in output.splitlines() if "  objects " in line]

    assert "16 extra states: " in objects, objects
    assert "_extra_state" not in objects, objects


def test_verify(run, capsys):
    assert inspect("verify", run) == 0
    assert "intact (2 tensors, 1 objects" in capsys.readouterr().out

    directory = run / "iter_0000030"
    shard = directory / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[700] ^= 16
    shard.write_bytes(content)
    code, report = inspect_json(capsys, "verify", run)

    assert code == 1
    assert len(report["problems"]) == 1
    assert "__0_0.distcp: damaged" in report["problems"][0]

    (directory / ".metadata").unlink()
    assert main(["verify", str(run), "--ckpt-step", "30"]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_verify_of_other_formats(capsys):
    assert main(["verify", str(LLAMA / "torch_dist_dp_reshardable")]) == 0
    assert "written without checksums" in capsys.readouterr().out
    assert main(["verify", str(LLAMA / "legacy")]) == 2
    assert "is a legacy checkpoint; only torch_dist" in capsys.readouterr().err


def test_diff_lists_every_difference(run, tmp_path, capsys):
    torch.manual_seed(1)
    weight = torch.randn(30, 20)
    bias = torch.randn(20).bfloat16()
    same = save_run(tmp_path / "same", 7, weight=weight, bias=bias)

    assert main(["diff", str(run), str(same)]) == 0
    assert "2 tensors compared: equal bitwise" in capsys.readouterr().out

    changed = weight.clone()
    changed[3, 4] += 0.25
    changed[5, 6] = float("nan")
    other = save_run(tmp_path / "other", 7, weight=changed, bias=bias.float(), extra=torch.zeros(2))
    code, result = inspect_json(capsys, "diff", run, other)

    assert code == 1
    assert result["compared"] == 2

    differences = {entry["key"]: entry for entry in result["differences"]}
    assert differences["weight"]["what"] == "2 of 600 values differ"
    assert differences["weight"]["max_abs"] == float("inf")
    assert differences["bias"]["what"] == "bfloat16 and float32, 0 of 20 values differ"
    assert differences["extra"]["what"] == f"only in {other / 'iter_0000007'}"

    near = save_run(tmp_path / "near", 7, weight=weight + 1e-4, bias=bias)
    assert main(["diff", str(run), str(near)]) == 1
    assert "by at most 0.0001" in capsys.readouterr().out
    assert main(["diff", str(run), str(near), "--atol", "1e-3"]) == 0

    wide = save_run(tmp_path / "wide", 7, weight=torch.zeros(31, 20), bias=bias)
    assert main(["diff", str(run), str(wide)]) == 1
    assert "shape (30, 20) and (31, 20)" in capsys.readouterr().out


@pytest.mark.parametrize("other", ["legacy", "torch_dist_dp_reshardable"])
def test_diff_and_digest_across_formats(other, capsys):
    """The formats store the same state stacked or by layer, in model space or in flat buckets."""
    first = LLAMA / "torch_dist_fully_reshardable"
    code, result = inspect_json(capsys, "diff", first, LLAMA / other)

    assert code == 0
    assert result["compared"] == 108
    assert result["differences"] == []

    _, first_result = inspect_json(capsys, "digest", first)
    _, other_result = inspect_json(capsys, "digest", LLAMA / other)
    assert first_result["digests"] == other_result["digests"]


def test_digest(run, capsys):
    torch.manual_seed(1)
    weight = torch.randn(30, 20)
    expected = xxhash.xxh3_128_hexdigest(weight.numpy().tobytes())
    _, result = inspect_json(capsys, "digest", run, "--keys", "weight")
    assert result["digests"] == {"weight": expected}


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["show", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_name_on_the_hub_is_not_downloaded(capsys):
    assert main(["show", "org/some-model"]) == 2
    assert "must be downloaded first: hf download org/some-model" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["https://host/model", "file:///etc", "s3://"])
def test_url_of_another_kind_is_refused_with_those_that_are_read(capsys, url):
    with pytest.raises(SystemExit):
        main(["show", url])
    assert f"{url}: give a directory, or one of s3://bucket/prefix" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["inspect_checkpoint.py", "convert.py"])
def test_scripts_find_the_standard_library(script, tmp_path):
    """Run as a script, its directory must not hide the module `inspect`."""
    command = [sys.executable, str(ROOT / "tools" / "checkpoint" / script), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )

    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout, result.stderr


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_plan_lists_the_bytes_that_every_rank_reads(capsys, tp, pp, vpp):
    """Split tensors are read once over all ranks, replicated ones by every tensor-parallel rank."""
    directory = LLAMA / "torch_dist_fully_reshardable"
    layout = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    layout += ["--virtual-pipeline-model-parallel-size", vpp]
    code, planned = inspect_json(capsys, "plan", directory, *layout)

    assert code == 0
    assert planned["loadable"]
    assert len(planned["ranks"]) == tp * pp

    split = 0
    replicated = 0
    for key, tensor in open_checkpoint(directory).tensors.items():
        if key.startswith("optimizer."):
            continue
        if "layer_norm" in key or "layernorm" in key:
            replicated += tensor.nbytes
        else:
            split += tensor.nbytes

    weight_bytes = sum(rank["weight_bytes"] for rank in planned["ranks"])
    assert weight_bytes == split + tp * replicated

    layers = []
    for rank in planned["ranks"]:
        if rank["tp"] == 0:
            for start, stop in rank["layers"]:
                layers += range(start, stop)

    assert sorted(layers) == [0, 1, 2, 3]

    _, shared = inspect_json(capsys, "plan", directory, *layout, "--data-parallel-size", 2)
    for whole, half in zip(planned["ranks"], shared["ranks"], strict=True):
        assert half["optimizer_bytes"] == -(-whole["optimizer_bytes"] // 2) > 0
    assert main(["plan", str(directory), *map(str, layout)]) == 0
    assert "loadable at" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "reason"), [("tensor", "3"), ("pipeline", "4")])
def test_plan_explains_impossible_layouts(capsys, flag, reason):
    directory = LLAMA / "torch_dist_fully_reshardable"
    code, planned = inspect_json(capsys, "plan", directory, f"--{flag}-model-parallel-size", 3)
    assert code == 1
    assert not planned["loadable"]
    assert "3" in planned["reason"]
    assert reason in planned["reason"]


def test_plan_refuses_checkpoints_without_a_model(run, capsys):
    assert inspect("plan", run) in (1, 2)
    assert main(["plan", str(run / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_plan_plots_the_bytes_of_every_rank(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    picture = tmp_path / "load.png"
    layout = ["--pipeline-model-parallel-size", "2", "--plot", str(picture)]
    assert main(["plan", str(LLAMA / "torch_dist_fully_reshardable"), *layout]) == 0
    assert picture.read_bytes().startswith(PNG)


def test_verify_writes_the_hashes_of_megatron_lm(run, capsys):
    """The next `verify` and Megatron-LM's --verify-integrity check the hashes; none are written for
    a damaged checkpoint.
    """
    directory = run / "iter_0000030"
    assert inspect("verify", run, "--write-integrity-json") == 0

    manifest = json.loads((directory / "integrity.json").read_text())
    hashes = {}
    for path in directory.iterdir():
        if path.name != "integrity.json":
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest == {"algorithm": "sha256", "files": hashes}

    (directory / "common.pt").write_bytes(b"something else")
    capsys.readouterr()
    code, report = inspect_json(capsys, "verify", run)

    assert code == 1
    assert "does not match the hash in integrity.json" in "\n".join(report["problems"])

    (directory / "integrity.json").unlink()
    assert inspect("verify", run, "--write-integrity-json") == 1
    assert not (directory / "integrity.json").exists()


def test_choose_prints_the_choice_of_a_launch_and_writes_nothing(tmp_path, capsys):
    """The tracker was edited, and local checkpoints are newer."""
    run = tmp_path / "run"
    nodes = tmp_path / "nodes"
    run.mkdir()
    (run / ".run").write_text("a run")
    for iteration in (5, 10):
        save_with_lineage(run / f"iter_{iteration:07d}", iteration)
    local = nodes / run_name(run) / "iter_0000011-0000001.x"
    save_with_lineage(local, 11)
    content = b"".join(seal_checksums(encode_checksum_records({})))
    (local / ".done-0-of-1").write_bytes(content)
    common_flags = ["--tensor-model-parallel-size", "64", "--non-persistent-save-interval", "1"]
    common_flags += ["--non-persistent-ckpt-type", "local"]
    common_flags += ["--non-persistent-local-ckpt-dir", str(nodes)]
    flags = ["--save", str(run), "--load", str(run), *common_flags]
    tracker = run / "latest_checkpointed_iteration.txt"
    before = sorted(tmp_path.rglob("*"))

    tracker.write_text("10")
    assert main(["choose", *flags]) == 0
    output = capsys.readouterr().out
    assert f"starts from {local.name} on the disks of the nodes: it is the newest" in output

    tracker.write_text("5")
    assert main(["choose", *flags]) == 0
    output = capsys.readouterr().out

    assert f"starts from {run}/iter_0000005: the tracker names it" in output
    assert f"{run}/iter_0000010 is not used: the tracker has been edited" in output
    assert f"{local.name} on the disks of the nodes is not used" in output
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tracker])

    assert main(["choose", "--load", str(run), "--save", str(run), "--ckpt-step", "7"]) == 2
    assert "--ckpt-step 7" in capsys.readouterr().err

    # The directory moves: its local checkpoints are reported, without the one in progress.
    (local.parent / "iter_0000012-0000001.x").mkdir()
    moved = tmp_path / "moved"
    run.rename(moved)
    assert main(["choose", "--save", str(moved), "--load", str(moved), *common_flags]) == 0
    output = capsys.readouterr().out
    reason = "it has the lineage of this run"
    assert f"{local} on the disks of the nodes is not used: {reason}" in output


def save_with_lineage(directory, iteration):
    lineage = Lineage((Segment(1, iteration, "a"),))
    weight = ShardedTensor.replicated("weight", torch.ones(3))
    files = {"lineage.json": lineage.encode(None)}
    save({"weight": weight}, directory, common={}, extra_files=files)
