"""Entry programs import without collecting garbage, and leave the process as they found it."""

import json
import subprocess
import sys

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
    assert collects and has_default_handler
    assert frozen > 100_000


def test_another_program_keeps_its_settings():
    """A handler of its own, garbage collection that is off, torch that is imported already."""
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    collects, has_default_handler, _ = import_pretrain_gpt(f"gc.disable(); {ignore}")
    assert not collects and not has_default_handler
    assert import_pretrain_gpt("import torch")[-1] == 0
