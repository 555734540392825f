"""Token files, samples cut from them, blends of them: `build_datasets(config, num_samples, eod,
vocab_size)`.
"""

from megatron.core.datasets.builder import BlendedDataset, MockGPTDataset, build_datasets
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.gpt_dataset import Dataset, FillInTheMiddle, GPTDataset, Sample
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    token_dtype,
)

__all__ = [
    "BlendedDataset",
    "Dataset",
    "FillInTheMiddle",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MockGPTDataset",
    "Sample",
    "build_datasets",
    "token_dtype",
]
