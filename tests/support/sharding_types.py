"""A checker of sharding: propagates the type of every value on an axis through real training code.

The program runs as one rank of a `fake` process group, under a dispatch mode that sees every
operator of the forward and the backward pass. Types are derived from the declared sharding of
parameters and inputs, never from values, so that an error is noticed whatever the data is:

    replicated      the same on all ranks
    sharded         each rank has a part of a dimension
    partial         each rank has a summand (of a maximum: a candidate)
    varying         differs between ranks in another way; only local operations
    mask            marks the rows that another rank has
    undefined       zeros or unwritten memory: goes with every type

A collective requires an input of the type that it completes. Constant factors are not checked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.module import param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer import placement
from megatron.core.transformer.attention import blockwise, exchange, masks
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_layer import MoELayer


class Type(NamedTuple):
    """The type of a value on the axis."""

    name: str
    dim: int = -1
    """The sharded dimension."""
    outer: int = 1
    """Number of elements of other dimensions that were merged with it, before it."""

    def __str__(self) -> str:
        return f"sharded({self.dim})" if self.name == "sharded" else self.name


REPLICATED = Type("replicated")
PARTIAL = Type("partial")
MAXIMUM = Type("partial maximum")
VARYING = Type("varying")
OFFSET = Type("offset")  # indices relative to the first row of the rank
LOOKED_UP = Type("looked up")  # from a shard: right on the rank that has the row
MASK = Type("mask")
UNDEFINED = Type("undefined")


def sharded(dim: int, outer: int = 1) -> Type:
    return Type("sharded", dim, outer)


class ShardingError(Exception):
    """The types of an operation do not agree."""


class RankNumber(int):
    """The rank on the axis, or a number computed from it; operations with tensors see it."""

    def _wrap(operation: Callable[[int, int], Any]) -> Any:  # type: ignore[misc]
        def compute(self: RankNumber, other: Any) -> Any:
            result = operation(int(self), other)
            return RankNumber(result) if isinstance(result, int) else result

        return compute

    __add__ = __radd__ = _wrap(lambda a, b: a + b)
    __mul__ = __rmul__ = _wrap(lambda a, b: a * b)
    __sub__ = _wrap(lambda a, b: a - b)
    __rsub__ = _wrap(lambda a, b: b - a)
    __floordiv__ = _wrap(lambda a, b: a // b)
    __mod__ = _wrap(lambda a, b: a % b)


def with_rank_number(axis: Axis) -> Axis:
    return replace(axis, rank=RankNumber(axis.rank)) if axis.size > 1 else axis


VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
SAME_SHAPE_LINEAR = {
    "add", "add_", "sub", "sub_", "rsub", "neg", "neg_", "clone", "_to_copy", "alias", "detach",
    "lift_fresh",
}  # fmt: skip
PRODUCTS = {
    "mul", "mul_", "div", "div_", "silu_backward", "gelu_backward", "sigmoid_backward",
    "tanh_backward", "threshold_backward", "softplus_backward", "_softmax_backward_data",
}  # fmt: skip
# Functions of every element, by value, of one or several tensors
ELEMENTWISE = {
    "exp", "exp_", "expm1", "log", "log_", "log1p", "sin", "cos", "gelu", "silu", "sigmoid", "relu",
    "tanh", "tanh_", "softplus", "reciprocal", "rsqrt", "pow", "pow_", "abs", "sign", "clamp",
    "clamp_", "clamp_min", "clamp_min_", "floor", "floor_divide", "remainder", "bitwise_not",
    "bitwise_or", "bitwise_and", "bitwise_and_", "logical_and_", "logical_and", "ge", "gt", "lt",
    "le", "eq", "ne", "where", "masked_fill", "masked_fill_", "minimum", "maximum", "logaddexp",
    "addcmul_", "ones_like", "full_like", "triu_", "sqrt", "fill_", "isfinite", "logical_or_",
    "square_",
}  # fmt: skip
SUMS = {"sum", "mean"}
FACTORIES = {"arange", "ones", "full", "scalar_tensor", "new_ones", "new_full", "rand", "randn"}
EMPTY = {"empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "empty_strided",
         "zero_", "new_empty_strided"}  # fmt: skip
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = f"{ATTENTION}_backward"


class Checker(TorchDispatchMode):
    """Dispatch mode that keeps the type of every tensor.

    `varying_sums` accepts sums of varying values, as of the outputs of different experts. With
    `independent` ranks, which have micro-batches of their own, numbers of tokens and statistics of a
    micro-batch are constants.
    """

    def __init__(self, varying_sums: bool = False, independent: bool = False) -> None:
        super().__init__()
        self.varying_sums = varying_sums
        self.independent = independent
        self.collectives: list[str] = []
        # By view: storage, offset, shape and strides. Storages are kept, so that no address is used
        # twice.
        self._types: dict[tuple[Any, ...], Type] = {}
        self._views: dict[int, set[tuple[Any, ...]]] = {}
        self._kept: list[Any] = []
        self._gradients: set[tuple[Any, ...]] = set()
        self.is_paused = False

    # --- types of tensors ---------------------------------------------------------------------

    def get(self, tensor: Tensor) -> Type:
        """Return the type of a tensor; tensors from before the run are the same on all ranks."""
        key = _key(tensor)
        if key in self._types:
            return self._types[key]
        types = {self._types[view] for view in self._views.get(key[0], ())}
        if len(types) == 1 and next(iter(types)).name != "sharded":
            return next(iter(types))
        if not types:
            return REPLICATED
        for view in self._views[key[0]]:  # another shape of the same memory
            if view[1] == key[1] and math.prod(view[2]) == tensor.numel():
                return self._reshape(self._types[view], view[2], tuple(tensor.shape))
        return UNDEFINED if types == {UNDEFINED} else VARYING

    def set(self, tensor: Tensor, value: Type) -> None:
        """Set the type of a new tensor, or of one that is overwritten."""
        key = _key(tensor)
        self._types[key] = value
        views = self._views.setdefault(key[0], set())
        if not views:
            self._kept.append(tensor.untyped_storage())
        views.add(key)

    def add_gradient(self, main_grad: Tensor) -> None:
        """Add the gradient of a parameter, a view of a buffer that is reduced as a whole."""
        self.set(main_grad, UNDEFINED)
        self._gradients.add(_key(main_grad))

    def write(self, tensor: Tensor, value: Type) -> None:
        """Set the type of a tensor that is written, and of other views of the same memory."""
        self.set(tensor, value)
        if value == UNDEFINED:
            return
        key = _key(tensor)
        start, stop = key[1], key[1] + tensor.numel()
        for view in self._views[key[0]] - {key}:
            begin, end = view[1], view[1] + math.prod(view[2])
            if end <= start or stop <= begin:
                continue
            if value.name != "sharded" or len(view[2]) == tensor.dim():
                self._types[view] = value
            elif math.prod(view[2]) == tensor.numel():
                self._types[view] = self._reshape(value, key[2], view[2])
            elif view[2][-tensor.dim() :] == key[2]:  # of all experts, for example
                self._types[view] = sharded(value.dim + len(view[2]) - tensor.dim(), value.outer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Skip operators whose types are declared, not derived."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before

    # --- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [self.get(tensor) for tensor in inputs]
        result = func(*args, **kwargs)
        try:
            self._infer(name, args, kwargs, inputs, before, result)
        except ShardingError as error:
            described = ", ".join(
                f"{tuple(tensor.shape)} {value_type}"
                for tensor, value_type in zip(inputs, before, strict=True)
            )
            raise ShardingError(f"{name}({described}): {error}") from None
        return result

    def _infer(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        before: list[Type],
        result: Any,
    ) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name in EMPTY:
            for output in outputs:
                self.write(output, UNDEFINED)
            return

        if name == "copy_":
            self.write(args[0], self._align([(self.get(args[1]), args[1])], args[0]))
            return

        if (
            name in FACTORIES
            or not outputs
            or all(value_type == REPLICATED for value_type in before)
        ):
            value = [REPLICATED] * len(outputs)
        elif all(value_type in (REPLICATED, UNDEFINED) for value_type in before):
            is_write = name.endswith("_") or "out" in kwargs
            is_view = len(inputs) == 1 and name not in SUMS
            undefined = is_view and not is_write
            value = [UNDEFINED if undefined else REPLICATED] * len(outputs)
        else:
            value = self._apply(name, args, kwargs, inputs, before, outputs)

        is_written = name.endswith("_") or "out" in kwargs
        for output, value_type in zip(outputs, value, strict=True):
            if is_written:
                self.write(output, value_type)
            else:
                self.set(output, value_type)

    def _apply(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        before: list[Type],
        outputs: list[Tensor],
    ) -> list[Type]:
        """Return the types of the outputs, where an input is not replicated."""
        value_types = dict(zip(map(id, inputs), before, strict=True))

        def of(tensor: Tensor) -> Type:
            return value_types[id(tensor)]

        if name in VIEWS:
            shape = tuple(args[0].shape)
            return [self._reshape(of(args[0]), shape, tuple(outputs[0].shape))]
        if name in ("t", "transpose", "permute"):
            return [self._permute(name, of(args[0]), args)]
        if name in ("unsqueeze", "squeeze", "expand"):
            return [self._broadcast(name, of(args[0]), args, outputs[0])]
        if name in ("slice", "select", "split", "split_with_sizes", "unbind", "slice_backward",
                    "select_backward", "constant_pad_nd", "flip"):  # fmt: skip
            return self._take(name, of(args[0]), args, outputs)
        if name in ("cat", "stack"):
            return [self._concatenate(name, args, before)]
        if name in ("mm", "addmm", "addmm_", "bmm", "mv", "baddbmm"):
            return [self._multiply(name, args, of)]
        if name in (*SUMS, "amax", "linalg_vector_norm", "logsumexp", "_softmax", "topk", "sort",
                    "cumsum", "argmax", "max", "any", "all", "_log_softmax"):  # fmt: skip
            return [self._reduce(name, of(args[0]), args, kwargs)] * len(outputs)
        if name in ("native_layer_norm", "native_layer_norm_backward"):
            return self._normalize(name, args, of, outputs)
        if name in (ATTENTION, ATTENTION_BACKWARD):
            return self._attend(before, outputs)
        if name in ("embedding", "embedding_dense_backward", "index_select", "index", "index_put_",
                    "gather", "scatter_", "scatter_add", "scatter_add_", "scatter",
                    "_embedding_bag", "_embedding_bag_forward_only"):  # fmt: skip
            return [self._index(name, args, kwargs, of, inputs, outputs)] * len(outputs)

        pairs = [(value_type, tensor) for value_type, tensor in zip(before, inputs, strict=True)]
        if "out" in kwargs:  # it is overwritten
            pairs = [
                (value_type, tensor) for value_type, tensor in pairs if tensor is not kwargs["out"]
            ]
        if name in SAME_SHAPE_LINEAR:
            return [self._add(pairs, outputs[0])]
        if name in PRODUCTS:
            return [self._scale(name, pairs, outputs[0])]
        if name in ELEMENTWISE:
            return [self._map(name, args, pairs, outputs[0])]
        if {value_type.name for value_type in before} <= {"varying", "replicated", "undefined"}:
            return [VARYING] * len(outputs)
        raise ShardingError("no rule for this operator")

    # --- rules --------------------------------------------------------------------------------

    def _align(self, pairs: Sequence[tuple[Type, Tensor]], output: Tensor) -> Type:
        """Return the type of a function of broadcast elements."""
        value_types = {value_type for value_type, _ in pairs} - {UNDEFINED}
        if not value_types or value_types == {REPLICATED}:
            return REPLICATED if value_types else UNDEFINED
        special = [
            value_type
            for value_type in value_types
            if value_type.name not in ("replicated", "sharded")
        ]
        if len(special) > 1 or (
            special and any(value_type.name == "sharded" for value_type in value_types)
        ):
            return VARYING
        if special:
            return special[0]
        sharded_dims = set()
        for value_type, tensor in pairs:
            if value_type.name == "sharded":
                sharded_dims.add((value_type.dim + output.dim() - tensor.dim(), value_type.outer))
        dims = {dim for dim, _ in sharded_dims}
        if len(dims) > 1:
            raise ShardingError("operands are sharded along different dimensions")
        return sharded(dims.pop(), max(outer for _, outer in sharded_dims))

    def _add(self, pairs: Sequence[tuple[Type, Tensor]], output: Tensor) -> Type:
        value_types = {value_type for value_type, _ in pairs} - {UNDEFINED}
        if OFFSET in value_types or (MASK in value_types and len(value_types) > 1):
            return VARYING if len(pairs) > 1 else value_types.pop()
        for complete in (PARTIAL, MAXIMUM):
            if complete in value_types and len(value_types) > 1 and VARYING not in value_types:
                raise ShardingError("a sum of a partial and a complete value")
        return self._align(pairs, output)

    def _scale(self, name: str, pairs: Sequence[tuple[Type, Tensor]], output: Tensor) -> Type:
        value_types = [value_type for value_type, _ in pairs]
        if MASK in value_types and set(value_types) == {MASK, REPLICATED}:
            return PARTIAL  # one rank has the value, the others have zero

        if PARTIAL in value_types:
            if value_types.count(PARTIAL) > 1 or any(
                value_type.name == "sharded" for value_type in value_types
            ):
                raise ShardingError("a product of a partial with a partial or sharded value")
            is_divided = (
                name in ("div", "div_") and len(value_types) > 1 and value_types[0] != PARTIAL
            )
            if is_divided or MAXIMUM in value_types:
                raise ShardingError("a division by a partial value")
            return VARYING if VARYING in value_types else PARTIAL

        if MAXIMUM in value_types:
            raise ShardingError("a product with a partial maximum")
        return self._align(pairs, output)

    def _map(
        self, name: str, args: tuple[Any, ...], pairs: Sequence[tuple[Type, Tensor]], output: Tensor
    ) -> Type:
        value_types = [value_type for value_type, _ in pairs]
        if name in ("fill_", "full_like"):
            return value_types[0] if value_types[0].name == "sharded" else REPLICATED
        if name == "ones_like":
            return value_types[0] if value_types[0].name == "sharded" else REPLICATED

        if name in ("masked_fill", "masked_fill_"):
            value = args[2]
            is_zero = not isinstance(value, Tensor) and value == 0
            if value_types[1] == MASK and is_zero and value_types[0] in (REPLICATED, LOOKED_UP):
                return PARTIAL
            if value_types[0] == PARTIAL and value_types[1] == REPLICATED and is_zero:
                return PARTIAL

        if OFFSET in value_types:
            is_comparison = name in ("lt", "le", "gt", "ge", "eq", "ne")
            return MASK if is_comparison and len(value_types) == 1 else VARYING
        if set(value_types) == {MASK} and name in ("bitwise_or", "bitwise_and", "bitwise_and_",
                                             "bitwise_not", "logical_and_"):  # fmt: skip
            return MASK
        if MASK in value_types:
            return VARYING
        if name == "addcmul_":
            product = self._scale(name, pairs[1:], output)
            return self._add([pairs[0], (product, output)], output)
        if PARTIAL in value_types or MAXIMUM in value_types:
            raise ShardingError("a function that is not linear, of a partial value")
        return self._align(pairs, output)

    def _reshape(self, value_type: Type, old: tuple[int, ...], new: tuple[int, ...]) -> Type:
        if value_type.name != "sharded":
            return value_type

        for dims, targets in _match_dims(old, new):
            if value_type.dim not in dims:
                continue
            if len(targets) == 1:
                return sharded(
                    targets[0],
                    value_type.outer * math.prod(old[dim] for dim in dims if dim < value_type.dim),
                )
            outer = value_type.outer * math.prod(old[dim] for dim in dims if dim < value_type.dim)
            for dim in targets:
                if outer == 1 or new[dim] > outer or outer % new[dim]:
                    return sharded(dim, outer)
                outer //= new[dim]
        return VARYING

    def _permute(self, name: str, value_type: Type, args: tuple[Any, ...]) -> Type:
        if value_type.name != "sharded":
            return value_type
        num_dims = args[0].dim()
        order = list(range(num_dims))
        if name == "permute":
            order = [dim % num_dims for dim in args[1]]
        elif name == "transpose" or num_dims == 2:
            first, second = (0, 1) if name == "t" else (args[1] % num_dims, args[2] % num_dims)
            order[first], order[second] = order[second], order[first]
        return sharded(order.index(value_type.dim), value_type.outer)

    def _broadcast(
        self, name: str, value_type: Type, args: tuple[Any, ...], output: Tensor
    ) -> Type:
        if value_type.name != "sharded":
            return value_type
        num_dims = args[0].dim()
        if name == "expand":
            return sharded(value_type.dim + output.dim() - num_dims, value_type.outer)
        if name == "unsqueeze":
            dim = args[1] % (num_dims + 1)
            return sharded(value_type.dim + (dim <= value_type.dim), value_type.outer)
        removed = [dim for dim in range(num_dims) if args[0].shape[dim] == 1]
        if len(args) > 1:
            removed = [args[1] % num_dims]
        return sharded(
            value_type.dim - sum(dim < value_type.dim for dim in removed), value_type.outer
        )

    def _take(
        self, name: str, value_type: Type, args: tuple[Any, ...], outputs: list[Tensor]
    ) -> list[Type]:
        if value_type.name != "sharded":
            return [value_type] * len(outputs)
        num_dims = args[0].dim()
        if name in ("select", "unbind"):
            dim = (args[1] if len(args) > 1 else 0) % num_dims
            if dim == value_type.dim:
                return [VARYING] * len(outputs)
            return [sharded(value_type.dim - (dim < value_type.dim), value_type.outer)] * len(
                outputs
            )

        if name == "slice_backward" and args[2] % len(args[1]) == value_type.dim:
            return [PARTIAL]  # zero except for the rows of this rank
        if name == "select_backward":
            dim = args[2] % len(args[1])
            return [sharded(value_type.dim + (dim <= value_type.dim), value_type.outer)]
        return [value_type] * len(outputs)

    def _concatenate(self, name: str, args: tuple[Any, ...], before: list[Type]) -> Type:
        value_types = set(before) - {UNDEFINED}
        dim = (args[1] if len(args) > 1 else 0) % (args[0][0].dim() + (name == "stack"))
        sharded_types = {value_type for value_type in value_types if value_type.name == "sharded"}
        sharded_dims = {value_type.dim for value_type in sharded_types}
        are_shards_kept = len(sharded_dims) == 1 and (sharded_dims != {dim} or name == "stack")
        if are_shards_kept and value_types - sharded_types == {REPLICATED}:
            # The same value next to each shard, but not instead of one
            value_types = sharded_types

        names = {value_type.name for value_type in value_types}
        dims = {value_type.dim for value_type in value_types}
        if len(names) > 1 or len(dims) > 1:
            return VARYING
        value_type = next(iter(value_types))
        if value_type.name != "sharded":
            return value_type
        if name == "cat":
            # Next to zeros: the place of this rank's elements among those of all ranks
            return PARTIAL if value_type.dim == dim and UNDEFINED in before else value_type
        return sharded(value_type.dim + (dim <= value_type.dim), value_type.outer)

    def _multiply(self, name: str, args: tuple[Any, ...], of: Callable[[Tensor], Type]) -> Type:
        """Return the type of a product of matrices: contracted shards give a partial sum."""
        has_summand = name in ("addmm", "addmm_", "baddbmm")
        left, right = args[1:3] if has_summand else args[:2]
        rows, inner = left.dim() - 2, left.dim() - 1
        right_inner = right.dim() - 2 if name != "mv" else 0
        a, b = of(left), of(right)
        value_type = REPLICATED
        if {a, b} & {MASK, OFFSET, MAXIMUM}:
            raise ShardingError("a product of a mask or a maximum")

        if VARYING in (a, b):
            value_type = VARYING
        elif PARTIAL in (a, b):
            if a != REPLICATED and b != REPLICATED:
                raise ShardingError("a product of a partial with a partial or sharded value")
            value_type = PARTIAL
        else:
            a_inner = a.name == "sharded" and a.dim == inner
            b_inner = b.name == "sharded" and b.dim == right_inner
            if a_inner != b_inner:
                raise ShardingError("a sum over a dimension of which only one operand is a shard")
            if a_inner:
                value_type = PARTIAL
            elif a.name == "sharded" and b.name == "sharded":
                if not (name in ("bmm", "baddbmm") and a.dim == b.dim == 0):
                    raise ShardingError("rows and columns are sharded over the same axis")
                value_type = a
            elif a.name == "sharded":
                value_type = a
            elif b.name == "sharded":
                dim = rows if name == "mv" else b.dim + left.dim() - right.dim()
                value_type = sharded(dim, b.outer)

        if not has_summand or of(args[0]) == UNDEFINED:
            return value_type
        if of(args[0]).name == "sharded" and value_type == VARYING:
            return of(args[0])  # each rank adds to its own
        output = args[0] if name == "addmm_" else left.new_empty(left.shape[0], right.shape[-1])
        return self._add([(of(args[0]), args[0]), (value_type, output)], output)

    def _reduce(
        self, name: str, value_type: Type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Type:
        if value_type.name == "varying" or value_type in (MASK, OFFSET):
            return VARYING
        if value_type.name != "sharded":
            if value_type == PARTIAL and name in SUMS:
                return PARTIAL
            raise ShardingError("a function that is not linear, of a partial value")

        num_dims = args[0].dim()
        position = 2 if name in ("linalg_vector_norm", "topk") else 1
        dims = kwargs.get("dim", args[position] if len(args) > position else None)
        if name in ("topk", "sort"):
            dims = kwargs.get("dim", dims if dims is not None else -1)
        if dims is None or dims == []:
            dims = list(range(num_dims))
        dims = [dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)]
        if value_type.dim in dims:
            if name in SUMS:
                return PARTIAL
            if name == "amax":
                return MAXIMUM
            if name in ("sort", "topk", "argmax"):
                return VARYING  # positions among the elements of this rank
            raise ShardingError("a reduction of a sharded dimension that is not a sum or maximum")

        keeps = name in ("_softmax", "_log_softmax", "topk", "sort", "cumsum")
        keep = kwargs.get("keepdim", len(args) > position + 1 and args[position + 1] is True)
        if keeps or keep:
            return value_type
        return sharded(value_type.dim - sum(dim < value_type.dim for dim in dims), value_type.outer)

    def _normalize(
        self, name: str, args: tuple[Any, ...], of: Callable[[Tensor], Type], outputs: list[Tensor]
    ) -> list[Type]:
        is_backward = name.endswith("backward")
        tensors = args[:2] if is_backward else args[:1]
        shape = args[2] if is_backward else args[1]
        pairs = [(of(tensor), tensor) for tensor in tensors]
        value_types = [value_type for value_type, _ in pairs]
        if PARTIAL in value_types and (not is_backward or value_types[1] == PARTIAL):
            raise ShardingError("a function that is not linear, of a partial value")
        value_type = self._align(pairs, tensors[0])
        if value_type.name == "sharded" and value_type.dim >= tensors[0].dim() - len(shape):
            raise ShardingError("a norm over a sharded dimension")
        if not is_backward:
            return [value_type] * len(outputs)
        # The gradients of weight and bias are sums over all other dimensions.
        gradient = PARTIAL if value_type.name == "sharded" else value_type
        return [value_type if output.dim() > 1 else gradient for output in outputs]

    def _attend(self, before: list[Type], outputs: list[Tensor]) -> list[Type]:
        value_types = set(before)
        if PARTIAL in value_types:
            raise ShardingError("attention of a partial value")
        if VARYING in value_types:
            return [VARYING] * len(outputs)
        sharded_types = {value_type for value_type in value_types if value_type.name == "sharded"}
        dims = {value_type.dim for value_type in sharded_types}
        if len(dims) != 1 or dims.pop() > 1:
            raise ShardingError("attention over sharded positions, or of different heads")
        value_type = next(iter(sharded_types))
        return [value_type if output.dim() > value_type.dim else REPLICATED for output in outputs]

    def _index(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of: Callable[[Tensor], Type],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> Type:
        if name == "embedding":
            base, indices = args[0], args[1]
            if of(base).name == "sharded" and of(indices) == VARYING:
                return LOOKED_UP
            return self._look_up(of(base), 0, of(indices), indices.dim(), 0)

        if name == "embedding_dense_backward":
            gradient, indices = of(args[0]), of(args[1])
            if indices == VARYING and gradient != VARYING:
                return sharded(0)  # rows of this rank
            if VARYING in (gradient, indices):
                return VARYING
            return PARTIAL if indices.name == "sharded" else gradient

        if name == "index_select":
            value_type = of(args[0])
            dim = args[1] % args[0].dim()
            return self._look_up(value_type, dim, of(args[2]), 1, dim)

        if name == "gather":
            base, indices = of(args[0]), of(args[2])
            dim = args[1] % args[0].dim()
            if base.name == "sharded" and base.dim == dim and indices == VARYING:
                return LOOKED_UP
            if VARYING in (base, indices):
                return VARYING
            if base.name == "sharded" and base.dim == dim:
                raise ShardingError("indices of the whole dimension select from a shard")
            return self._align([(base, args[0]), (indices, args[2])], args[2])

        if name in ("scatter_", "scatter_add", "scatter_add_", "scatter"):
            return self._scatter(name, args, of)

        if name in ("_embedding_bag", "_embedding_bag_forward_only"):
            rows, positions = of(args[0]), of(args[1])
            if rows == PARTIAL and positions == REPLICATED:
                return PARTIAL
            return VARYING if VARYING in (rows, positions) else positions

        indices = [index for index in args[1] if index is not None]
        value_types = [of(index) for index in indices]
        if name == "index_put_":
            base = of(args[0])
            adds = len(args) > 3 and args[3]
            if adds and of(args[2]) == VARYING:
                return VARYING
            if base != UNDEFINED:
                return base
            if VARYING in value_types:
                return sharded(0)
            return (
                PARTIAL
                if any(value_type.name == "sharded" for value_type in value_types)
                else of(args[2])
            )

        if VARYING in value_types or of(args[0]) == VARYING:
            return VARYING
        first = [position for position, index in enumerate(args[1]) if index is not None]
        if len(first) == 1:
            base = of(args[0])
            return self._look_up(base, first[0], value_types[0], indices[0].dim(), first[0])
        return self._align(
            [(value_type, index) for value_type, index in zip(value_types, indices, strict=True)],
            outputs[0],
        )

    def _look_up(self, base: Type, dim: int, indices: Type, num_dims: int, start: int) -> Type:
        """Return the type of rows `indices` along `dim` of `base`."""
        if MAXIMUM in (base, indices) or indices == PARTIAL:
            raise ShardingError("indices or rows are partial")
        if base == PARTIAL:
            return PARTIAL if indices == REPLICATED else VARYING
        if VARYING in (base, indices) or MASK in (base, indices):
            return VARYING
        if base.name == "sharded" and base.dim == dim:
            raise ShardingError("indices of the whole dimension select from a shard")
        if indices.name == "sharded":
            if base.name == "sharded":
                raise ShardingError("rows and columns are sharded over the same axis")
            return sharded(indices.dim + start, indices.outer)

        if base.name == "sharded" and base.dim > dim:
            return sharded(base.dim + num_dims - 1, base.outer)
        return base

    def _scatter(self, name: str, args: tuple[Any, ...], of: Callable[[Tensor], Type]) -> Type:
        base, indices = of(args[0]), of(args[2])
        source = of(args[3]) if isinstance(args[3], Tensor) else REPLICATED
        dim = args[1] % args[0].dim()
        if VARYING in (base, indices, source) or MASK in (base, indices, source):
            return VARYING
        if indices.name == "sharded" and indices.dim == dim:
            return PARTIAL  # each rank adds its part
        value_types = [(indices, args[2])]
        if isinstance(args[3], Tensor):
            value_types.append((source, args[3]))
        if base != UNDEFINED:
            value_types.append((base, args[0]))
        return self._align(value_types, args[0])

    # --- collectives --------------------------------------------------------------------------

    def all_reduce(self, tensors: list[Tensor], options: Any) -> None:
        (tensor,) = tensors
        is_maximum = options.reduceOp == dist.ReduceOp.MAX
        for view in self._list_views(tensor):
            value_type = self._types[view]
            if value_type == UNDEFINED:
                continue
            completes = MAXIMUM if is_maximum else PARTIAL
            if value_type != completes and not self._is_sum_of_varying(value_type):
                raise ShardingError(f"an all-reduce of a {value_type} value of shape {view[2]}")
            self._types[view] = REPLICATED

    def all_gather(self, whole: Tensor, shard: Tensor) -> None:
        value_type = self.get(shard)
        if value_type in (REPLICATED, PARTIAL, MAXIMUM):
            raise ShardingError(
                f"an all-gather of a {value_type} value of shape {tuple(shard.shape)}"
            )
        self.write(whole, REPLICATED)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> None:
        value_type = self.get(whole)
        if value_type != PARTIAL and not self._is_sum_of_varying(value_type):
            shape = tuple(whole.shape)
            raise ShardingError(f"a reduce-scatter of a {value_type} value of shape {shape}")
        self.write(shard, sharded(0))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        value_type = self.get(sent)
        if value_type == REPLICATED:
            raise ShardingError(
                f"an all-to-all of a {value_type} value of shape {tuple(sent.shape)}"
            )
        self.write(received, VARYING)

    def _is_sum_of_varying(self, value_type: Type) -> bool:
        return self.varying_sums and value_type == VARYING

    def _list_views(self, tensor: Tensor) -> list[tuple[Any, ...]]:
        """Return the views that a collective completes: gradients in a buffer, or the tensor.

        A gradient that continues after the tensor is completed by another collective.
        """
        key = _key(tensor)
        start, stop = key[1], key[1] + tensor.numel()
        views = self._gradients & self._views.get(key[0], set())
        overlapping = [
            view for view in views if view[1] < stop and start < view[1] + math.prod(view[2])
        ]
        if overlapping:
            return [view for view in overlapping if view[1] + math.prod(view[2]) <= stop]
        if key not in self._types:
            self.set(tensor, self.get(tensor))
        return [key]


def _key(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _match_dims(
    old: tuple[int, ...], new: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the dimensions of two shapes that contain the same elements, from the left."""
    i = j = 0
    while i < len(old) or j < len(new):
        dims, targets = [], []
        size = target_size = 1
        while True:
            if i < len(old) and (size <= target_size or j >= len(new)):
                size *= old[i]
                dims.append(i)
                i += 1
            elif j < len(new):
                target_size *= new[j]
                targets.append(j)
                j += 1
            else:
                break
            if size == target_size and dims and targets:
                break

        yield dims, targets


