"""Entry programs import without collecting garbage, and leave the process as they found it."""

import functools
import json
import os
import subprocess
import sys

import torch

from megatron.core.dist_checkpointing import ShardedTensor, save
from tests import ROOT
from tests.support.processes import heed_interrupts

REPORT = """
import gc, json, signal, sys
{before}
import pretrain_gpt
default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(json.dumps([gc.isenabled(), default, gc.get_freeze_count()]))
"""


def import_pretrain_gpt(before: str) -> tuple[bool, bool, int]:
    """Return whether garbage is collected, whether SIGINT is handled by default, and the number of
    objects that are not visited.
    """
    program = [sys.executable, "-c", REPORT.format(before=before)]
    output = subprocess.check_output(program, cwd=ROOT, preexec_fn=heed_interrupts)
    return tuple(json.loads(output))


def test_objects_of_the_imports_are_not_visited():
    collects, has_default_handler, frozen = import_pretrain_gpt(before="")
    assert collects
    assert has_default_handler
    assert frozen > 100_000


def test_another_program_keeps_its_settings():
    """A handler of its own, garbage collection that is off, torch that is imported already."""
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    collects, has_default_handler, _ = import_pretrain_gpt(f"gc.disable(); {ignore}")
    assert not collects
    assert not has_default_handler
    assert import_pretrain_gpt("import torch")[-1] == 0


WRITE_FILE = """
import os, sys
import pretrain_gpt
print("a message", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    os.write(2, b"a message of a library")
    file.write(str(file.fileno()))
"""


def test_files_never_get_the_descriptor_of_a_missing_stream(tmp_path):
    """A program that is started without standard streams, e.g., by a daemon."""
    program = [sys.executable, "-c", WRITE_FILE, str(tmp_path / "file")]
    without_streams = functools.partial(os.closerange, 0, 3)
    subprocess.run(program, cwd=ROOT, preexec_fn=without_streams, check=True)
    assert int((tmp_path / "file").read_text()) > 2


def test_verification_needs_no_stderr(tmp_path):
    state = {"weight": ShardedTensor.replicated("weight", torch.ones(3))}
    save(state, tmp_path / "iter_0000001", common={})
    command = [sys.executable, "tools/checkpoint/inspect_checkpoint.py", "verify", "--json"]
    output = subprocess.check_output(
        [*command, str(tmp_path / "iter_0000001")],
        cwd=ROOT,
        preexec_fn=functools.partial(os.close, 2),
    )
    assert json.loads(output)["tensors"] == 1
