"""Private operators of torch, with the checks that their kernels leave out.

A kernel that assumes a memory layout and receives another one returns wrong values without an
error, or reads out of bounds. Every private operator that the project calls is in this file, which
raises ValueError for tensors that a kernel would misread. Names of sources are relative to
`aten/src/ATen/native` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- Products of inputs and weights, by the faster of the libraries that torch contains ----

# oneDNN compiles a kernel for each new shape in 3 to 17 ms. A product of this many multiplications
# takes 3 ms; smaller ones would not make up for that.
_MIN_MULTIPLICATIONS = 1 << 27


def multiply_by_weight(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x W^T + b` for `x [..., in]` and `W [out, in]`. Not differentiable."""
    if _uses_onednn(x, weight):
        return multiply_with_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies large fp32 matrices; torch itself would call MKL."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    num_multiplications = x.numel() * weight.shape[0]
    return num_multiplications >= _MIN_MULTIPLICATIONS and _is_onednn_faster()


@cache
def _is_onednn_faster() -> bool:
    """Return whether oneDNN is available and the processor is AMD's.

    MKL does not select its fastest kernels there: on an EPYC with AVX2, oneDNN takes 0.83x to 0.95x
    of its time. On other processors the two were not compared.
    """
    if not HAS_ONEDNN_LINEAR:
        return False
    try:
        processors = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in processors and torch.backends.mkldnn.is_available()


# ---- Private operators ----

_aten = torch.ops.aten
_NO_DROPOUT = 0.0
# Attention kernels of CUDA load 16 bytes at a time.
_VECTOR_BYTES = 16

HAS_ONEDNN_LINEAR = hasattr(torch.ops.mkldnn, "_linear_pointwise")
# In older versions of torch an RMSNorm consists of several kernels.
HAS_FUSED_RMS_NORM = hasattr(_aten, "_fused_rms_norm")
# Newer versions of torch add products of half precision to an fp32 matrix in one CUDA kernel.
HAS_MIXED_ADDMM = "dtype_out" in _aten.addmm.overloads()


