"""Operators of CUDA tensors, computed on the CPU over the memory of the fake CUDA runtime.

build.py installs this module next to torch in the environment of the fake runtime, where the
import of torch enables it. An operator first runs in torch's CUDA build, which checks its arguments,
allocates its results and launches kernels, which do nothing. A task of the current stream, behind
the host, then computes the values with CPU tensors that share the memory of the CUDA tensors.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import math
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_libraries = Path(torch.__file__).parent / "lib"
_runtime = ctypes.CDLL(str(_libraries / "libcudart.so.13"))
_runtime.fake_cuda_host_address.restype = ctypes.c_void_p

# Operators that torch's CUDA build runs itself: they allocate, compare metadata or mark streams.
_NATIVE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_",
    "is_pinned", "pin_memory", "_pin_memory", "record_stream", "is_same_size", "lift_fresh",
    "_has_compatible_shallow_copy_type", "_fused_sdp_choice", "_unsafe_view",
    "_local_scalar_dense",  # .item(): a copy to the host
}  # fmt: skip


def enable() -> None:
    """Compute operators of CUDA tensors from now on, in all threads and in backward passes.

    With FAKE_CUDA_NUMERICS=0 kernels do nothing.
    """
    # Triton links its launcher to the driver, which it looks for among the system's libraries.
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(_libraries))
    ctypes.CDLL(str(_libraries / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    # The real cuDNN decides at run time whether it supports a call; its stub cannot.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # oneDNN rounds fp32 operands to bf16 where torch.set_float32_matmul_precision allows it for CUDA,
    # and the host may have changed that setting by the time a task runs.
    torch.backends.mkldnn.set_flags(_enabled=False)

    if os.environ.get("FAKE_CUDA_NUMERICS") != "0":
        # Streams compute in Python: without them, the host would rarely pass on the interpreter.
        sys.setswitchinterval(0.0005)
        atexit.register(_finish_tasks)
        _HostOperators().__enter__()
        _dispatch_shared_operators()
        threading.Thread.run = _run_with_operators
        for name in ("send", "recv", "isend", "irecv", "all_reduce"):
            function = _without_operators(getattr(torch.distributed, name))
            # `P2POp` compares its operation with that of the inner module.
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                setattr(module, name, function)


def _dispatch_shared_operators() -> None:
    """Call the operators that writers of a save may be the first to call, in two threads at once.

    torch's cache of an operator's Python object (`PyHandleCache.h`) is not safe against that.
    """
    content = torch.zeros(8).detach().reshape(-1).view(torch.uint8)
    copied = torch.empty_like(content)
    torch._foreach_copy_([copied[:8]], [content[:8]], non_blocking=True)
    copied.copy_(content)


def _without_operators(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch.distributed that leaves the mode for CPU tensors.

    Several threads that pass process groups through a mode crash in torch 2.13 and 2.15.
    """

    @functools.wraps(function)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(tensor):
            return function(tensor, *args, **kwargs)
        with _disable_current_modes():
            return function(tensor, *args, **kwargs)

    return run


_run_thread = threading.Thread.run


def _run_with_operators(thread: threading.Thread) -> None:
    """Run a thread of the program; the mode of torch is one of each thread."""
    with _HostOperators():
        _run_thread(thread)


