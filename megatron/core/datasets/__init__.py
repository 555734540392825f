"""Token files, samples cut from them, and blends; see `build_datasets`."""

from megatron.core.datasets.builder import build_datasets
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.gpt_dataset import Dataset, GPTDataset, Sample
from megatron.core.datasets.indexed_dataset import IndexedDataset, token_dtype

__all__ = [
    "Dataset",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "Sample",
    "build_datasets",
    "token_dtype",
]
