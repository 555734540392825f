"""`.metadata`: plain DCP reads our files, our own reader reads them tensor by tensor, and
neither is fooled.
"""

import gc
import io
import json
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from torch.distributed.checkpoint import metadata as dcp

from megatron.core.dist_checkpointing import read_metadata
from megatron.core.dist_checkpointing.box_table import (
    BoxTable,
    CheckpointMetadata,
    Location,
    StoredTensor,
)
from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, compute_checksums
from megatron.core.dist_checkpointing.format.dcp_metadata import decode_dcp
from megatron.core.dist_checkpointing.format.metadata_codec import (
    MetadataEncoder,
    decode_metadata,
    open_metadata,
)
from megatron.core.dist_checkpointing.format.metadata_opcodes import (
    BYTES_METADATA,
    encode_properties,
    encode_storage_meta,
)
from megatron.core.safe_files.errors import CheckpointError
from tests.support.processes import list_open_files

FILES = ("__0_0.distcp", "__0_1.distcp", "__17_0.distcp")


def stored(shape, dtype, boxes, places, files=FILES):
    table = BoxTable.of(boxes, len(shape))
    file, position, length = np.array(places, dtype=np.int64).reshape(-1, 3).T
    table = replace(table, file=file, position=position, length=length, files=files)
    return StoredTensor(shape, dtype, table)


def encode(metadata):
    """Return the content of `.metadata`, in blocks."""
    return MetadataEncoder(metadata).encode(metadata.objects)


def written(metadata):
    """Return the content of `.metadata`."""
    return b"".join(encode(metadata))


def example(files=FILES):
    """Make scalars, empty tensors, many dimensions, integers of every width, and shared box
    lists.
    """
    large = (300_000, 1 << 20)
    rows = [((i * 1000, 0), (1000, 1 << 20)) for i in range(300)]
    result = CheckpointMetadata(
        {
            "w": stored(
                large,
                torch.bfloat16,
                rows,
                [(i % 3, i << 34, 1 << 31) for i in range(300)],
                files,
            ),
            "m": stored(
                large,
                torch.float32,
                rows,
                [(i % 2, i << 35, 1 << 32) for i in range(300)],
                files,
            ),
            "flat": stored((1 << 40,), torch.uint8, [((0,), (1 << 40,))], [(2, 0, 1 << 41)], files),
            "step": stored((), torch.int64, [((), ())], [(1, 64, 900)], files),
            "4d": stored(
                (2, 3, 4, 5),
                torch.float16,
                [((0, 0, 0, 0), (2, 3, 4, 5))],
                [(0, 5, 240)],
                files,
            ),
            "empty": stored((0, 7), torch.float32, [((0, 0), (0, 7))], [(0, 9, 640)], files),
            "ü": stored((1,), torch.float8_e4m3fn, [((0,), (1,))], [(0, 1, 2)], files),
        }
    )
    result.objects = {
        "rng/shard_0": Location("__0_2.distcp", 0, 3072),
        "ö": Location("__0_2.distcp", 1 << 33, 1),
    }
    return result


def plain(metadata):
    """Convert metadata to plain values for comparison."""
    tensors = {key: (t.shape, t.dtype, list(t.chunks)) for key, t in metadata.tensors.items()}
    return tensors, metadata.objects, metadata.file_sizes()


def test_our_reader_returns_written_metadata():
    assert plain(decode_metadata(written(example()), "here")) == plain(example())
    empty = CheckpointMetadata()
    assert plain(decode_metadata(written(empty), "here")) == plain(empty)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "float8_e4m3fn", "bool"])
def test_objects_of_dcp_equal_those_of_the_installed_version(dtype):
    """They are written by name, without importing DCP."""
    objects = {
        encode_properties(dtype): dcp.TensorProperties(dtype=getattr(torch, dtype)),
        BYTES_METADATA: dcp.BytesStorageMetadata(),
        encode_storage_meta(): dcp.StorageMeta(),
    }
    for opcodes, expected in objects.items():
        assert pickle.loads(b"\x80\2" + opcodes + b".") == expected


def test_large_metadata_is_encoded_in_blocks():
    """Joining many megabytes would hold the interpreter's lock and delay the training thread."""
    large = CheckpointMetadata(
        objects={f"rng_state/{rank}": Location("__0_0.distcp", rank, 1) for rank in range(9000)}
    )
    parts = encode(large)

    assert {len(block) for block in parts[:-1]} == {BLOCK_SIZE}
    assert len(parts[-1]) <= BLOCK_SIZE
    assert plain(decode_metadata(b"".join(parts), "here")) == plain(large)
    assert (
        compute_checksums(*parts)
        == compute_checksums(b"".join(parts))
        == compute_checksums(parts[0][:1000], *cut(parts))
    )


def cut(parts):
    whole = b"".join(parts)[1000:]
    return [whole[: 3 << 19], whole[3 << 19 :]]


def test_dcp_unpickles_the_same_metadata():
    """Compare the objects that plain `pickle` builds with the content of the index."""
    encoded = written(example())
    read = pickle.load(io.BytesIO(encoded))

    assert isinstance(read, dcp.Metadata)
    assert read.version == "1.0.0"
    assert read.storage_meta == dcp.StorageMeta()

    expected = example()
    assert (
        read.state_dict_metadata.keys()
        == expected.tensors.keys() | expected.objects.keys()
        == read.planner_data.keys()
    )

    for key, tensor in expected.tensors.items():
        entry = read.state_dict_metadata[key]
        assert entry.properties == dcp.TensorProperties(dtype=tensor.dtype)
        assert type(entry.size) is torch.Size
        assert entry.size == torch.Size(tensor.shape)
        assert [(c.offsets, c.sizes) for c in entry.chunks] == [
            (c.offset, c.shape) for c in tensor.chunks
        ]
        for chunk in tensor.chunks:
            info = read.storage_data[dcp.MetadataIndex(key, chunk.offset)]
            assert (info.relative_path, info.offset, info.length) == chunk.location

    for key, location in expected.objects.items():
        assert isinstance(read.state_dict_metadata[key], dcp.BytesStorageMetadata)
        info = read.storage_data[dcp.MetadataIndex(key)]
        assert (info.relative_path, info.offset, info.length) == location

    assert len(read.storage_data) == sum(len(t.chunks) for t in expected.tensors.values()) + len(
        expected.objects
    )
    # The reader for pickles of other programs sees the same in it, and in what DCP's classes pickle
    # to.
    assert (
        plain(decode_dcp(encoded, "here"))
        == plain(expected)
        == plain(decode_metadata(pickle.dumps(read), "here"))
    )