def _finish_tasks() -> None:
    """Wait for the streams, which need the interpreter."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if _errors:
        os._exit(77)


def view_on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    address = _runtime.fake_cuda_host_address(ctypes.c_void_p(storage.data_ptr()))
    memory = (ctypes.c_char * size).from_address(address)
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CUDA tensor with the values and strides of a CPU tensor."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if result.numel():
        view_on_host(result).copy_(tensor)
    return result


def _wait_for_current_stream() -> None:
    _runtime.fake_cuda_wait(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def _is_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


class _HostOperators(TorchDispatchMode):
    """Dispatch mode that replaces the kernels of CUDA tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _raise_error()
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        is_view = func.is_view or torch.Tag.inplace_view in func.tags
        if namespace not in ("aten", "prims", "megatron") or name in _NATIVE or is_view:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        creates_cuda = device is not None and torch.device(device).type == "cuda"
        if not creates_cuda and not any(map(_is_cuda, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if name == "_to_copy":
            return _convert(args[0], kwargs)
        if name == "copy_":
            return _copy(args[0], args[1], **_get_copy_options(args, kwargs))
        if name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                _copy(target, source, **_get_copy_options(args, kwargs))
            return None

        if _needs_values(name, args, kwargs):
            return _compute_now(func, args, kwargs)
        return _launch(func, args, kwargs)


# -------------------------------------------------------------------------------------------------
# Tasks of streams
# -------------------------------------------------------------------------------------------------

# Kernels with larger arguments do nothing.
_MAX_ELEMENTS = int(os.environ.get("FAKE_CUDA_MAX_ELEMENTS", sys.maxsize))

_tasks: dict[int, Callable[[], None]] = {}
_task_numbers = itertools.count(1)
_errors: list[Exception] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run_task(number: int) -> None:
    """Run a task in the thread of its stream."""
    try:
        with torch.no_grad():
            _tasks.pop(number)()
    except Exception as error:
        traceback.print_exc()
        _errors.append(error)


def _raise_error() -> None:
    """Raise the error of an earlier task, as CUDA reports errors of kernels."""
    if _errors:
        raise RuntimeError("an earlier kernel failed") from _errors[0]


def _push_task(task: Callable[[], None]) -> None:
    """Run `task` after the tasks that were launched on the current stream."""
    task_id = next(_task_numbers)
    _tasks[task_id] = task
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _runtime.fake_cuda_push(stream, _run_task, ctypes.c_void_p(task_id))


def _launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of torch's CUDA build, and compute its values in stream order."""
    flat, spec = tree_flatten((args, kwargs))
    if any(_is_cuda(value) and value.numel() > _MAX_ELEMENTS for value in flat):
        return func(*args, **kwargs)
    _check_layouts(func, args, kwargs)
    compute = _find_kernel(func)
    if compute is func and torch.Tag.nondeterministic_seeded in func.tags:
        compute = _make_random_kernel(func, flat)  # before the operator advances the generator
    result = func(*args, **kwargs)

    # Views, which do not keep the memory of the CUDA tensors: the allocator may reuse it.
    operands = [_move_argument(value, copies_host=True) for value in flat]
    changed = {id(value) for value in flat if _is_cuda(value)}
    results = [
        view_on_host(value) if _is_cuda(value) and id(value) not in changed else None
        for value in tree_leaves(result)
    ]
    moved_args, moved_kwargs = tree_unflatten(operands, spec)
    moved_kwargs.pop("pin_memory", None)

    def task() -> None:
        values = tree_leaves(compute(*moved_args, **moved_kwargs))
        for target, value in zip(results, values, strict=True):
            if target is not None and value is not None:
                assert target.shape == value.shape, (str(func), target.shape, value.shape)
                target.copy_(value)

    _push_task(task)
    return result


def _compute_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator whose results depend on values: the host waits for the stream."""
    if torch.cuda.get_sync_debug_mode():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=3)
    _wait_for_current_stream()
    flat, spec = tree_flatten((args, kwargs))
    operands = [_move_argument(value) for value in flat]
    originals = {
        id(moved): value for moved, value in zip(operands, flat, strict=True) if _is_cuda(value)
    }
    moved_args, moved_kwargs = tree_unflatten(operands, spec)
    result = _find_kernel(func)(*moved_args, **moved_kwargs)
    device = torch.device("cuda", torch.cuda.current_device())

    def return_to_device(tensor: Tensor) -> Tensor:
        if id(tensor) in originals:  # an operator that changes its argument
            return originals[id(tensor)]
        return copy_to_device(tensor, device)

    return tree_map_only(Tensor, return_to_device, result)


def _needs_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits for the device in the CUDA kernel of an operator.

    It does where the values of the arguments determine the size of the result, or are checked.
    """
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "segment_reduce":
        return not kwargs.get("unsafe")
    if name in ("index", "index_put_"):
        return any(
            _is_cuda(index) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    return name in (
        "equal",
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique",
        "_unique2",
        "bincount",
    )


def _move_argument(value: Any, copies_host: bool = False) -> Any:
    """Return an argument for the CPU. `copies_host`: the host may change its tensors later."""
    if _is_cuda(value):
        return view_on_host(value)
    if isinstance(value, Tensor) and copies_host:
        return value.clone()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return None
    return value


def _convert(source: Tensor, options: dict[str, Any]) -> Tensor:
    """Compute `Tensor.to` with a copy."""
    target = torch.device(options.get("device") or source.device)
    dtype = options.get("dtype") or source.dtype
    is_transfer = source.device.type != target.type
    if is_transfer and dtype == source.dtype and source.is_contiguous():
        return torch.ops.aten._to_copy.default(source, **options)
    non_blocking = bool(options.get("non_blocking"))
    if not is_transfer:
        return _launch(torch.ops.aten._to_copy.default, (source,), options)
    rest = {k: v for k, v in options.items() if k not in ("device", "pin_memory", "non_blocking")}
    if target.type == "cuda":
        on_host = torch.ops.aten._to_copy.default(source, **rest)
        return torch.ops.aten._to_copy.default(on_host, device=target, non_blocking=non_blocking)
    on_device = _launch(torch.ops.aten._to_copy.default, (source,), rest)
    return torch.ops.aten._to_copy.default(on_device, device=target, non_blocking=non_blocking)


def _get_copy_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, bool]:
    return {"non_blocking": bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))}


