"""The stream of --dataloader-type cyclic."""

from __future__ import annotations

import functools

import numpy as np


class CyclicStream:
    """Endless stream: position p is entry p mod N of a permutation for the seed and epoch p
    div N.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        # One permutation in memory: batches are read in order.
        self._permutation = functools.lru_cache(maxsize=1)(self._shuffle)

    def __call__(self, start: int, stop: int) -> list[int]:
        samples: list[int] = []
        # A range can span several epochs.
        while start < stop:
            epoch, first = divmod(start, self.num_samples)
            count = min(stop - start, self.num_samples - first)
            samples += self._permutation(epoch)[first : first + count].tolist()
            start += count
        return samples

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.RandomState([self.seed, epoch]).permutation(self.num_samples)
