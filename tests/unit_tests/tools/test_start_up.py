"""Tools parse their arguments before they import torch, which is most of their time to start."""

import os
import subprocess
import sys

import pytest
import torch

from megatron.conversion.checkpoint_conversion import WEIGHT_WRITERS, WRITERS
from megatron.conversion.deepspeed import names
from megatron.conversion.options import FORMAT_NAMES, READ_FORMATS, SAVERS, UNIVERSAL_STYLES
from megatron.core.dist_checkpointing.box_table import get_itemsize
from megatron.core.run_checkpoint.formats import FORMATS
from tests import ROOT
from tests.support.crash_harness import free_port
from tests.support.training_harness import COMMON
from tests.support.training_harness import LLAMA as LLAMA_MODEL

LLAMA = ROOT / "tests/golden/megatron_lm/mcore_0.16.1/llama_fp32_tp2pp2"
CONVERT = "tools/checkpoint/convert.py"
MERGE = "tools/checkpoint/merge.py"
INSPECT = "tools/checkpoint/inspect_checkpoint.py"
PLAN = "tools/plan_run.py"
PREPROCESS = "tools/preprocess_data.py"
REPORT = "tools/report.py"
HEAVY = {"numpy", "torch", "transformers"}
# Runs the script as `python script` does, then prints the heavy modules that were imported.
CODE = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("HEAVY", sorted({HEAVY} & sys.modules.keys()))
"""


def run(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, words)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "words, expected",
    [
        ((CONVERT, "--help"), "--target-tensor-parallel-size"),
        ((CONVERT, "--saver", "zip", "--load-dir", "a", "--save-dir", "b"), "is not one of"),
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
        ((INSPECT, "list", "a"), "invalid choice"),
        ((PLAN, "--help"), "--device-memory-gb"),
        ((PLAN, "--world-size", "two"), "invalid int value: 'two'"),
        ((PLAN, "--mtbf-hours", "2"), "requires --measured"),
        ((PREPROCESS, "--help"), "--output-prefix"),
        ((PREPROCESS, "--input", "a.txt"), "--output-prefix are required"),
        ((PREPROCESS, "--workers", "0"), "--workers must be positive"),
        ((PREPROCESS, "--tokenizer-type", "Bert"), "is not one of"),
        ((REPORT, "--help"), "--output"),
        ((REPORT,), "arguments are required: RUN"),
    ],
)
def test_arguments_are_parsed_before_heavy_imports(words, expected):
    output = run(*words)
    assert expected in output, output
    assert "HEAVY []" in output, output


def test_commands_import_torch():
    assert "'torch'" in run(INSPECT, "show", LLAMA / "legacy")


def test_choices_are_those_of_the_tables():
    assert [*WRITERS] == [*FORMAT_NAMES]
    assert [*WRITERS, *WEIGHT_WRITERS] == [*SAVERS]
    assert [*FORMATS] == [*READ_FORMATS]
    assert [*names.STYLES] == [*UNIVERSAL_STYLES]


def test_sizes_of_dtypes_follow_from_their_names():
    dtypes = {
        str(dtype).removeprefix("torch."): dtype
        for dtype in vars(torch).values()
        if type(dtype) is torch.dtype
    }
    assert {name: get_itemsize(name) for name in dtypes} == {
        name: dtype.itemsize for name, dtype in dtypes.items()
    }


# DCP brings DTensor and sympy along, which takes as long as a dozen small saves: its classes are
# written by name. The others are wings.
UNNEEDED = (
    "sympy",
    "torch.distributed.tensor",
    "megatron.commands",
    "megatron.conversion",
    "megatron.core.apex",
    "megatron.core.datasets.fill_in_the_middle",
    "megatron.core.datasets.indexed_dataset_builder",
    "megatron.core.datasets.split_lists",
    "megatron.core.dist_checkpointing.format.dcp_metadata",
    "megatron.core.dist_checkpointing.saving.model_export",
    "megatron.core.dist_checkpointing.saving.object_commit",
    "megatron.core.dist_checkpointing.tiers",
    "megatron.core.dist_checkpointing.verification",
    "megatron.core.object_files",
    "megatron.core.object_storage",
    "megatron.core.optimizer.rules",
    "megatron.core.pipeline_parallel.layout_notation",
    "megatron.core.pipeline_parallel.uneven_stages",
    "megatron.core.run_checkpoint.directory_contents",
    "megatron.core.safe_files.named_files",
    "megatron.core.transformer.attention.alibi",
    "megatron.core.transformer.attention.blockwise",
    "megatron.core.transformer.attention.latent",
    "megatron.core.transformer.attention.softcap",
    "megatron.core.transformer.layer_pattern",
    "megatron.core.transformer.moe",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.transformer_engine",
    "megatron.training.checkpoint.damage",
    "megatron.training.checkpoint.export",
    "megatron.training.checkpoint.fp8_state",
    "megatron.training.compilation",
    "megatron.training.config.checkpoint_args",
    "megatron.training.config.flag_help",
    "megatron.training.data.tokenizer_libraries",
    "megatron.training.operations",
    "megatron.training.reporting.dashboards",
    "megatron.training.reporting.goodput_line",
    "megatron.training.reporting.profiling",
    "megatron.training.reporting.recorded_launches",
    "megatron.training.reporting.run_report",
    "megatron.training.restart",
    "megatron.training.sft",
)
# Trains as `python pretrain_gpt.py` does, then prints the modules that a dense run does not need.
TRAIN = f"""
import sys, pretrain_gpt
pretrain_gpt.main()
names = [name for name in sys.modules if name.startswith({UNNEEDED})]
print("UNNEEDED", sorted(names))
"""


def test_training_saves_and_resumes_without_wings(tmp_path):
    """A dense run saves asynchronously, and resumes with two tensor-parallel ranks."""
    flags = (
        f"{COMMON} {LLAMA_MODEL} --mock-data --train-iters 4 --save {tmp_path} --load "
        f"{tmp_path} --async-save"
    )
    for stop, tp_size in ((2, 1), (4, 2)):
        layout = ["--exit-interval", str(stop), "--tensor-model-parallel-size", str(tp_size)]
        command = [sys.executable, "-c", TRAIN, *flags.split(), *layout]
        group = {"WORLD_SIZE": str(tp_size), "MASTER_ADDR": "127.0.0.1"}
        group["MASTER_PORT"] = str(free_port())
        ranks = []
        for rank in map(str, range(tp_size)):
            environment = os.environ | group | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
        for process in ranks:
            output, _ = process.communicate(timeout=120)
            assert "UNNEEDED []" in output, output
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(stop)