def _copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """Compute `Tensor.copy_`, as torch does it: transfers are of contiguous tensors."""
    copy = torch.ops.aten.copy_.default
    if target.device.type == source.device.type == "cuda":
        return _launch(copy, (target, source), {})
    source = source.expand(target.shape)
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        return copy(target, source, non_blocking)
    options = {"dtype": target.dtype, "memory_format": torch.contiguous_format}
    if target.device.type == "cpu":
        on_device = _launch(torch.ops.aten._to_copy.default, (source,), options)
        if target.is_contiguous():
            return copy(target, on_device, non_blocking)
        return target.copy_(torch.ops.aten._to_copy.default(on_device, device="cpu"))

    on_host = torch.ops.aten._to_copy.default(source, **options)
    if target.is_contiguous():
        return copy(target, on_host, non_blocking)
    on_device = torch.ops.aten._to_copy.default(on_host, device=target.device)
    return _launch(copy, (target, on_device), {})


# -------------------------------------------------------------------------------------------------
# Random numbers
# -------------------------------------------------------------------------------------------------


def _make_random_kernel(func: Any, arguments: list[Any]) -> Callable[..., Any]:
    """Return the computation of a random operator, a function of the CUDA generator's state.

    As on a GPU the state consists of the seed and of an offset, which torch advances by the numbers
    that the kernels consume.
    """
    given = [value for value in arguments if isinstance(value, torch.Generator)]
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    generator = given[0] if given else default
    state = (generator.initial_seed(), generator.get_offset())
    name = func._schema.name.split("::")[1]

    def compute(*args: Any, **kwargs: Any) -> Any:
        if name in _RANDOM_KERNELS:
            return _RANDOM_KERNELS[name](*args, **kwargs, state=state)
        kwargs["generator"] = _make_generator(*state)
        if name in _FILLS:
            return getattr(torch.empty_like(args[0]), _FILLS[name])(generator=kwargs["generator"])
        if name in _FACTORIES:
            return getattr(torch, name)(*args, **kwargs)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        raise NotImplementedError(f"{func} has no random numbers on the fake CUDA runtime")

    return compute


def _make_generator(seed: int, offset: int) -> torch.Generator:
    """Return a generator of the CPU for a state of a CUDA generator."""
    generator = torch.Generator()
    generator.manual_seed((seed * 6364136223846793005 + offset) % (1 << 63))
    return generator


_FACTORIES = ("rand", "randn", "randint", "randperm")
_FILLS = {"rand_like": "uniform_", "randn_like": "normal_"}


def _dropout(x: Tensor, p: float, train: bool | None, state: tuple[int, int]) -> Any:
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.rand(x.shape, generator=_make_generator(*state)) >= p
    return x * kept / (1 - p), kept


