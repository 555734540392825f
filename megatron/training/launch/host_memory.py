"""Keep the memory that a training step frees for the next step."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h> of glibc


def keep_freed_memory() -> bool:
    """Let the C allocator reuse large blocks instead of returning them to the system; True when it agreed.

    By default glibc maps every block of more than 32 MiB anew and unmaps it when it is freed: the kernel clears the
    pages of the logits in every step, some percent of a step of a small bf16 model on a CPU. The price is that the
    process stays at its peak size. Nothing is done where the environment configures the allocator (MALLOC_*,
    GLIBC_TUNABLES, or another allocator in LD_PRELOAD), or where it is not glibc's.
    """
    configured = [name for name in os.environ if name.startswith("MALLOC_")]
    if configured or "GLIBC_TUNABLES" in os.environ or "LD_PRELOAD" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        is_glibc = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    except (OSError, AttributeError, TypeError):  # no such function, or no such library on this system
        return False
    if not is_glibc:
        return False
    options = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))
    return all(mallopt(option, value) == 1 for option, value in options)
