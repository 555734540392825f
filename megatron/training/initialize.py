"""From a process to a rank: threads, device, process groups and seeds."""

from __future__ import annotations

import ctypes
import logging
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.fused_kernels import enable_kernels
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.config.run_options import DistributedConfig
from megatron.training.rendezvous import init_process_group

logger = logging.getLogger(__name__)


def initialize(
    config: DistributedConfig, parallel: ParallelConfig
) -> tuple[ParallelState, torch.device]:
    """Set up threads, device and process groups, with torchrun or as a single plain process."""
    device = join(config)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if device.type == "cuda" and dist.get_rank() == 0:
        hint = find_queue_hint(parallel.tp_size, torch.cuda.get_device_capability(device))
        if hint is not None:
            logger.warning(hint)
    return ParallelState.create(parallel, timeout), device


def find_queue_hint(tp_size: int, capability: tuple[int, int]) -> str | None:
    """Return a hint if the number of hardware queues of a GPU may prevent overlap.

    The reduction of an input gradient over TP and the product of the weight gradient run at the
    same time only if the reduction starts first. Before Blackwell a single queue ensures this.
    """
    blackwell = (10, 0)
    if tp_size == 1 or capability >= blackwell:
        return None
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value == "1":
        return None
    return (
        f"{name} is {value or 'unset'}: with tensor parallelism on GPUs before Blackwell, 1 lets "
        "the communication of a backward pass overlap with its products"
    )


def join(config: DistributedConfig) -> torch.device:
    """Set up threads, the device and the default process group, unless that exists already."""
    torch.set_num_threads(num_threads(config))
    enable_kernels(config.triton_kernels)
    if config.deterministic_mode:
        # Required by torch for deterministic cuBLAS; read when the first handle is created.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    device = choose_device(config)
    # By the function that Muon also uses: torch refuses a mix of it and `matmul.allow_tf32`.
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
        not config.disable_bf16_reduced_precision_matmul
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if not dist.is_initialized():
        backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        try:
            init_process_group(backend, timeout, device)
        except RuntimeError as error:
            # The second text is that of torch 2.15, which does not pass on NCCL's explanation.
            texts = ("Duplicate GPU", "NCCL communicator: invalid usage")
            if not any(text in str(error) for text in texts):
                raise
            raise ValueError(
                f"local rank {os.environ.get('LOCAL_RANK', '0')} and another process of this node "
                f"have the same GPU ({device}, {torch.cuda.device_count()} visible): start one "
                "process per GPU, or let processes share a GPU with --distributed-backend gloo"
            ) from error
    return device


def choose_device(config: DistributedConfig) -> torch.device:
    """Return `cuda:LOCAL_RANK` if CUDA is available, else the CPU.

    Processes share devices if there are more processes. A launcher may show every process only its
    own device (`srun --gpus-per-task=1`), so with one device, every process uses the first. If two
    processes then get the same device, `join` raises NCCL's error.
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
    # NCCL needs a device of its own for each process.
    if 1 < devices <= local_rank and config.distributed_backend != "gloo":
        raise ValueError(
            f"local rank {local_rank}, but only {devices} CUDA devices here: start at most "
            f"{devices} processes per node, or let processes share a device with "
            "--distributed-backend gloo"
        )
    return torch.device("cuda", local_rank % devices)


def num_threads(config: DistributedConfig) -> int:
    """Return the number of CPU threads of this process.

    torchrun sets OMP_NUM_THREADS=1 if it is unset, which cannot be distinguished from a user's own
    1: give --num-threads to use more.
    """
    if config.num_threads is not None:
        return config.num_threads
    environment_value = os.environ.get("OMP_NUM_THREADS")
    if environment_value is not None and environment_value.isdigit():
        return max(1, int(environment_value))
    # The affinity counts the cores of a container or job, not those of the machine.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // processes)


def seed_everything(
    seed: int, state: ParallelState, rng: TensorParallelRng, iteration: int = 0
) -> None:
    """Seed Python, NumPy and PyTorch as a function of seed, coordinates of the rank and iteration.

    Every rank draws its own numbers, except that the tensor-parallel ranks of one replica draw the
    same: they hold the same activations outside the tensor-parallel regions and must drop the same
    elements. Inside these regions, `rng` is used.
    """
    entropy = [seed, iteration, state.pp.rank, state.dp_cp.rank]
    value = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    rng.set_state(TensorParallelRng(value, state.tp.rank, rng.device).get_state())


# Parameters of mallopt in glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Let the C allocator reuse large blocks instead of returning them to the system.

    By default glibc maps every block of more than 32 MiB again and unmaps it when it is freed: the
    kernel clears the pages of the logits in every step, which takes some percent of a step of a
    small bf16 model on a CPU. The price is that the process stays at its peak size.

    Returns whether the allocator accepted. Its options are not changed if the environment
    configures the allocator (MALLOC_*, GLIBC_TUNABLES, or another allocator in LD_PRELOAD), or if
    it is not glibc's.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if configured or "GLIBC_TUNABLES" in os.environ or "LD_PRELOAD" in os.environ:
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt = library.mallopt
        is_glibc = hasattr(library, "gnu_get_libc_version")
    except (OSError, AttributeError, TypeError):  # this system has no such function or library
        return False
    if not is_glibc:
        return False
    keeps_mapped = mallopt(_M_MMAP_MAX, 0) == 1
    never_trims = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) == 1
    return keeps_mapped and never_trims