# -------------------------------------------------------------------------------------------------
# Layouts that kernels of a GPU assume, and torch does not check
# -------------------------------------------------------------------------------------------------


def _check_layouts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the kernel of a GPU would misread an argument, which torch passes on."""
    name = func._schema.name.removeprefix("aten::")
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    if name in _LAYOUT_CHECKS and not _LAYOUT_CHECKS[name](values):
        layouts = {key: (*x.shape, x.stride()) for key, x in values.items() if _is_cuda(x)}
        raise RuntimeError(f"{name}: a GPU would misread an argument, by name: {layouts}")


def _reads_efficient_arguments(values: dict[str, Any]) -> bool:
    """kernel_backward.h: the rows of `out` follow each other in half precision, as do those of
    the log-sum-exp; all are read in the dtype of the query.
    """
    query, out, lse = values["query"], values["out"], values["logsumexp"]
    tensors = (values["grad_out_"], values["key"], values["value"], out)
    if any(x.dtype != query.dtype for x in tensors) or lse.dtype != torch.float32:
        return False
    _, heads, rows, head_dim = out.shape
    expected = (heads * head_dim, 1)
    is_out_read = query.dtype == torch.float32 or rows == 1 or out.stride()[2:] == expected
    return is_out_read and lse.stride(2) == 1


def _reads_flash_arguments(values: dict[str, Any]) -> bool:
    """flash_api.cpp: rows begin at multiples of 16 bytes, and the log-sum-exp is contiguous."""
    for name in ("query", "key", "value"):
        x = values[name]
        if any(step % 8 for step in (x.storage_offset(), *x.stride()[:-1])):
            return False
    lse = values.get("logsumexp")
    return lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)


def _reads_ends(values: dict[str, Any]) -> bool:
    """GroupMM.cu: ends of groups are contiguous."""
    return values.get("offs") is None or values["offs"].is_contiguous()


_LAYOUT_CHECKS = {
    "_scaled_dot_product_efficient_attention_backward": _reads_efficient_arguments,
    "_scaled_dot_product_flash_attention": _reads_flash_arguments,
    "_scaled_dot_product_flash_attention_backward": _reads_flash_arguments,
    "_flash_attention_forward": _reads_flash_arguments,
    "_flash_attention_backward": _reads_flash_arguments,
    "_grouped_mm": _reads_ends,
}


# -------------------------------------------------------------------------------------------------
# Kernels that exist on CUDA only
# -------------------------------------------------------------------------------------------------


def _compute_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Return the fp32 scores `[b, heads, s, t]` of keys with as many heads as the queries."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.float() @ key.float().mT) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.float()


def _compute_dropout(shape: torch.Size, p: float, seed: int, offset: int) -> Tensor | float:
    """Return the factors of probabilities: 0 where they are dropped, else 1 / (1 - p)."""
    if p == 0:
        return 1.0
    kept = torch.rand(shape, generator=_make_generator(seed, offset)) >= p
    return kept / (1 - p)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
    state: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """Return the output `[b, heads, s, d]` and the log-sum-exp of the scores `[b, heads, s]`."""
    copies = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(copies, 1)
    value = value.repeat_interleave(copies, 1)
    scores = _compute_scores(query, key, mask, causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    probabilities = probabilities * _compute_dropout(probabilities.shape, dropout, *state)
    return (probabilities @ value.float()).to(query.dtype), lse


def _attend_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
    state: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    groups = key.shape[1]
    copies = query.shape[1] // groups
    every_key = key.repeat_interleave(copies, 1).float()
    every_value = value.repeat_interleave(copies, 1).float()
    scores = _compute_scores(query, every_key, mask, causal, scale)
    probabilities = (scores - lse[:, :, : query.shape[2]].unsqueeze(-1)).exp()
    factors = _compute_dropout(probabilities.shape, dropout, *state)
    dout = dout.float()
    dprobabilities = (dout @ every_value.mT) * factors
    expected = (dout * out.float()).sum(-1, keepdim=True)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    dscores = probabilities * (dprobabilities - expected) * factor
    dquery = dscores @ every_key
    dkey = (dscores.mT @ query.float()).unflatten(1, (groups, copies)).sum(2)
    dvalue = ((probabilities * factors).mT @ dout).unflatten(1, (groups, copies)).sum(2)
    return dquery, dkey, dvalue


def _flash_attention(
    query, key, value, dropout=0.0, causal=False, return_mask=False, *, scale=None, state
):
    out, lse = _attend(query, key, value, None, causal, scale, dropout, state)
    seed = torch.tensor(state, dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, None, None


def _flash_attention_backward(
    dout, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, unused, *, scale=None
):  # fmt: skip
    state = tuple(seed.tolist()) if dropout else (0, 0)
    return _attend_backward(dout, query, key, value, out, lse, None, causal, scale, dropout, state)


def _split_sequences(x: Tensor, offsets: Tensor | None) -> list[Tensor]:
    """Return views `[1, heads, s, d]` of `[b, s, heads, d]`, or of `[sum of s, heads, d]`."""
    sequences = x.unbind() if offsets is None else x.split(offsets.diff().tolist())
    return [sequence.transpose(0, 1).unsqueeze(0) for sequence in sequences]


def _split_lse(lse: Tensor, offsets: Tensor | None) -> list[Tensor]:
    """Return views `[1, heads, s]` of `[b, heads, s]`, or of `[heads, sum of s]`."""
    if offsets is None:
        return list(lse.split(1))
    return [part.unsqueeze(0) for part in lse.split(offsets.diff().tolist(), dim=1)]


def _make_window_mask(
    query: Tensor, key: Tensor, max_length: int, window: int | None
) -> Tensor | None:
    """Return the keys `[1, heads, s, d]` that each query sees through a window to the left.

    The last query sees `window` keys before the last one.
    """
    num_rows = query.shape[2]
    num_columns = key.shape[2]
    assert num_rows <= max_length, "a sequence is longer than the given maximum"

    if window is None:
        return None
    rows = torch.arange(num_rows) + num_columns - num_rows
    return rows.unsqueeze(1) - torch.arange(num_columns) <= window


def _packed_flash_attention(
    query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, return_mask, *, scale=None, window_size_left=None
):  # fmt: skip
    """Compute flash attention of `[b, s, heads, d]`, or of sequences with offsets."""
    heads = query.shape[-2]
    lse_shape = (heads, query.shape[0])
    if cum_q is None:
        lse_shape = (query.shape[0], heads, query.shape[1])
    out = torch.empty_like(query)
    lse = torch.empty(lse_shape)
    sequences = zip(
        _split_sequences(query, cum_q),
        _split_sequences(key, cum_k),
        _split_sequences(value, cum_k),
        _split_sequences(out, cum_q),
        _split_lse(lse, cum_q),
        strict=True,
    )
    for q, k, v, out_part, lse_part in sequences:
        mask = _make_window_mask(q, k, max_q, window_size_left)
        part, part_lse = _attend(q, k, v, mask, causal, scale)
        out_part.copy_(part)
        lse_part.copy_(part_lse)
    return out, lse, None, None, None


def _packed_flash_attention_backward(
    dout, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, unused, *, scale=None, window_size_left=None
):  # fmt: skip
    gradients = [torch.empty_like(x) for x in (query, key, value)]
    tensors = (dout, query, key, value, out, *gradients)
    split = [_split_sequences(x, cum_q) for x in tensors]
    for *inputs, dq, dk, dv, lse_part in zip(*split, _split_lse(lse, cum_q), strict=True):
        mask = _make_window_mask(inputs[1], inputs[2], max_q, window_size_left)
        parts = _attend_backward(*inputs, lse_part, mask, causal, scale)
        for gradient, part in zip((dq, dk, dv), parts, strict=True):
            gradient.copy_(part)
    return gradients


def _efficient_attention(
    query, key, value, mask, compute_lse, dropout=0.0, causal=False, *, scale=None, state
):
    out, lse = _attend(query, key, value, mask, causal, scale, dropout, state)
    if compute_lse:  # the kernel pads the rows to a multiple of 32
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    return out, lse if compute_lse else None, None, None


def _efficient_attention_backward(
    dout, query, key, value, mask, out, lse, seed, offset, dropout, needs_grad, causal=False, *, scale=None
):  # fmt: skip
    state = (int(seed), int(offset)) if dropout else (0, 0)
    gradients = _attend_backward(
        dout,
        query,
        key,
        value,
        out,
        lse,
        mask,
        causal,
        scale,
        dropout,
        state,
    )
    return *gradients, None


def _grouped_mm(x, weight, offs=None, bias=None, out_dtype=None):
    """Multiply groups of rows with a matrix each; or groups of columns, for their gradient."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    if weight.dim() == 3:
        # As on a GPU, rows after the last group are not written.
        out = torch.full((x.shape[0], weight.shape[2]), math.nan, dtype=x.dtype)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            out[start:end] = x[start:end] @ weight[i]
        return out

    # As on Blackwell, the product of an empty group is not written.
    out = torch.full((len(ends), x.shape[0], weight.shape[1]), math.nan, dtype=x.dtype)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > start:
            out[i] = x[:, start:end] @ weight[start:end]
    return out