def test_encoder_patches_names_and_objects():
    """A later save of the same tensors gets the file that a new encoder would write."""
    encoder = MetadataEncoder(example())
    longer = tuple(name.replace(".", "-9f3a-10.") for name in FILES)
    larger = {"rng/shard_0": Location("__0_2.distcp", 0, 4096), "ö": Location("other", 4096, 7)}
    more = {**larger, "new": Location("__17_2.distcp", 0, 1)}
    for objects in (example().objects, larger, more, {}):
        for files in (FILES, longer, FILES):
            fresh = example(files)
            fresh.objects = objects
            encoded = b"".join(encoder.encode(objects, dict(zip(FILES, files, strict=True)).get))
            assert encoded == written(fresh)
            assert plain(decode_metadata(encoded, "here")) == plain(fresh)
            assert plain(decode_dcp(encoded, "here")) == plain(fresh)


def test_one_tensor_is_read_without_the_others():
    encoded = written(example())
    read = []

    def pread(position, length):
        read.append(length)
        return encoded[position : position + length]

    metadata = open_metadata(pread, len(encoded), "here")
    assert metadata.file_sizes() == example().file_sizes()
    assert sum(read) < len(encoded) / 4, "the index alone"

    read.clear()
    assert list(metadata.tensors["step"].chunks) == list(example().tensors["step"].chunks)
    assert 0 < sum(read) < 200


def test_tensors_with_equal_boxes_share_their_list():
    read = pickle.loads(written(example()))
    assert read.state_dict_metadata["w"].chunks is read.state_dict_metadata["m"].chunks
    assert len(written(example())) < 100 * 600, "bytes for each of 600 boxes"


def test_file_is_closed_with_its_last_tensor(tmp_path):
    (tmp_path / ".metadata").write_bytes(written(example()))
    gc.disable()  # it must not take a collection

    try:
        metadata = read_metadata(tmp_path)
        assert len(metadata.tensors["w"].chunks) == 300
        assert list_open_files(tmp_path) == [str(tmp_path / ".metadata")]
        del metadata
        assert list_open_files(tmp_path) == []
    finally:
        gc.enable()


@pytest.mark.parametrize("indexed", [True, False])
def test_file_outside_of_the_checkpoint_is_refused(indexed):
    encoded = written(example(files=("__0_0.distcp", "../secret", "__1_0.distcp")))
    with pytest.raises(CheckpointError, match="here.*secret"):
        decode_metadata(encoded if indexed else encoded[:-1], "here")


def with_index(encoded, change):
    """Return the same pickle with another index."""
    start, length, _, magic = struct.unpack("<QQQ8s", encoded[-32:])
    index = json.loads(encoded[start : start + length])
    change(index)
    content = json.dumps(index).encode()
    return (
        encoded[:start]
        + content
        + struct.pack("<QQQ8s", start, len(content), xxhash.xxh3_64_intdigest(content), magic)
    )


def swap_places(index):
    index["tensors"][0][4] = index["tensors"][1][4]
    index["tensors"][1][4] = index["tensors"][0][4]


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["tensors"][0].__setitem__(4, index["tensors"][0][4] + 1),
        lambda index: index["tensors"][0].__setitem__(4, 1 << 60),
        lambda index: index["tensors"][0].__setitem__(4, -5),
        lambda index: index["tensors"][0].__setitem__(3, 2),
        lambda index: index["tensors"][0].__setitem__(1, [1000, 1 << 20]),
        lambda index: index["tensors"][0].__setitem__(2, "nn"),
        lambda index: index["tensors"][0].__setitem__(5, [3, 4]),
        lambda index: index["boxes"][0].__setitem__(1, 1 << 50),
        lambda index: index["boxes"][0].__setitem__(1, 299),
        lambda index: index["boxes"][0].__setitem__(4, 0),
        lambda index: index["files"].pop(0),
        lambda index: index.pop("memo"),
        swap_places,
    ],
)
def test_index_that_differs_from_the_pickle_is_refused(change):
    with pytest.raises(CheckpointError, match="here"):
        metadata = decode_metadata(with_index(written(example()), change), "here")
        list(metadata.tensors["w"].chunks)


def test_changed_bytes_are_detected_or_have_no_effect():
    """Bytes outside of the entries and the index are only read by DCP."""
    small = CheckpointMetadata(
        {"w": stored((4, 2), torch.float32, [((0, 0), (4, 2))], [(2, 64, 900)])}
    )
    encoded = written(small)
    noticed = 0
    for position in range(len(encoded)):
        changed = bytearray(encoded)
        changed[position] ^= 1
        try:
            assert plain(decode_metadata(bytes(changed), "here"))[0]["w"][:2] == (
                (4, 2),
                torch.float32,
            )
        except CheckpointError:
            noticed += 1

    start = struct.unpack("<Q", encoded[-32:-24])[0]
    assert noticed >= len(encoded) - start - 8
