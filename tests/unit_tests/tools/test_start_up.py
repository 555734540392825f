"""What the tools do without importing torch, which is most of their time to start."""

import os
import subprocess
import sys

import pytest
import torch

from megatron.conversion.convert import READERS, WRITERS
from megatron.conversion.deepspeed import names
from megatron.conversion.formats import FORMATS
from megatron.conversion.options import UNIVERSAL_STYLES
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, save, write_tracker
from megatron.core.dist_checkpointing.format.metadata import get_itemsize
from tests import ROOT
from tests.support.training_harness import COMMON
from tests.support.training_harness import LLAMA as LLAMA_MODEL

LLAMA = ROOT / "tests/golden/megatron_lm/mcore_0.16.1/llama_fp32_tp2pp2"
CONVERT = "tools/checkpoint/convert.py"
MERGE = "tools/checkpoint/merge.py"
INSPECT = "tools/checkpoint/inspect_checkpoint.py"
PLAN = "tools/plan_run.py"
PREPROCESS = "tools/preprocess_data.py"
REPORT = "tools/report.py"
# Runs the script as `python script` does, then says whether torch was imported.
CODE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("TORCH" if "torch" in sys.modules else "NO TORCH")
"""


def run(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, words)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        ((CONVERT, "--help"), "--target-tensor-parallel-size"),
        ((CONVERT, "--saver", "zip", "--load-dir", "a", "--save-dir", "b"), "invalid choice"),
        (
            (CONVERT, "--saver", "hf", "--load-dir", "a", "--save-dir", "b", "--num-layrs", "2"),
            "mean --num-layers",
        ),
        (
            (CONVERT, "--saver", "hf", "--load-dir", "a", "--save-dir", "b", "--num-layers", "x"),
            "'x' is not an integer",
        ),
        ((MERGE, "--help"), "--average-last"),
        ((MERGE, "--input", "a:1", "--output", "b", "--num-layrs", "2"), "mean --num-layers"),
        ((INSPECT, "--help"), "print contents"),
        ((INSPECT, "show", "/nowhere"), "holds no checkpoint in a known format"),
        ((INSPECT, "show", LLAMA / "torch_dist_fully_reshardable", "--all"), "output_layer.weight"),
        (
            (INSPECT, "show", LLAMA / "torch_dist_dp_reshardable", "--json"),
            '"params_dtype": "torch.float32"',
        ),
        ((PLAN, "--help"), "--device-memory-gb"),
        ((PLAN, "--world-size", "two"), "invalid int value: 'two'"),
        ((PLAN, "--mtbf-hours", "2"), "requires --measured"),
        ((PREPROCESS, "--help"), "--output-prefix"),
        ((PREPROCESS, "--input", "a.txt"), "--output-prefix are required"),
        ((PREPROCESS, "--workers", "0"), "--workers must be positive"),
        ((REPORT, "--help"), "--output"),
    ],
)
def test_torch_is_not_imported(words, said):
    output = run(*words)
    assert said in output and "NO TORCH" in output, output


def test_show_of_what_we_save_needs_no_torch(tmp_path):
    """Its `.metadata` has an index, and entries that are read one by one."""
    state = {"weight": ShardedTensor.replicated("weight", torch.zeros(4, 3, dtype=torch.bfloat16))}
    save(state, tmp_path / "iter_0000003", common={"iteration": 3})
    write_tracker(tmp_path, 3)
    output = run(INSPECT, "show", tmp_path)
    assert "bfloat16" in output and "24 B" in output and "NO TORCH" in output, output


def test_other_formats_need_torch():
    assert "NO TORCH" not in run(INSPECT, "show", LLAMA / "legacy")


def test_choices_are_those_of_the_tables():
    assert [*READERS] == [*WRITERS] == [*FORMATS] and [*names.STYLES] == [*UNIVERSAL_STYLES]


def test_sizes_of_dtypes_follow_from_their_names():
    dtypes = {
        str(dtype).removeprefix("torch."): dtype
        for dtype in vars(torch).values()
        if type(dtype) is torch.dtype
    }
    assert {name: get_itemsize(name) for name in dtypes} == {
        name: dtype.itemsize for name, dtype in dtypes.items()
    }


def test_the_names_of_dist_checkpointing_are_there():
    names = dist_checkpointing.__all__
    assert len(names) > 40 and all(
        getattr(dist_checkpointing, name).__name__ == name
        for name in names
        if name not in ("Shape", "ShardedStateDict")
    )
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        dist_checkpointing.nothing  # noqa: B018


def test_training_saves_and_resumes_without_dtensor_and_sympy(tmp_path):
    """DCP brings them along, which takes as long as a dozen small saves: its classes are written by
    name.
    """
    code = (
        "import sys, pretrain_gpt; pretrain_gpt.main(); print('IMPORTED', {'sympy', "
        "'torch.distributed.tensor'} & "
    )
    code += "sys.modules.keys())"
    flags = (
        f"{COMMON} {LLAMA_MODEL} --mock-data --train-iters 4 --save {tmp_path} --load "
        f"{tmp_path} --async-save"
    )
    for stop in (2, 4):
        words = [sys.executable, "-c", code, *flags.split(), "--exit-interval", str(stop)]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert "IMPORTED set()" in done.stdout, done.stdout + done.stderr
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(stop)
