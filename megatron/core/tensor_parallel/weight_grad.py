"""Weight gradients, added straight into `param.main_grad` where a parameter has one.

Contract with data parallelism: it may give a parameter `main_grad`, a view into its gradient buffer (fp32, or
bf16 with --grad-reduce-in-bf16). The backward
of a layer then adds into it and returns None, and autograd still runs the hooks of the parameter: no gradient tensor is
ever allocated. Without `main_grad` the ordinary gradient is returned.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_weight_grad(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """`dW = dy^T x` for `dy [n, out]`, `x [n, in]`."""
    if not hasattr(weight, "main_grad"):
        return dy.t() @ x
    main_grad = weight.main_grad
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x)
    else:
        main_grad.add_(dy.t() @ x)
    return None


def embedding_weight_grad(weight: Tensor, rows: Tensor, dy: Tensor) -> Tensor | None:
    """Sum of `dy [n, h]` over the places where each of the `rows [n]` was looked up."""
    if not hasattr(weight, "main_grad"):
        return torch.ops.aten.embedding_dense_backward(dy, rows, weight.shape[0], -1, False)
    # index_put_ is deterministic on GPUs, index_add_ is not
    weight.main_grad.index_put_((rows,), dy.to(weight.main_grad.dtype), accumulate=True)
    return None
