"""Bandwidth of the Triton kernels of this project, next to that of a copy on the same GPU.

    python benchmarks/triton_kernels.py
    python benchmarks/triton_kernels.py --smoke     # their references on small tensors, on the CPU

The sizes are those of a layer of a 1.26B model with 4 sequences of 4096 tokens. Each kernel reads
and writes every element once, so a kernel that is limited by memory is as fast as the copy.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core import triton_kernels as kernels  # noqa: E402
from megatron.core import triton_norms as norms  # noqa: E402
from megatron.core import triton_rotary as rotary  # noqa: E402

REPEATS = 20
_CACHE_BYTES = 1 << 28  # more than the second-level cache of a GPU


class Sizes(NamedTuple):
    """Sizes of tensors, in elements."""

    length: int = 4096
    batch: int = 4
    heads: int = 16
    head_dim: int = 128
    ffn: int = 5632
    vocab: int = 32000
    params: int = 1 << 26

    @property
    def tokens(self) -> int:
        return self.length * self.batch

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


SMALL = Sizes(length=16, batch=2, heads=2, head_dim=8, ffn=24, vocab=100, params=1000)


class Case(NamedTuple):
    """A call of a kernel, and the bytes that it reads and writes."""

    name: str
    call: Callable[[], object]
    nbytes: int


def measure(call: Callable[[], object], device: str) -> float:
    """Return the median seconds of a call whose inputs are not in the cache."""
    call()  # compiles the kernel
    seconds = []
    for _ in range(REPEATS):
        if device == "cpu":
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
            continue
        torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device).zero_()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def make_pointwise_cases(sizes: Sizes, device: str) -> list[Case]:
    """Return a copy, SwiGLU and AdamW, with their gradients."""
    x = torch.randn(sizes.tokens, 2 * sizes.ffn, device=device).bfloat16()
    dy = torch.randn(sizes.tokens, sizes.ffn, device=device).bfloat16()
    target = torch.empty_like(x)

    param, grad, mean, square = torch.randn(4, sizes.params, device=device).unbind()
    square.abs_()
    weight = param.bfloat16()
    scalars = torch.tensor([1.0, 0.0, 1e-4, 1.0], device=device)
    states = (param, grad, mean, square, weight, scalars)
    return [
        Case("copy", lambda: target.copy_(x), 2 * x.nbytes),
        Case("SwiGLU", lambda: kernels.swiglu(x), x.nbytes + dy.nbytes),
        Case(
            "SwiGLU, gradient",
            lambda: kernels.swiglu_backward(dy, x),
            2 * x.nbytes + dy.nbytes,
        ),
        # Reads four tensors in fp32, and writes three of them and the weight.
        Case(
            "AdamW",
            lambda: kernels.adamw(*states, 1e-4, 0.9, 0.95, 1e-8, 0.1),
            7 * param.nbytes + weight.nbytes,
        ),
    ]


def make_loss_cases(sizes: Sizes, device: str) -> list[Case]:
    """Return the loss and its gradient, which overwrites the logits."""
    logits = torch.randn(sizes.tokens, sizes.vocab, device=device).bfloat16()
    labels = torch.randint(sizes.vocab, (sizes.tokens,), device=device)
    vectors = [labels, *kernels.softmax(logits, labels, sizes.vocab)[:2]]
    vectors.append(torch.full((sizes.tokens,), 1e-4, device=device))
    return [
        Case("loss", lambda: kernels.softmax(logits, labels, sizes.vocab), logits.nbytes),
        Case(
            "loss, gradient",
            lambda: kernels.softmax_gradient(logits, *vectors, sizes.vocab, None),
            2 * logits.nbytes,
        ),
    ]


def make_norm_cases(sizes: Sizes, device: str) -> list[Case]:
    """Return the residual sum with its RMSNorm, and the gradient of both."""
    x, branch, dy, dtotal = torch.randn(4, sizes.tokens, sizes.hidden, device=device).bfloat16()
    weight = torch.ones(sizes.hidden, device=device).bfloat16()
    total, _, mean, scale = norms.residual_norm(x, branch, weight, None, 1e-5, True, False)
    saved = (total, weight, mean, scale)
    return [
        Case(
            "residual sum, norm",
            lambda: norms.residual_norm(x, branch, weight, None, 1e-5, True, False),
            4 * x.nbytes,
        ),
        Case(
            "residual sum, norm, gradient",
            lambda: norms.residual_norm_backward(dy, dtotal, *saved, False, False),
            4 * x.nbytes,
        ),
    ]


def make_rotation_cases(sizes: Sizes, device: str) -> list[Case]:
    """Return the rotation in place, and the split with rotation and its gradient."""
    shape = (sizes.length, sizes.batch, sizes.heads, 3, sizes.head_dim)
    mixed = torch.randn(shape, device=device).bfloat16()
    angles = torch.rand(sizes.length, 1, 1, 1, sizes.head_dim // 2, device=device)
    cos = angles.cos().bfloat16()
    sin = angles.sin().bfloat16()
    rotated = mixed[..., :2, :]  # queries and keys
    # Gradients of attention, head by head
    by_head = torch.randn(3, sizes.batch, sizes.heads, 1, sizes.length, sizes.head_dim)
    grads = by_head.to(device).bfloat16().permute(0, 4, 1, 2, 3, 5)
    return [
        Case(
            "rotation in place",
            lambda: rotary.rotate(rotated, rotated, cos, sin, False, False),
            2 * rotated.nbytes,
        ),
        Case(
            "split and rotation",
            lambda: rotary.split_and_rotate(mixed, cos, sin, False),
            2 * mixed.nbytes,
        ),
        Case(
            "split and rotation, gradient",
            lambda: rotary.split_and_rotate_backward(*grads, cos, sin, False),
            2 * mixed.nbytes,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small tensors on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.smoke else "cuda"
    sizes = SMALL if options.smoke else Sizes()

    copy_speed: float | None = None
    for make in (make_pointwise_cases, make_loss_cases, make_norm_cases, make_rotation_cases):
        for case in make(sizes, device):
            seconds = measure(case.call, device)
            speed = case.nbytes / seconds
            copy_speed = copy_speed or speed
            print(
                f"{case.name:30s} {1e6 * seconds:8.1f} us {speed / 1e9:8.1f} GB/s "
                f"{100 * speed / copy_speed:6.1f} % of a copy",
                flush=True,
            )


if __name__ == "__main__":
    main()
