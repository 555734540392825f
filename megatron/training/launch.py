"""From a process and its environment to a rank: device, threads, process groups, seeds,
`--compile`.

With --max-restarts, torchrun gives all starts of a job the same store. The addresses that a killed
start left there would mislead the next one, so every start first agrees on a prefix of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.distributed.distributed_data_parallel import outermost_layers
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import ParallelConfig, ParallelState
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRng
from megatron.core.transformer import placement
from megatron.core.transformer.attention import core as core_attention
from megatron.training.config.options import DistributedConfig

_WAIT_FOR_RANK_0 = 10.0  # seconds in which a launcher ends the other ranks after rank 0 has failed


def environment_rank() -> int:
    """This process's rank as the launcher says; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """Number of processes of the run as the launcher says; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize(
    config: DistributedConfig, parallel: ParallelConfig
) -> tuple[ParallelState, torch.device]:
    """Join the run: threads, device, process groups. Under torchrun or as a single plain process."""
    device = join(config)
    return ParallelState.create(
        parallel, timedelta(minutes=config.distributed_timeout_minutes)
    ), device


def join(config: DistributedConfig) -> torch.device:
    """Threads, device and the default process group; one that exists already is used as it is."""
    torch.set_num_threads(num_threads(config))
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    device = choose_device(config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
        not config.disable_bf16_reduced_precision_matmul
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if not dist.is_initialized():
        _init_process_group(
            config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo"),
            timeout,
            device,
        )
    return device


def choose_device(config: DistributedConfig) -> torch.device:
    """`cuda:LOCAL_RANK` where there is CUDA (processes share devices if they are more), else the CPU.

    A launcher may show every process its own device alone (`srun --gpus-per-task=1`): one device is
    everybody's first. If two processes do get the same device, NCCL reports it ("Duplicate GPU
    detected").
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
    if config.device == "cpu" or not available:
        if config.distributed_backend == "nccl":
            raise ValueError("--distributed-backend nccl needs CUDA devices: use gloo on the CPU")
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    devices = torch.cuda.device_count()
    if 1 < devices <= local_rank and config.distributed_backend != "gloo":
        raise ValueError(
            f"local rank {local_rank}, but only {devices} CUDA devices here: start at most {devices} processes per "
            "node, or let processes share a device with --distributed-backend gloo"
        )
    return torch.device("cuda", local_rank % devices)


def num_threads(config: DistributedConfig) -> int:
    """CPU threads of this process.

    torchrun sets OMP_NUM_THREADS=1 when it is unset, which looks like a user's own 1: give
    --num-threads then.
    """
    if config.num_threads is not None:
        return config.num_threads
    given = os.environ.get("OMP_NUM_THREADS")
    if given is not None and given.isdigit():
        return max(1, int(given))
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def seed_everything(
    seed: int, state: ParallelState, rng: TensorParallelRng, iteration: int = 0
) -> None:
    """Seed Python, NumPy and PyTorch as a function of seed, place in the run and iteration.

    Every rank draws its own numbers, but for tensor-parallel ranks of one replica: they hold the
    same activations outside the tensor-parallel regions and must drop the same elements. Inside,
    `rng` takes over.
    """
    place = np.random.SeedSequence([seed, iteration, state.pp.rank, state.dp_cp.rank])
    value = int(place.generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    rng.set_state(TensorParallelRng(value, state.tp.rank, rng.device).get_state())


@contextmanager
def errors_explained_once(status: int = 1) -> Iterator[None]:
    """End the process on a ValueError with a message and without a traceback; if all ranks have it,
    rank 0 reports it.

    The others wait before they report: if rank 0 fails, too, the launcher ends them meanwhile; if
    it does not, the error is theirs alone. torchrun shows the first error of all ranks as the root
    cause.
    """
    try:
        yield
    except ValueError as error:
        rank = environment_rank()
        when = time.time()
        if rank > 0:
            time.sleep(_WAIT_FOR_RANK_0)
        message = f"error on rank {rank}: {error}" if rank > 0 else f"error: {error}"
        _tell_launcher(message, when)
        print(message, file=sys.stderr)
        sys.exit(status)
    except LostRankError as error:
        _tell_launcher(str(error), time.time())
        raise
    except Exception:
        _tell_launcher(traceback.format_exc(), time.time())
        raise


def _tell_launcher(message: str, when: float) -> None:
    """Write torchrun's error file; of all ranks it shows the message with the earliest time, and
    nothing else.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        # the form of torch.distributed.elastic's ErrorHandler, which has no way to leave out the
        # traceback
        error = {
            "message": message,
            "extraInfo": {"py_callstack": message, "timestamp": str(int(when))},
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")


class LostRankError(RuntimeError):
    """Another rank died or did not come in time."""


@contextmanager
def lost_ranks_explained(ps: ParallelState, timeout_minutes: float) -> Iterator[None]:
    """Turn the failure of a collective into a message that names the likely cause."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(
            word in text for word in ("gloo", "NCCL", "has died")
        ):
            raise
        raise LostRankError(
            f"rank {ps.rank} of {ps.world_size} ({ps.place}) stops: another "
            f"rank has died, or did not come within --distributed-timeout-minutes {timeout_minutes:g}; look for the "
            f"first error of the other ranks ({text.splitlines()[0]})"
        ) from error


def _init_process_group(backend: str, timeout: timedelta, device: torch.device) -> None:
    if environment_world_size() == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    device_id = device if backend == "nccl" else None
    shared = launcher_store(timeout)
    if shared is None:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    rank = environment_rank()
    world_size = environment_world_size()
    store = store_of_this_start(shared, rank, world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


# <malloc.h> of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Let the C allocator reuse large blocks instead of returning them to the system; True when it
    agreed.

    By default glibc maps every block of more than 32 MiB anew and unmaps it when it is freed: the
    kernel clears the pages of the logits in every step, some percent of a step of a small bf16
    model on a CPU. The price is that the process stays at its peak size. Nothing is done where the
    environment configures the allocator (MALLOC_*, GLIBC_TUNABLES, or another allocator in
    LD_PRELOAD), or where it is not glibc's.
    """
    configured = [name for name in os.environ if name.startswith("MALLOC_")]
    if configured or "GLIBC_TUNABLES" in os.environ or "LD_PRELOAD" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        is_glibc = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    except (
        OSError,
        AttributeError,
        TypeError,
    ):  # no such function, or no such library on this system
        return False
    if not is_glibc:
        return False
    options = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))
    return all(mallopt(option, value) == 1 for option, value in options)


