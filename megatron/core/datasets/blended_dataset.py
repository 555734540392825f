"""A mix of data sets: which member, and which of its samples, gives sample i."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.datasets.gpt_dataset import Dataset, Sample
from megatron.core.datasets.helpers import MAX_BLEND_MEMBERS, build_blend_index
from megatron.core.datasets.index_cache import Arrays, digest_of, load_or_build


class BlendedDataset:
    """At every length, each member has given its share of the samples to within one.

    With `weights` (summing to 1) the shares are theirs; without, members are mixed by their lengths and never repeat.
    `size` is the number of samples (None, without weights only: all of them).
    """

    def __init__(
        self,
        members: Sequence[Dataset],
        weights: Sequence[float] | None,
        size: int | None,
        cache: Path | None,
        name: str = "BlendedDataset",
        verify_cache: bool = True,
    ) -> None:
        assert members and (size is not None or weights is None)
        if len(members) > MAX_BLEND_MEMBERS:
            raise ValueError(f"a blend has at most {MAX_BLEND_MEMBERS} members, got {len(members)}: merge some of them")
        self.members = members
        limits = [len(member) for member in members]
        total = sum(limits)
        self.weights = [limit / total for limit in limits] if weights is None else list(weights)
        self.size = total if size is None else size
        if weights is None and self.size > total:
            raise ValueError(
                f"{self.size} samples are wanted of a blend without weights, which is read once and holds {total} "
                f"({' + '.join(map(str, limits))}): give weights to repeat members, or ask for fewer samples"
            )
        description = {
            "class": "BlendedDataset",
            "weights": [weight.hex() for weight in map(float, self.weights)],
            "limits": limits if weights is None else None,
            "size": self.size,
        }
        self.fingerprint = digest_of({**description, "members": [member.fingerprint for member in members]})
        own_limits = limits if weights is None else None
        arrays = load_or_build(cache, name, description, lambda: self._build(own_limits), verify_cache)
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self._check_members(limits)

    def _build(self, limits: list[int] | None) -> Arrays:
        dataset_index, dataset_sample_index = build_blend_index(
            np.array(self.weights, dtype=np.float64), self.size, None if limits is None else np.array(limits)
        )
        return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

    def _check_members(self, limits: list[int]) -> None:
        drawn = np.bincount(self.dataset_index, minlength=len(limits))
        for member, (count, limit) in enumerate(zip(drawn.tolist(), limits, strict=True)):
            if count > limit:
                raise ValueError(
                    f"member {member} of the blend has {limit} samples, but its weight {self.weights[member]:.6g} asks "
                    f"for {count} of {self.size}: raise --mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return self.members[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]
