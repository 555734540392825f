"""The shards of an engine's rank, as boxes of the model's parameters, found by its own loader.

An engine whose weights are split over tensor or expert parallel ranks fuses, pads and replicates
them by rules of its own, which its loader knows. The loader gets a placeholder without memory for
each tensor of the Hugging Face model, and slices and copies it. The placeholders record which of
their elements are copied to which memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from megatron.conversion.huggingface.export_plan import (
    StoredModel,
    describe_model,
    locate_elements,
)
from megatron.core.dist_checkpointing import Box, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.mapping import Shape, to_absolute
from megatron.transfer.grids import Grid, StridedView, cut_into_grids, intersect

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_COPY = "aten.copy_.default"
_DUPLICATES = ("aten._to_copy.default", "aten.clone.default")
_UNSAFE_VIEW = "aten._unsafe_view.default"


def view_engine_shards(
    load_weights: LoadWeights, args: Mapping[str, Any], dtype: torch.dtype | None = None
) -> ShardedStateDict:
    """Return the memory that the loader of an engine's rank fills, as the target of a transfer.

    `load_weights` takes pairs of a Hugging Face name and a tensor, like that of the models of vLLM
    and SGLang. It is called once. Of its effects only copies are left out, which the transfer
    makes. `args` and `dtype` are those of `list_engine_tensors`. Raises ValueError if the loader
    computes with the weights, e.g., quantizes them.
    """
    model = describe_model(args, dtype)
    recorder = _Recorder()
    placeholders = {}
    for name, info in model.list_tensors().items():
        layout = torch.empty(info.shape, dtype=info.dtype, device="meta")
        placeholders[name] = _Placeholder(name, layout, torch.device("cpu"), recorder)
    load_weights(iter(placeholders.items()))
    if not recorder.copies:
        raise ValueError(f"the loader copied none of {len(placeholders)} tensors of the model")
    return _view_parameters(model, recorder.copies)


# ---- Recording ----


class _RecordedCopy(NamedTuple):
    """Elements of a stored tensor that the loader copies."""

    source: torch.Tensor  # on the meta device, a view with the strides of the stored tensor
    target: torch.Tensor


class _Recorder:
    """The copies of a loader by name of the stored tensor."""

    def __init__(self) -> None:
        self.copies: dict[str, list[_RecordedCopy]] = {}

    def record(self, source: _Placeholder, target: torch.Tensor) -> None:
        """Add a copy. Raises ValueError for a target without memory."""
        if target.is_meta or isinstance(target, _Placeholder):
            raise ValueError(
                f"{source.tensor_name}: the loader copies it to a tensor without memory: call "
                "view_engine_shards while the parameters of the engine are on their device"
            )
        elements = source.elements.expand(target.shape)
        copies = self.copies.setdefault(source.tensor_name, [])
        copies.append(_RecordedCopy(elements, target.detach()))


class _Placeholder(torch.Tensor):
    """View of a stored tensor, without memory."""

    tensor_name: str
    elements: torch.Tensor
    recorder: _Recorder

    # `__torch_dispatch__` returns the results.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls, name: str, layout: torch.Tensor, device: torch.device, recorder: _Recorder
    ) -> _Placeholder:
        """Make a placeholder that claims to be on a device."""
        placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=layout.dtype,
            device=device,
        )
        placeholder.tensor_name = name
        placeholder.elements = layout
        placeholder.recorder = recorder
        return placeholder

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record copies, and follow views. Raises ValueError for other operations."""
        operator = str(func)
        options = kwargs or {}
        if operator == _COPY and isinstance(args[1], cls):
            target, source = args[:2]
            source.recorder.record(source, target)
            return target

        placeholders = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, cls)]
        placeholder = placeholders[0]
        is_view = func.is_view or operator == _UNSAFE_VIEW
        if len(placeholders) > 1 or not (is_view or operator in _DUPLICATES):
            raise ValueError(
                f"{placeholder.tensor_name}: the loader computes {operator} with it, but transfers "
                "only slice and copy: load whole tensors (view_engine_tensors)"
            )
        device = placeholder.device
        if is_view:
            layouts = func(placeholder.elements, *args[1:], **options)
        else:
            dtype = options.get("dtype") or placeholder.dtype
            layouts = _cast_layout(placeholder.elements, dtype)
            device = options.get("device") or device

        def wrap(layout: torch.Tensor) -> _Placeholder:
            return cls(placeholder.tensor_name, layout, device, placeholder.recorder)

        return pytree.tree_map_only(torch.Tensor, wrap, layouts)


