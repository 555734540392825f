"""Inspection of checkpoints: the commands of tools/checkpoint/inspect_checkpoint.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron.commands.inspection.choose import run_choose
from megatron.commands.inspection.diff import run_diff
from megatron.commands.inspection.digest import run_digest
from megatron.commands.inspection.plan import run_plan
from megatron.commands.inspection.repair import run_repair
from megatron.commands.inspection.show import run_show
from megatron.commands.inspection.verify import run_verify
from megatron.core.safe_files.reading import allow_links

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": run_show,
    "verify": run_verify,
    "diff": run_diff,
    "plan": run_plan,
    "digest": run_digest,
    "repair": run_repair,
    "choose": run_choose,
}


def run(args: argparse.Namespace) -> int:
    """Run the command that the command line specifies; return the exit status."""
    if args.follow_links:
        allow_links()
    return COMMANDS[args.command](args)
