"""Every launch script's command line is understood by the real parser, at the world size it is made for."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.training.run_config import parse_args

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "examples/single_gpu.sh": 1,
    "examples/one_node_8_gpus.sh": 8,
    "examples/slurm/pretrain.sbatch": 128,
}


def command_line(script: str, tmp_path: Path) -> list[str]:
    """What the script would launch: `LAUNCH` prints its arguments, one a line."""
    printer = tmp_path / "print_arguments"
    printer.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    printer.chmod(0o755)
    environment = {
        **os.environ,
        "LAUNCH": shlex.quote(str(printer)),
        "DATA": "/data/corpus_text_document",
        "TOKENIZER": "/data/tokenizer",
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    result = subprocess.run(["bash", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_parser_takes_every_flag(script, tmp_path):
    words = command_line(script, tmp_path)
    assert words[0] == "pretrain_gpt.py"
    config = parse_args(words[1:], SCRIPTS[script])
    assert config.model.bf16 and config.ddp.use_distributed_optimizer
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / "run/checkpoints")


def test_every_script_is_tested():
    launching = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "examples").rglob("*")
        if path.suffix in (".sh", ".sbatch") and "pretrain_gpt.py" in path.read_text() and "LAUNCH" in path.read_text()
    }
    assert launching == set(SCRIPTS)
