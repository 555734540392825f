import numpy as np
from numpy.typing import NDArray

def build_sample_index_int32(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
) -> NDArray[np.int32]: ...
def build_sample_index_int64(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
) -> NDArray[np.int64]: ...
def build_blend_index(
    weights: NDArray[np.float64], limits: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]: ...
