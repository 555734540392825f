"""Blends of several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.datasets.gpt_dataset import Dataset, Sample, TokenFiles
from megatron.core.datasets.index_cache import (
    MAX_BLEND_MEMBERS,
    Arrays,
    build_blend_index,
    compute_digest,
    load_or_build,
)


class BlendedDataset:
    """A mix in which, at any length, each member has contributed its share to within one sample.

    With `weights` (which sum to 1) they are the shares. Without, the shares are proportional to the
    members' lengths and no sample repeats. `size` is the number of samples; None (only without
    weights) selects all of them.
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
            raise ValueError(
                f"a blend has at most {MAX_BLEND_MEMBERS} members, got {len(members)}: "
                "merge some of them"
            )
        self.members = members
        lengths = [len(member) for member in members]
        total = sum(lengths)
        limits: list[int] | None = None  # samples of each member, if none may repeat
        if weights is None:
            self.weights = [length / total for length in lengths]
            limits = lengths
        else:
            self.weights = list(weights)
        self.size = total
        if size is not None:
            self.size = size
        if weights is None and self.size > total:
            raise ValueError(
                f"{self.size} samples are requested of a blend without weights, which is read once "
                f"and holds {total} ({' + '.join(map(str, lengths))}): give weights to repeat "
                "members, or request fewer samples"
            )

        # Describe the index by all values that it depends on, and load or build it.
        description = {
            "class": "BlendedDataset",
            "weights": [float(weight).hex() for weight in self.weights],  # exact
            "limits": limits,
        }
        # A longer blend begins with the same samples, so the fingerprint does not cover the size.
        fingerprints = [member.fingerprint for member in members]
        self.fingerprint = compute_digest({**description, "members": fingerprints})
        arrays = load_or_build(
            cache,
            name,
            {**description, "size": self.size},
            lambda: self._build_index(limits),
            verify_cache,
        )
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self._check_members(lengths)

    def _build_index(self, limits: list[int] | None) -> Arrays:
        """Return the member of each sample of the blend, and the number of its sample."""
        weights = np.array(self.weights, dtype=np.float64)
        limit_array = None if limits is None else np.array(limits)
        dataset_index, dataset_sample_index = build_blend_index(weights, self.size, limit_array)
        return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

    def _check_members(self, lengths: list[int]) -> None:
        """Raise ValueError if the blend draws more samples of a member than it has."""
        # Rounding of weights can require slightly more samples than a member was built with.
        drawn = np.bincount(self.dataset_index, minlength=len(lengths))
        for member, (count, length) in enumerate(zip(drawn.tolist(), lengths, strict=True)):
            if count > length:
                raise ValueError(
                    f"member {member} of the blend has {length} samples, but its weight "
                    f"{self.weights[member]:.6g} requires {count} of {self.size}: "
                    "raise --mid-level-dataset-surplus"
                )

    def digest_tokens(self, num_blocks: int) -> str:
        # Of more members than blocks, those of every n-th one are read.
        count = len(self.members)
        blocks_per_member = max(1, num_blocks // count)
        digests = []
        for member in self.members[:: -(-count // num_blocks)]:
            if isinstance(member, TokenFiles):
                digests.append(member.digest_tokens(blocks_per_member))
        return compute_digest({"members": digests})

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        member = int(self.dataset_index[index])
        sample = int(self.dataset_sample_index[index])
        return self.members[member][sample]