def run_cpu_attention(
    query: Tensor,  # [b, heads, rows, d]
    key: Tensor,  # [b, groups, columns, d]
    value: Tensor,  # [b, groups, columns, d]
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp `[b, heads, rows]` of the CPU's flash attention."""
    _check_cpu_inputs(query, key, value)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, _NO_DROPOUT, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def run_cpu_attention_backward(
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
    """Return the gradients of `run_cpu_attention`."""
    operator = "flash attention of the CPU, backward"
    _check_cpu_inputs(query, key, value)
    # cpu/FlashAttentionKernel.cpp: shapes are those of the query, rows of heads are contiguous.
    if out.shape != query.shape or out.stride(3) != 1:
        _refuse(operator, "out", out, "it must have the query's shape and contiguous rows of heads")
    if lse.shape != query.shape[:3]:
        _refuse(operator, "lse", lse, f"it must have the shape {list(query.shape[:3])}")
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, query, key, value, out, lse, _NO_DROPOUT, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def _check_cpu_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    # transformers/attention.cpp and cpu/FlashAttentionKernel.cpp check the dtypes and the size of
    # heads only. The public function also requires contiguous rows of heads.
    operator = "flash attention of the CPU"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(3) != 1:
            _refuse(operator, name, tensor, "the kernel requires contiguous rows of heads")
        if tensor.shape[0] != query.shape[0]:
            _refuse(operator, name, tensor, f"the query has a batch of {query.shape[0]}")
    if key.shape != value.shape:
        _refuse(operator, "value", value, f"keys have the shape {list(key.shape)}")


def run_flash_attention(
    query: Tensor,  # [b, rows, heads, d], or [rows of all sequences, heads, d] with offsets
    key: Tensor,  # [b, columns, groups, d], or [columns of all sequences, groups, d]
    value: Tensor,  # [b, columns, groups, d], or [columns of all sequences, groups, d]
    offsets: Tensor | None,
    max_rows: int,
    max_columns: int,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, `[b, heads, rows]` or `[heads, rows of all sequences]`.

    `offsets` are the starts of the sequences and the end of the last one.
    """
    _check_vectors("flash attention", query, key, value)
    returns_probabilities = False
    out, lse, *_ = _aten._flash_attention_forward(
        query,
        key,
        value,
        offsets,
        offsets,
        max_rows,
        max_columns,
        _NO_DROPOUT,
        causal,
        returns_probabilities,
        scale=scale,
        window_size_left=window,
    )
    return out, lse


def run_flash_attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor | None,
    max_rows: int,
    max_columns: int,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `run_flash_attention`. `lse` must be contiguous."""
    operator = "flash attention, backward"
    _check_vectors(operator, query, key, value)
    # transformers/cuda/flash_attn/flash_api.cpp passes the address of `lse` without its strides;
    # flash_bwd_kernel.h reads `(sample * heads + head) * rows`. transformers/cuda/
    # attention_backward.cu makes `dout` and `out` contiguous.
    if offsets is None:
        batch, num_rows, heads, _ = query.shape
        lse_shape: tuple[int, ...] = (batch, heads, num_rows)
    else:
        num_rows, heads, _ = query.shape
        lse_shape = (heads, num_rows)
    if lse.shape != lse_shape or lse.dtype != torch.float32 or not lse.is_contiguous():
        _refuse(operator, "lse", lse, f"the kernel reads contiguous fp32 of {list(lse_shape)}")
    rng_state = _make_unused_rng_state(query.device)
    dq, dk, dv = _aten._flash_attention_backward(
        dout,
        query,
        key,
        value,
        out,
        lse,
        offsets,
        offsets,
        max_rows,
        max_columns,
        _NO_DROPOUT,
        causal,
        rng_state,
        rng_state,
        scale=scale,
        window_size_left=window,
    )
    return dq, dk, dv


def _check_vectors(operator: str, *tensors: Tensor) -> None:
    """Check that all rows of heads begin at multiples of 16 bytes.

    transformers/cuda/flash_attn/flash_api.cpp checks shapes, dtypes and the last stride only.
    """
    for tensor in tensors:
        step = _VECTOR_BYTES // tensor.element_size()
        is_aligned = tensor.storage_offset() % step == 0
        for stride in tensor.stride()[:-1]:
            is_aligned = is_aligned and stride % step == 0
        if not is_aligned:
            requirement = f"the kernel loads {_VECTOR_BYTES} bytes at a time: align rows of heads"
            _refuse(operator, "query, key or value", tensor, requirement)


def run_efficient_attention(
    query: Tensor,  # [b, heads, rows, d]
    key: Tensor,  # [b, heads, columns, d]
    value: Tensor,  # [b, heads, columns, d]
    mask: Tensor | None,  # [b, heads, rows, columns]
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, in memory `[b, rows, heads, d]`, and the log-sum-exp `[b, heads, rows]`,
    padded to a multiple of 32 rows, of the memory-efficient kernel of CUDA.
    """
    _check_one_dtype("memory-efficient attention", query, key, value)
    returns_lse = True
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, returns_lse, _NO_DROPOUT, causal, scale=scale
    )
    return out, lse


def run_efficient_attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `run_efficient_attention`.

    `out` must have the layout of the forward pass: `[b, rows, heads, d]` in memory.
    """
    operator = "memory-efficient attention, backward"
    _check_one_dtype(operator, query, key, value, dout, out)
    # transformers/cuda/attention_backward.cu checks neither `out` nor `lse`. In half precision
    # mem_eff_attention/kernel_backward.h reads `out` with `o_strideM() = head_dim * num_heads`, and
    # `lse` with a stride of 1.
    _, heads, num_rows, head_dim = query.shape
    is_row_of_heads = num_rows == 1 or out.stride(2) == heads * head_dim
    if out.shape != query.shape or out.stride(3) != 1 or not is_row_of_heads:
        requirement = f"the kernel reads rows at a distance of {heads * head_dim} elements"
        _refuse(operator, "out", out, f"{requirement}: lay it out as [b, rows, heads, d]")
    padded_shape = (*query.shape[:2], num_rows + -num_rows % 32)
    if lse.shape != padded_shape or lse.dtype != torch.float32 or lse.stride(2) != 1:
        _refuse(operator, "lse", lse, f"the kernel reads fp32 rows of {list(padded_shape)}")
    rng_state = _make_unused_rng_state(query.device)
    seed, offset = rng_state.unbind()
    needs_gradient = [True, True, True, False]  # query, key, value, mask
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        query,
        key,
        value,
        mask,
        out,
        lse,
        seed,
        offset,
        _NO_DROPOUT,
        needs_gradient,
        causal,
        scale=scale,
    )
    return dq, dk, dv


def _check_one_dtype(operator: str, query: Tensor, *tensors: Tensor) -> None:
    """Check that all tensors have the dtype of the query, as which the kernel reads them."""
    for tensor in tensors:
        if tensor.dtype != query.dtype:
            _refuse(operator, "an argument", tensor, f"the kernel reads it as {query.dtype}")


def _make_unused_rng_state(device: torch.device) -> Tensor:
    """Return seed and offset of the dropout that the forward pass would have applied."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


def multiply_groups(x: Tensor, matrices: Tensor, row_ends: Tensor) -> Tensor:
    """Return one product per group of rows `x` `[n, in]` with `[groups, in, out]`, or for `x`
    `[in, n]` and `matrices` `[n, out]` the product `[groups, in, out]` of each group of n.
    """
    # GroupedMMUtils.h checks sizes, and alignment and strides of both matrices; cuda/GroupMM.cu
    # passes the address of the ends without their stride.
    operator = "grouped product"
    if row_ends.dtype != torch.int32 or not row_ends.is_contiguous():
        _refuse(operator, "row_ends", row_ends, "the kernel reads contiguous int32")
    _check_one_dtype(operator, x, matrices)
    return torch.nn.functional.grouped_mm(x, matrices, offs=row_ends)


def multiply_with_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` in fp32 on a CPU."""
    # mkldnn/Linear.cpp makes x contiguous and passes the strides of the weight; it reads all
    # arguments in the dtype that each has, and the result in that of x.
    operator = "linear layer of oneDNN"
    for tensor in (x, weight, bias):
        if tensor is not None and tensor.dtype != torch.float32:
            _refuse(operator, "an argument", tensor, "only fp32 is supported")
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def sum_embedding_gradient(dy: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the sum of `dy [n, h]` for each of the looked-up `rows [n]`: `[num_rows, h]`."""
    # Embedding.cpp and cuda/Embedding.cu make both contiguous and check their sizes.
    no_padding = -1
    scales_by_frequency = False
    summed: Tensor = _aten.embedding_dense_backward(
        dy, rows, num_rows, no_padding, scales_by_frequency
    )
    return summed


def write_silu_gradient(dy: Tensor, x: Tensor, dx: Tensor) -> None:
    """Write the gradient of `silu(x)` to `dx`, with any strides."""
    _check_target("gradient of SiLU", x, dx)
    _aten.silu_backward.grad_input(dy, x, grad_input=dx)


def write_tanh_gelu_gradient(dy: Tensor, x: Tensor, dx: Tensor) -> None:
    """Write the gradient of `gelu(x, approximate="tanh")` to `dx`, with any strides."""
    _check_target("gradient of GELU", x, dx)
    _aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dx)


def _check_target(operator: str, x: Tensor, dx: Tensor) -> None:
    # The operator would resize another target, which then no longer is a view of its tensor.
    if dx.shape != x.shape:
        _refuse(operator, "the target", dx, f"the input has the shape {list(x.shape)}")


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Queue copies of all tensors in one call, which releases the interpreter."""
    # ForeachUtils.h only permits one kernel for dense tensors of the same strides on one device.
    torch._foreach_copy_(targets, sources, non_blocking=True)


def compute_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor."""
    # ForeachUtils.h only permits one kernel for dense tensors of one dtype on one device.
    return torch.stack(torch._foreach_norm(list(tensors)))


def add_to_tensors(tensors: list[Tensor], value: Tensor) -> None:
    """Add a scalar on the same device to each tensor."""
    # ForeachUtils.h only permits one kernel for dense tensors of one dtype on one device. A tensor
    # as argument would be read on the host: torch would take it for a Python number.
    torch._foreach_add_(tensors, [value] * len(tensors))


def _refuse(operator: str, name: str, tensor: Tensor, requirement: str) -> NoReturn:
    layout: dict[str, Any] = {
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
    }
    described = ", ".join(f"{key} {value}" for key, value in layout.items())
    raise ValueError(f"{operator}: {name} has {described}, but {requirement}")
