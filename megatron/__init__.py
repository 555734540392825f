"""A compact Megatron-style GPT training stack."""

from pathlib import Path

__version__ = "0.2.0"

# A module that megatron-core has and this project does not.
_OF_MEGATRON_CORE = Path(__file__).parent / "core" / "package_info.py"

if _OF_MEGATRON_CORE.exists():
    raise ImportError(
        f"{Path(__file__).parent} contains files of megatron-core, whose import name is megatron, "
        "too. One of them has overwritten files of the other: pip uninstall megatron-core "
        "megatron-compact, then install one of them, or each in an environment of its own"
    )