_PAUSE = 0.02  # seconds between two checks of who has joined


def launcher_store(timeout: timedelta) -> dist.TCPStore | None:
    """The launcher's store, if it has one for its workers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
    )


def store_of_this_start(shared: dist.TCPStore, rank: int, world_size: int) -> dist.Store:
    """A part of `shared` that no earlier start knows. All ranks of this start call it; none of an
    earlier one lives.

    Starts cannot be numbered: each node counts its own. So every rank sends a request with a token
    that it has made up, and rank 0 replies to that token with the prefix: a reply can belong to no
    other start. Rank 0 may also find requests of an earlier start, so it replies until all ranks of
    this one have joined.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        shared.set(f"request/{rank}", token)
        store = dist.PrefixStore(shared.get(f"reply/{token}").decode(), shared)
        store.add("joined", 1)
        return store
    prefix = uuid.uuid4().hex
    store = dist.PrefixStore(prefix, shared)
    replied = set()
    requests = [f"request/{other}" for other in range(1, world_size)]
    while requests and store.add("joined", 0) < len(requests):
        for request in shared.multi_get(requests):
            if request not in replied:
                shared.set(f"reply/{request.decode()}", prefix)
                replied.add(request)
        time.sleep(_PAUSE)
    return store


# Where attention calls what exchanges between ranks, and overlaps that with its kernels.
_EXCHANGES = (
    (core_attention, "blockwise_attention"),
    (placement, "exchange_sequence_for_heads"),
    (placement, "exchange_heads_for_sequence"),
)


def compile_layers(chunk: MegatronModule) -> None:
    """Compile what lies between the linear layers: norms, rotation, attention, activation, residual
    sums.

    One compilation serves all layers of one shape. The products of the linear layers are left as
    they are: they are library calls in any case, and they add to gradient buffers and overlap with
    collectives. Modules, hooks and keys stay the same.
    """
    for owner, name in _EXCHANGES:
        _leave_uncompiled(owner, name)
    for layer in outermost_layers(chunk):
        for kind in {
            type(m)
            for m in layer.modules()
            if isinstance(m, ColumnParallelLinear | RowParallelLinear)
        }:
            # Of the class: torch before 2.8 compiles anew for every module that has a function of
            # its own.
            _leave_uncompiled(kind, "project")
        # dropout draws the numbers that it draws without compilation
        layer.forward = torch.compile(layer.forward, options={"fallback_random": True})  # type: ignore[method-assign]


def _leave_uncompiled(owner: Any, name: str) -> None:
    """Only here: `torch.compiler.disable` imports the compiler, which takes as long as torch
    itself.
    """
    if not hasattr(getattr(owner, name), "_torchdynamo_disable"):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))


def check_compiler(device: torch.device) -> None:
    """ValueError with the reason when torch.compile does not work here; forgets what was compiled
    before.
    """
    try:
        torch.compiler.reset()
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2, device=device))
    except Exception as error:  # whatever backend, compiler or system library it is that fails
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"--compile: torch.compile does not work here ({type(error).__name__}: {reason[0]}); it needs a C++ "
            "compiler on the CPU ($CXX or g++) and Triton on CUDA: install them, or leave out --compile"
        ) from error
