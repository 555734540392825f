"""Recipes: names and fields."""

import enum
from dataclasses import dataclass


class Format(enum.Enum):
    E4M3 = (448.0, 448.0)
    HYBRID = (448.0, 57344.0)


class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID


@dataclass
class Float8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3


@dataclass
class MXFP8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3


@dataclass
class NVFP4BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
