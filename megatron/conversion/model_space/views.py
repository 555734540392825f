"""Views of a source that change it: other dtypes, fewer tensors, the average as the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.optimizer_states import average_key
from megatron.conversion.options import DTYPES
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.optimizer import AVERAGE_PREFIX
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, is_foreign, is_trained, is_weight
from megatron.core.run_checkpoint.source import Source, TrainingState


def get_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype that an option names, e.g. "bf16"."""
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


class SourceView:
    """Base of sources that change `source`: they replace tensors or arguments."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.description = source.description
        self.unused = source.unused
        self.args: dict[str, Any] = dict(source.args)
        self.training: TrainingState | None = source.training
        self.tensors: dict[str, LazyTensor] = dict(source.tensors)

    def choose_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor if weights get `dtype`; None keeps theirs.

        A router's bias is fp32 in every model. Foreign tensors are copied as they are, except for
        weights of layers with foreign mixers: those that have the dtype of the other weights are
        cast with them.
        """
        dtypes = {}
        old = None
        if self.args.get("foreign_mixers"):
            old = self.tensors[WORD_EMBEDDINGS].dtype
        for key, tensor in self.tensors.items():
            is_cast = is_weight(key) and is_trained(key)
            if is_foreign(key):
                is_cast = tensor.dtype == old
            dtypes[key] = dtype if is_cast and dtype is not None else tensor.dtype
        return dtypes

    def drop_average(self) -> None:
        """Leave out the average of the weights."""
        for key in list(self.tensors):
            if key.startswith(AVERAGE_PREFIX):
                del self.tensors[key]

    def set_weights(
        self, source: Source, dtype: torch.dtype | None, get_key: Callable[[str], str]
    ) -> None:
        """Keep weights alone, cast to `dtype` from the tensors of `source` with other keys."""
        self.drop_optimizer()
        self.drop_average()
        for key, new_dtype in self.choose_dtypes(dtype).items():
            self.tensors[key] = cast(source.tensors[get_key(key)], new_dtype)

    def drop_optimizer(self) -> None:
        """Leave out the optimizer state, and the parts of the training state that belong to it."""
        for key in list(self.tensors):
            if key.startswith("optimizer."):
                del self.tensors[key]
        if self.training is not None:
            self.training = dataclasses.replace(
                self.training, param_groups=None, scheduler=None, grad_scaler=None
            )


class AveragedWeights(SourceView):
    """A model with the average of its weights (--ema-decay) as the weights, without optimizer.

    The average is fp32 and is cast once to `dtype`, by default the dtype of the weights.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None = None) -> None:
        super().__init__(source)
        missing = []
        for key in source.tensors:
            is_averaged = is_weight(key) and is_trained(key)
            if is_averaged and average_key(key) not in source.tensors:
                missing.append(key)
        if missing:
            raise ValueError(
                f"--weights ema: {source.description} has no average of {missing[0]}: a run saves "
                "one with --ema-decay"
            )
        self.set_weights(source, dtype, lambda key: average_key(key) if is_trained(key) else key)