class _RankMode(TorchFunctionMode):
    """Marks results of operations with a number that depends on the rank."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker = checker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_tracked = isinstance(result, Tensor) and not self.checker.is_paused
        if is_tracked and _contains_rank((args, kwargs)):
            self._mark(func, args, result)
        return result

    def _mark(self, func: Any, args: tuple[Any, ...], result: Tensor) -> None:
        before = self.checker.get(result)
        if before != REPLICATED:
            return
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "narrow"):  # this rank's part
            whole = args[0].shape
            sizes = result.shape
            dims = [dim for dim in range(len(sizes)) if sizes[dim] != whole[dim]]
            self.checker.write(result, sharded(dims[0]) if dims else VARYING)
        elif name in ("sub", "__sub__"):
            self.checker.write(result, OFFSET)
        else:
            self.checker.write(result, VARYING)


def _contains_rank(value: Any) -> bool:
    if isinstance(value, slice):
        return _contains_rank((value.start, value.stop))
    if isinstance(value, tuple | list):
        return any(map(_contains_rank, value))
    if isinstance(value, dict):
        return any(map(_contains_rank, value.values()))
    return isinstance(value, RankNumber)


class Done:
    """The handle of a collective."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def check_types(checker: Checker, find_mutation: Callable[[str], str] = lambda _: "") -> Iterator:
    """Check operators and collectives of a `fake` process group.

    `find_mutation(method)` returns "skipped" or "twice" for a collective that is mutated.
    """

    def replace_method(name: str, perform: Callable[..., None], skip: Callable[..., None]) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Done:
            if checker.is_paused:
                skip(group, *args)
                return Done()
            checker.collectives.append(name)
            mutation = find_mutation(name)
            if mutation == "skipped":
                skip(group, *args)
                return Done()
            perform(group, *args)
            if mutation == "twice":
                perform(group, *args)
            return Done()

        return mock.patch.object(dist.ProcessGroup, name, call)

    compute_rows = layers.find_local_rows
    compute_positions = placement.compute_local_positions
    compute_documents = masks.find_documents
    compute_choices = router._count_choices
    balance = router.run_sinkhorn

    def find_rows(tokens: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
        # Called in backward passes, too, where the mode for numbers of the rank is inactive.
        rows, is_elsewhere = compute_rows(tokens, first_row, num_rows)
        if isinstance(first_row, RankNumber):
            checker.set(rows, VARYING)
            checker.set(is_elsewhere, MASK)
        return rows, is_elsewhere

    def find_positions(length: int, rank: int, size: int) -> Tensor:
        positions = compute_positions(length, rank, size)
        if isinstance(rank, RankNumber):
            checker.set(positions, sharded(0))
        return positions

    def find_documents(*args: Any) -> Any:
        with checker.paused():  # ranges of positions, which depend on the data
            return compute_documents(*args)

    def count_choices(*args: Any) -> Tensor:
        counts = compute_choices(*args)
        if checker.independent:
            checker.set(counts, REPLICATED)
        return counts

    def run_sinkhorn(logits: Tensor) -> Tensor:
        with checker.paused():  # over all tokens of a micro-batch
            balanced = balance(logits)
        checker.set(balanced, checker.get(logits))
        return balanced

    with ExitStack() as stack:
        for name, (perform, skip) in _make_methods(checker).items():
            stack.enter_context(replace_method(name, perform, skip))
        stack.enter_context(declare_exchanges(checker))

        for function, replacement in (
            (compute_rows, find_rows),
            (compute_positions, find_positions),
            (compute_documents, find_documents),
            (compute_choices, count_choices),
            (balance, run_sinkhorn),
        ):
            for module in list(sys.modules.values()):
                if getattr(module, function.__name__, None) is function:
                    patch = mock.patch.object(module, function.__name__, replacement)
                    stack.enter_context(patch)

        stack.enter_context(_RankMode(checker))
        stack.enter_context(checker)
        yield


class _Declare(torch.autograd.Function):
    """Identity that gives a varying value, or a varying gradient, the declared type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, checker: Checker, value: Type) -> Tensor:
        ctx.checker = checker
        ctx.value = value
        return _declare(checker, x.view_as(x), value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _declare(ctx.checker, grad.view_as(grad), ctx.value), None, None


def _declare(checker: Checker, tensor: Tensor, value: Type) -> Tensor:
    value_type = checker.get(tensor)
    if value_type == VARYING or (value_type.name, value_type.dim) == (value.name, value.dim):
        checker.set(tensor, value)
    return tensor


@contextmanager
def declare_exchanges(checker: Checker) -> Iterator[None]:
    """Declare the types of operations that depend on data or on ranks, instead of deriving them:

    the exchange of positions for heads, attention between ranks, and tokens on their way to
    experts.
    """

    def make_exchange(compute: Callable[..., Tensor], source: int, target: int) -> Any:
        def send(tensor: Tensor, axis: Axis) -> Tensor:
            value_type = checker.get(tensor)
            if value_type != VARYING and (value_type.name, value_type.dim) != ("sharded", source):
                raise ShardingError(f"an exchange of dimension {source} of a {value_type} value")
            return _declare(checker, compute(tensor, axis), sharded(target))

        return send

    def attend(forward: Callable[..., Tensor]) -> Any:
        def compute(ctx: Any, query: Tensor, key_value: Tensor, *other_args: Any) -> Tensor:
            for tensor, dim in ((query, 2), (key_value, 3)):
                _check_sharded(checker, tensor, dim)
            with checker.paused():
                out = forward(ctx, query, key_value, *other_args)
            checker.set(out, sharded(2))
            return out

        return staticmethod(compute)

    def attend_backward(backward: Callable[..., Any]) -> Any:
        def compute(ctx: Any, dout: Tensor) -> Any:
            _check_sharded(checker, dout, 2)
            # Recomputes the inputs, if they are not kept, with their types.
            unpacked = _Unpacked(ctx, ctx.saved_tensors)
            with checker.paused():
                gradients = backward(unpacked, dout)
            dquery, dkey_value, dsink = gradients[:3]
            checker.set(dquery, sharded(2))
            checker.set(dkey_value, sharded(3))
            if dsink is not None:
                checker.set(dsink, PARTIAL)
            return gradients

        return staticmethod(compute)

    def make_dispatcher(dispatch: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(tokens: Tensor, routing: Any, *other_args: Any) -> Tensor:
            value_type = checker.get(tokens)
            if value_type.name == "sharded":
                tokens = _Declare.apply(tokens, checker, value_type)
                probs = _Declare.apply(routing.probs, checker, value_type)
                routing = replace(routing, probs=probs)

            output = dispatch(tokens, routing, *other_args)
            if value_type.name == "sharded":
                output = _Declare.apply(output, checker, value_type)
            return output

        return compute

    def run_layer(layer: MoELayer, hidden_states: Tensor) -> Tensor:
        with mock.patch.object(layer, "dispatch", make_dispatcher(layer.dispatch)):
            return forward_layer(layer, hidden_states)

    def send_to_itself(operations: Sequence[dist.P2POp]) -> list[Done]:
        # Received values are the same whenever a layer is recomputed.
        sent, received = operations
        received.tensor.copy_(sent.tensor)
        return [Done(), Done()]

    forward_layer = MoELayer.forward
    attention = blockwise._BlockwiseAttention
    with (
        mock.patch.object(mappings, "_send_heads", make_exchange(mappings._send_heads, 0, 2)),
        mock.patch.object(
            mappings,
            "_send_positions",
            make_exchange(mappings._send_positions, 2, 0),
        ),
        mock.patch.object(attention, "forward", attend(attention.forward)),
        mock.patch.object(attention, "backward", attend_backward(attention.backward)),
        mock.patch.object(MoELayer, "forward", run_layer),
        mock.patch.object(exchange, "start_messages", send_to_itself),
    ):
        yield


class _Unpacked:
    """The context of an autograd function whose tensors are unpacked."""

    def __init__(self, context: Any, saved_tensors: tuple[Tensor, ...]) -> None:
        self._context = context
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _check_sharded(checker: Checker, tensor: Tensor, dim: int) -> None:
    value_type = checker.get(tensor)
    if (value_type.name, value_type.dim) != ("sharded", dim):
        raise ShardingError(f"attention between ranks: {value_type}, sharded({dim}) expected")


def _make_methods(checker: Checker) -> dict[str, tuple[Callable[..., None], Callable[..., None]]]:
    """Return, for each method of a process group, the collective and what happens without it."""

    def keep(group: dist.ProcessGroup, *args: Any) -> None: ...

    def reduce(group: dist.ProcessGroup, tensors: list[Tensor], options: Any) -> None:
        checker.all_reduce(tensors, options)

    def reduce_coordinated(
        group: dist.ProcessGroup, tensors: list[Tensor], *other_args: Any
    ) -> None:
        checker.all_reduce(tensors, other_args[0])

    def repeat(group: dist.ProcessGroup, whole: Tensor, shard: Tensor) -> None:
        copies = shard.reshape(1, -1).expand(group.size(), -1)
        with torch.utils._python_dispatch._disable_current_modes():
            whole.view(group.size(), -1).copy_(copies)

    def gather(group: dist.ProcessGroup, whole: Tensor, shard: Tensor, *other_args: Any) -> None:
        repeat(group, whole, shard)
        checker.all_gather(whole, shard)

    def do_not_gather(
        group: dist.ProcessGroup, whole: Tensor, shard: Tensor, *other_args: Any
    ) -> None:
        repeat(group, whole, shard)
        checker.write(whole, VARYING)

    def take(group: dist.ProcessGroup, shard: Tensor, whole: Tensor) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            shard.view(-1).copy_(whole.view(group.size(), -1)[group.rank()])

    def scatter(group: dist.ProcessGroup, shard: Tensor, whole: Tensor, *other_args: Any) -> None:
        take(group, shard, whole)
        checker.reduce_scatter(shard, whole)

    def do_not_scatter(
        group: dist.ProcessGroup, shard: Tensor, whole: Tensor, *other_args: Any
    ) -> None:
        take(group, shard, whole)
        checker.write(shard, VARYING)

    def send_back(
        group: dist.ProcessGroup, received: Tensor, sent: Tensor, *other_args: Any
    ) -> None:
        count = min(received.numel(), sent.numel())
        with torch.utils._python_dispatch._disable_current_modes():
            received.zero_().view(-1)[:count].copy_(sent.reshape(-1)[:count])

    def exchange(
        group: dist.ProcessGroup, received: Tensor, sent: Tensor, *other_args: Any
    ) -> None:
        send_back(group, received, sent)
        checker.all_to_all(received, sent)

    def do_not_exchange(
        group: dist.ProcessGroup, received: Tensor, sent: Tensor, *other_args: Any
    ) -> None:
        send_back(group, received, sent)
        checker.write(received, checker.get(sent))

    methods = {
        "allreduce": (reduce, keep),
        "reduce": (reduce_coordinated, keep),
        "_allgather_base": (gather, do_not_gather),
        "_reduce_scatter_base": (scatter, do_not_scatter),
        "alltoall_base": (exchange, do_not_exchange),
        # The names since torch 2.13
        "all_gather_single": (gather, do_not_gather),
        "reduce_scatter_single": (scatter, do_not_scatter),
        "all_to_all_single": (exchange, do_not_exchange),
    }
    return {name: pair for name, pair in methods.items() if hasattr(dist.ProcessGroup, name)}


def type_parameters(checker: Checker, model: nn.Module, axis: Axis) -> None:
    """Give every parameter the type that its declared sharding has on an axis of several ranks."""
    for param in model.parameters():
        checker.set(param, get_declared_type(param, axis))


def get_declared_type(param: nn.Parameter, axis: Axis) -> Type:
    """Return the type that `make_parameter` declares."""
    sharding = param_info(param).sharding
    if sharding.is_expert and sharding.ep.ranks == axis.ranks:
        return sharded(0)
    if sharding.dim is not None and sharding.axis.ranks == axis.ranks:
        return sharded(sharding.dim)
    return REPLICATED
