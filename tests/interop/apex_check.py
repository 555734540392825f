"""Our calls over the real Python of apex, whose compiled modules are stood in for
(tests/apex_stand_in/kernels).

    python tests/interop/apex_check.py CHECKOUT

`FusedAdam` and the norms give the results of torch's, on the CPU; the calls of compiled functions have as many arguments as
the C++ declarations.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(sys.argv[1])
REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests/apex_stand_in/kernels"), str(CHECKOUT), str(REPOSITORY)]


def check_declarations() -> int:
    """Check that the stand-ins of compiled functions have the arguments of the real ones."""
    compiled = importlib.import_module("amp_C")
    count = 0
    text = (CHECKOUT / "csrc/amp_C_frontend.cpp").read_text()
    for name in ("multi_tensor_adam_capturable", "multi_tensor_l2norm"):
        declared = re.search(rf"{name}_cuda\(([^;]*)\);", text)
        assert declared is not None, name
        parameters = re.sub(r"<[^;]*?>>?", "", declared[1]).split(",")
        assert len(inspect.signature(getattr(compiled, name)).parameters) == len(parameters), (
            name,
            parameters,
        )
        count += 1
    return count


def main() -> None:
    made = torch.tensor

    def on_the_cpu(*values: Any, **options: Any) -> torch.Tensor:
        return made(*values, **{**options, "device": "cpu"})

    torch.tensor = on_the_cpu
    checks = importlib.import_module("tests.support.apex_checks")
    checks.check_adam("cpu", 1e-6)
    checks.check_sum_of_squares("cpu")
    checks.check_norms("cpu", 1e-5)
    loaded = importlib.import_module("apex.optimizers")
    assert Path(loaded.__file__ or "").is_relative_to(CHECKOUT), loaded.__file__
    print(
        f"apex: its FusedAdam and norms give torch's numbers, {check_declarations()} declarations "
        "agree"
    )


if __name__ == "__main__":
    main()
