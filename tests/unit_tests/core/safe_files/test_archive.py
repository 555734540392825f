"""Archives built by hand against torch.save / torch.load."""

import io
import zipfile

import pytest
import torch

from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.torch_zip import (
    Archive,
    encode_object,
    make_tensor_envelope,
    pad_archive,
)

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.uint16]
SHAPES = [(), (1,), (3,), (2, 5), (4, 0), (2, 3, 4)]


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def archive_of(data: bytes) -> Archive:
    return Archive(lambda offset, size: data[offset : offset + size], len(data), "here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_loads_envelopes_with_data(dtype, shape):
    numel = torch.Size(shape).numel()
    content = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    expected = content.view(dtype).reshape(shape)
    envelope = make_tensor_envelope(dtype, shape)
    archive = envelope.prefix + raw_bytes(expected) + envelope.suffix
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(archive), weights_only=weights_only)
        assert loaded.dtype == dtype
        assert loaded.shape == shape
        assert loaded.stride() == expected.stride()
        assert raw_bytes(loaded) == raw_bytes(expected)

    assert archive_of(archive).find_data("data/0") == len(envelope.prefix)
    assert len(envelope.prefix) % 64 == 0


@pytest.mark.parametrize("numel", [1, 1000, 100_000])
def test_records_of_torch_save_are_found(numel):
    tensor = torch.arange(numel, dtype=torch.float32)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    archive = archive_of(buffer.getvalue())
    assert archive.read("data/0") == raw_bytes(tensor)

    with zipfile.ZipFile(buffer) as oracle:
        assert {name.partition("/")[2] for name in oracle.namelist()} == set(archive.records)
        assert archive.read("data.pkl") == oracle.read("archive/data.pkl")


@pytest.mark.parametrize("padding", [0, 1, 1023, 4000])
def test_padding_does_not_change_the_loaded_value(padding):
    archive = encode_object({"step": 3})
    padded = pad_archive(archive, len(archive) + padding)
    assert len(padded) == len(archive) + padding
    assert torch.load(io.BytesIO(padded)) == [{"step": 3}]
    assert set(archive_of(padded).records) == set(archive_of(archive).records)


def test_truncated_archives_give_clear_errors():
    whole = encode_object({"step": torch.arange(10)})
    for length in range(len(whole)):
        with pytest.raises(CheckpointError, match="here"):
            archive_of(whole[:length]).read("data/0")


def test_compressed_records_are_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"x" * 1000)
    with pytest.raises(CheckpointError, match="compressed"):
        archive_of(buffer.getvalue())
