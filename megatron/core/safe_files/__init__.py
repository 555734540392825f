"""Files from strangers: read within limits, links confined, values checked, pickles without code.

`safe_load` reads a file of `torch.save` like `torch.load(weights_only=False)`, without executing
code of the file. Every reader of the project is built from this package; SECURITY.md states the
promises.

- `reading`: opens regular files of bounded size, JSON among them, and refuses links that leave the
  directory that the user has named
- `schema`: composable checks of values, for clear errors
- `torch_load`, `torch_zip`, `unpickler`, `safe_globals`: archives of `torch.save`; the unpickler is
  a stack machine with an allow-list
"""

from megatron.core.safe_files.errors import CheckpointError, DamagedError, UnsafePickleError
from megatron.core.safe_files.torch_load import FileTensor, load_file_tensors, safe_load, safe_open

__all__ = [
    "CheckpointError",
    "DamagedError",
    "FileTensor",
    "UnsafePickleError",
    "load_file_tensors",
    "safe_load",
    "safe_open",
]
