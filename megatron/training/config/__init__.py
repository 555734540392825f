"""The options of a run as dataclass fields, their command-line flags, and the rules between them.

Stable interface: `parse_args(argv, world_size)` returns a `Config`, or raises ValueError that lists
all problems.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Lazy: tools that only need `arguments` start without importing torch.
    if name == "parse_args":
        from megatron.training.config.parsing import parse_args

        return parse_args
    raise AttributeError(name)