def _layer_norm(x, shape, weight, bias, epsilon):
    """Return the norm, and mean and 1 / deviation in fp32, which the CPU would round."""
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    operator = torch.ops.aten.native_layer_norm.default
    out, mean, scale = operator(x.float(), shape, weight, bias, epsilon)
    return out.to(x.dtype), mean, scale


def _layer_norm_backward(dy, x, shape, mean, scale, weight, bias, needs_grad):
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    operator = torch.ops.aten.native_layer_norm_backward.default
    return operator(dy.float(), x.float(), shape, mean, scale, weight, bias, needs_grad)


def _rms_norm(x, shape, weight, epsilon):
    """Return the norm over the last dimension, and 1 / rms in fp32."""
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    result = wide * scale
    if weight is not None:
        result = result * weight.float()
    return result.to(x.dtype), scale


def _rms_norm_backward(dy, x, shape, scale, weight, needs_grad):
    normalized = x.float() * scale
    dnormalized = dy.float() if weight is None else dy.float() * weight.float()
    mean = (dnormalized * normalized).mean(-1, keepdim=True)
    dx = (dnormalized - normalized * mean) * scale
    dweight = None
    if weight is not None:
        dweight = (dy.float() * normalized).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx.to(x.dtype), dweight


def _add_mixed_product(matrix, a, b, out_dtype, *, beta=1, alpha=1, out):
    """Add a product of half precision, which is not rounded, to an fp32 matrix."""
    return torch.addmm(matrix, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha, out=out)


