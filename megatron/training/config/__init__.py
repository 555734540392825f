"""What a run is: options as dataclass fields, their flags, and the rules between them.

`parse_args(argv, world_size)` is the stable way in: a `Config`, or ValueError with everything that is wrong.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Parts of this package are imported by what `run_config` imports, so it cannot be imported here
    # at once.
    if name == "parse_args":
        from megatron.training.config.run_config import parse_args

        return parse_args
    raise AttributeError(name)
