"""Print how much megatron-core and this project differ between layouts, for the same cases.

    python -m tests.interop.layout_table DIRECTORY

DIRECTORY contains the results of `megatron_core_layouts.py`. A cell has the largest differences
from one process, relative: of losses and gradient norms in three steps / of an element of a
gradient of the first step, relative to the largest one of its tensor. Models of the two programs
have the same features, but other values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.functional_tests.test_layout_equivalence import (
    LOSS_TOLERANCE,
    STATE_TOLERANCE,
    compare,
    find_refusal,
    train_case,
    train_one_process,
)
from tests.support.distributed import DistributedPool
from tests.support.layout_cases import EP, LAYOUTS, SP, Layout, flags_of, make_model

# Layout of megatron_core_layouts.py -> layout here
COLUMNS = {
    "tp2": LAYOUTS["tp2"],
    "tp2_sp": LAYOUTS["sp2"],
    "pp2": LAYOUTS["pp2"],
    "cp2": LAYOUTS["cp2_ring"],
    "dp2": LAYOUTS["dp2"],
    "ep2": LAYOUTS["ep2"],
    "tp2_sp_ep2": Layout(2, f"{SP} {EP} --expert-tensor-parallel-size 1", needs_experts=True),
}
CASES: Mapping[str, Mapping[str, str]] = {
    "dense": {},
    "masked tokens": {"loss": "masked"},
    "masked tokens, per-token loss": {"loss": "masked_per_token"},
    "learned sinks, clipped": {"attention": "learned_sinks"},
    "MTP, masked, per-token loss": {"head": "two_more_tokens", "loss": "masked_per_token"},
    "experts": {"mlp": "experts"},
    "experts, padding, per-token loss": {"mlp": "experts", "loss": "masked_per_token"},
    "experts, global_aux_loss": {"mlp": "global_balance"},
}


def format_theirs(result: Any, reference: Any) -> str:
    if result is None:
        return ""
    if isinstance(result, str):
        return "refused" if "sequence parallelism" in result else "needs a GPU"
    curves = [
        abs(value - expected) / abs(expected)
        for name in ("losses", "norms")
        for value, expected in zip(result[name], reference[name], strict=True)
    ]
    gradients = [
        float((gradient - expected).abs().max() / expected.abs().max())
        for gradient, expected in (
            (result["gradients"][name], expected)
            for name, expected in reference["gradients"].items()
        )
    ]
    return f"{max(curves):.0e} / {max(gradients):.0e}"


def format_ours(pool: DistributedPool, changes: Mapping[str, str], layout: Layout) -> str:
    model = make_model({**changes, "optimizer": "adam_clipped"})
    flags = flags_of(model)
    if layout.needs_experts and "--num-experts" not in flags:
        return ""
    if find_refusal(f"{flags} {layout.flags}", layout.processes) is not None:
        return "refused"
    curves = pool.run(train_case, layout.processes, f"{flags} {layout.flags}")
    difference = compare(curves, train_one_process(pool, flags))
    return f"{difference.curves * LOSS_TOLERANCE:.0e} / {difference.states * STATE_TOLERANCE:.0e}"


def main() -> None:
    directory = Path(sys.argv[1])
    results = {
        path.stem: torch.load(path, weights_only=False) for path in sorted(directory.glob("*.pt"))
    }
    reference = results["one"]
    columns = [name for name in COLUMNS if name in results]
    print("| case | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    pool = DistributedPool(max_workers=2)
    try:
        for case in [*CASES, "label smoothing"]:
            theirs = [format_theirs(results[name].get(case), reference[case]) for name in columns]
            print(f"| {case} | " + " | ".join(theirs) + " |")
            if case in CASES:
                ours = [format_ours(pool, CASES[case], COLUMNS[name]) for name in columns]
                print("| *here* | " + " | ".join(ours) + " |", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