def _norms(tensors, order=2, dtype=None):
    """Return 2-norms, which a GPU sums over so many threads that hardly anything is lost."""
    norms = [torch.linalg.vector_norm(x, order, dtype=torch.float64) for x in tensors]
    return [norm.to(dtype or x.dtype) for norm, x in zip(norms, tensors, strict=True)]


def _embedding_bag(weight, indices, offsets, *args):
    """Return the rows of the bags, and the bag of each index, which only the CUDA kernel returns."""
    rows = torch.ops.aten._embedding_bag.default(weight, indices, offsets, *args)[0]
    bags = torch.searchsorted(offsets, torch.arange(len(indices)), right=True) - 1
    return rows, bags.to(indices.dtype), None, None


_KERNELS = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "addmm.dtype_out": _add_mixed_product,
    "_foreach_norm": _norms,
    "_flash_attention_forward": _packed_flash_attention,
    "_flash_attention_backward": _packed_flash_attention_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "_grouped_mm": _grouped_mm,
}

# Their last argument is the state of the CUDA generator.
_RANDOM_KERNELS = {
    "native_dropout": _dropout,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_efficient_attention": _efficient_attention,
}


def _find_kernel(func: Any) -> Callable[..., Any]:
    """Return the computation of an operator with CPU tensors."""
    name = func._schema.name.split("::")[1]
    overload = f"{name}.{func._schema.overload_name}"
    return _KERNELS.get(overload) or _KERNELS.get(name, func)
