"""Operators of CUDA tensors, computed on the CPU over the memory of the fake CUDA runtime.

build.py installs this module next to torch in the environment of the fake runtime, where the
import of torch enables it. Views, allocations, plain copies and collectives remain those of torch's
CUDA build, in the order of its streams. Any other operator waits for the current stream and then
runs on CPU tensors that share the memory of its CUDA arguments.
"""

from __future__ import annotations

import ctypes
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcudart.so.13"))
_runtime.fake_cuda_host_address.restype = ctypes.c_void_p

# Operators that torch's CUDA build runs itself: they allocate, compare metadata or mark streams.
_NATIVE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_",
    "is_pinned", "pin_memory", "_pin_memory", "record_stream", "is_same_size", "lift_fresh",
    "_has_compatible_shallow_copy_type", "_fused_sdp_choice",
    "_local_scalar_dense",  # .item(): a copy to the host
}  # fmt: skip


def enable() -> None:
    """Compute operators of CUDA tensors from now on, in this thread and in its backward passes.

    With FAKE_CUDA_NUMERICS=0 kernels do nothing.
    """
    # The real cuDNN decides at run time what it supports; its stub cannot.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("FAKE_CUDA_NUMERICS") != "0":
        _HostOperators().__enter__()


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
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        flat, spec = tree_flatten((args, kwargs))
        inputs = [value for value in flat if _is_cuda(value)]
        device = kwargs.get("device")
        creates_cuda = device is not None and torch.device(device).type == "cuda"
        is_view = func.is_view or torch.Tag.inplace_view in func.tags
        if namespace not in ("aten", "prims") or name in _NATIVE or is_view:
            return func(*args, **kwargs)
        if not inputs and not creates_cuda:
            return func(*args, **kwargs)
        if name == "_to_copy":
            return _convert(args[0], kwargs)
        if name == "copy_":
            return _copy(func, args, kwargs)

        target: torch.device | None = None  # of the results; None: the CPU
        if creates_cuda or device is None:
            current = torch.device("cuda", torch.cuda.current_device())
            target = inputs[0].device if inputs else current
        if torch.cuda.get_sync_debug_mode() and _waits_on_gpu(name, args, kwargs):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        _wait_for_current_stream()
        on_host, originals = _move_arguments(flat)
        host_args, host_kwargs = tree_unflatten(on_host, spec)
        if creates_cuda:
            host_kwargs.pop("pin_memory", None)
        overload = f"{name}.{func._schema.overload_name}"
        compute = _KERNELS.get(overload) or _KERNELS.get(name, func)
        result = compute(*host_args, **host_kwargs)

        def return_to_device(tensor: Tensor) -> Tensor:
            if id(tensor) in originals:  # an operator that changes its argument
                return originals[id(tensor)]
            return tensor if target is None else copy_to_device(tensor, target)

        return tree_map_only(Tensor, return_to_device, result)


def _waits_on_gpu(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits for the device in the CUDA kernel of an operator.

    It does where the values of the arguments determine the size of the result, or are checked.
    """
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "segment_reduce":
        return not kwargs.get("unsafe")
    if name == "index":
        return any(_is_cuda(index) and index.dtype == torch.bool for index in args[1])
    return name in ("nonzero", "masked_select", "unique_dim", "_unique", "_unique2", "bincount")


def _move_arguments(values: list[Any]) -> tuple[list[Any], dict[int, Tensor]]:
    """Return the arguments for the CPU, and the CUDA tensors by id of their CPU tensors."""
    on_host: list[Any] = []
    originals: dict[int, Tensor] = {}
    for value in values:
        moved = value
        if _is_cuda(value):
            moved = view_on_host(value)
            originals[id(moved)] = value
        elif isinstance(value, torch.device):
            moved = torch.device("cpu")
        elif isinstance(value, torch.Generator) and value.device.type == "cuda":
            moved = None  # random numbers come from the CPU's default generator
        on_host.append(moved)
    return on_host, originals


def _convert(source: Tensor, options: dict[str, Any]) -> Tensor:
    """Compute `Tensor.to` with a copy."""
    target = torch.device(options.get("device") or source.device)
    dtype = options.get("dtype") or source.dtype
    is_transfer = source.device.type != target.type
    if is_transfer and dtype == source.dtype and source.is_contiguous():
        return torch.ops.aten._to_copy.default(source, **options)
    _wait_for_current_stream()
    on_host = view_on_host(source) if _is_cuda(source) else source
    rest = {k: v for k, v in options.items() if k not in ("device", "pin_memory", "non_blocking")}
    result = torch.ops.aten._to_copy.default(on_host, **rest)
    if target.type != "cuda":
        shares_memory = result.numel() > 0 and result.data_ptr() == on_host.data_ptr()
        return result.clone() if shares_memory else result
    return copy_to_device(result, target)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute `Tensor.copy_`: as a transfer in stream order where a single copy does it."""
    target, source = args[:2]
    is_transfer = source.device.type != target.device.type
    has_same_layout = (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
    )
    if is_transfer and (has_same_layout or source.numel() == 0):
        return func(*args, **kwargs)
    _wait_for_current_stream()
    host_target = view_on_host(target) if _is_cuda(target) else target
    host_target.copy_(view_on_host(source) if _is_cuda(source) else source)
    return target


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


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output `[b, heads, s, d]` and the log-sum-exp of the scores `[b, heads, s]`."""
    copies = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(copies, 1)
    value = value.repeat_interleave(copies, 1)
    scores = _compute_scores(query, key, mask, causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    return torch.empty_like(query).copy_(probabilities @ value.float()), lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    groups = key.shape[1]
    copies = query.shape[1] // groups
    every_key = key.repeat_interleave(copies, 1).float()
    every_value = value.repeat_interleave(copies, 1).float()
    scores = _compute_scores(query, every_key, mask, causal, scale)
    probabilities = (scores - lse[:, :, : query.shape[2]].unsqueeze(-1)).exp()
    dout = dout.float()
    dprobabilities = dout @ every_value.mT
    expected = (dout * out.float()).sum(-1, keepdim=True)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    dscores = probabilities * (dprobabilities - expected) * factor
    dquery = dscores @ every_key
    dkey = (dscores.mT @ query.float()).unflatten(1, (groups, copies)).sum(2)
    dvalue = (probabilities.mT @ dout).unflatten(1, (groups, copies)).sum(2)
    return (
        torch.empty_like(query).copy_(dquery),
        torch.empty_like(key).copy_(dkey),
        torch.empty_like(value).copy_(dvalue),
    )


def _flash_attention(
    query, key, value, dropout=0.0, causal=False, return_mask=False, *, scale=None
):
    out, lse = _attend(query, key, value, None, causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64)
    offset = torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, torch.empty(0)


def _flash_attention_backward(
    dout, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale=None
):  # fmt: skip
    return _attend_backward(dout, query, key, value, out, lse, None, causal, scale)


def _efficient_attention(
    query, key, value, mask, compute_lse, dropout=0.0, causal=False, *, scale=None
):
    out, lse = _attend(query, key, value, mask, causal, scale)
    if compute_lse:  # the kernel pads the rows to a multiple of 32
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    else:
        lse = torch.empty(0)
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_attention_backward(
    dout, query, key, value, mask, out, lse, seed, offset, dropout, needs_grad, causal=False, *, scale=None
):  # fmt: skip
    return *_attend_backward(dout, query, key, value, out, lse, mask, causal, scale), None


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


_KERNELS = {
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "addmm.dtype_out": _add_mixed_product,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "_grouped_mm": _grouped_mm,
}