def _cast_layout(layout: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of the same elements, in another dtype."""
    num_elements = layout.untyped_storage().nbytes() // layout.dtype.itemsize
    storage = torch.empty(num_elements, dtype=dtype, device="meta")
    return storage.as_strided(layout.shape, layout.stride(), layout.storage_offset())


# ---- Boxes of parameters ----


class _GridCopy(NamedTuple):
    """Elements of a stored tensor, and the memory of the view that contains them."""

    grid: Grid
    target: torch.Tensor


def _view_parameters(
    model: StoredModel, copies_by_name: Mapping[str, list[_RecordedCopy]]
) -> ShardedStateDict:
    """Return the boxes of parameters that are copied. Raises ValueError for mixed dtypes."""
    shapes = {name: info.shape for name, info in model.list_tensors().items()}
    grids_by_name: dict[str, list[_GridCopy]] = {}
    for name, copies in copies_by_name.items():
        grids = grids_by_name.setdefault(name, [])
        for source, target in copies:
            view = StridedView(int(source.storage_offset()), tuple(source.shape), source.stride())
            for grid in cut_into_grids(view, shapes[name]):
                grids.append(_GridCopy(grid, target))

    boxes: dict[str, list[Box]] = {}
    for parameter in model.parameters:
        key_boxes = boxes.setdefault(parameter.key, [])
        # Each stored tensor is a file whose positions and strides count elements.
        starts = [(index, 0) for index in range(len(parameter.names))]
        for extent, (index, position), strides in locate_elements(parameter, starts, 1):
            name = parameter.names[index]
            copied = grids_by_name.get(name)
            if copied is None:
                continue
            offset, shape = extent
            view = StridedView(position, shape, strides)
            for grid in cut_into_grids(view, shapes[name]):
                key_boxes.extend(_find_boxes(offset, grid, copied))

    state: ShardedStateDict = {}
    for key, key_boxes in boxes.items():
        dtypes = {box.tensor.dtype for box in key_boxes}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(f"{key}: the engine has it in {names}; only one dtype is supported")
        if key_boxes:
            dtype = key_boxes[0].tensor.dtype
            state[key] = ShardedTensor(key, model.shapes[key], dtype, tuple(key_boxes))
    return state


def _find_boxes(offset: Shape, stored: Grid, copies: Sequence[_GridCopy]) -> Iterator[Box]:
    """Yield the boxes of a parameter that are copied.

    `stored` is a grid of the box at `offset` of the parameter, in the coordinates of the tensor
    that stores it.
    """
    for copied, target in copies:
        for common in intersect(stored, copied):
            in_box = stored.locate(common)
            in_target = copied.locate(common)

            # Memory of the first element, and of its neighbors along the axes of the box
            position = target.storage_offset()
            for index, stride in zip(in_target.start, target.stride(), strict=True):
                position += index * stride
            strides = [0] * len(in_box.shape)
            for box_axis, view_axis in zip(stored.axes, copied.axes, strict=True):
                if box_axis is not None and view_axis is not None:
                    strides[box_axis] = in_target.steps[view_axis] * target.stride(view_axis)
            memory = target.as_strided(in_box.shape, strides, position)
            yield Box(to_absolute(offset, in_box.start), memory)
