"""Damage of any byte of any file is found, and explained."""

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from megatron.core.dist_checkpointing import (
    Box,
    CheckpointError,
    Lineage,
    Reader,
    Segment,
    ShardedObject,
    ShardedTensor,
    load,
    load_common,
    save,
)
from megatron.core.dist_checkpointing.checkpoint_directory import find_missing_or_truncated
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    compute_checksums,
    encode_checksum_records,
    read_checksums,
    seal_checksums,
)
from megatron.core.dist_checkpointing.format.verified_file import ChecksumVerifier
from megatron.core.dist_checkpointing.ownership.lineage import LINEAGE
from megatron.core.dist_checkpointing.verification import find_integrity_problems, verify


def make_state(fill):
    """Small tensors, one of several blocks, one stored in two chunks' files, an object."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"w": (900, 1000), "u": (300, 500), "b": (77,), "s": ()}
    state = {}
    for key, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        state[key] = ShardedTensor.replicated(key, values if fill else torch.zeros(shape))
    state["rng"] = ShardedObject("rng", {"seed": [1, 2, 3]} if fill else None)
    return state


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine") / "c"
    save(make_state(True), directory, common={"iteration": 7, "args": {"lr": 0.1}}, workers=2)
    return directory


@pytest.fixture
def checkpoint(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "c")


def flip(path, position, bit):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def load_and_compare(directory):
    """Return None if everything is loaded as it was saved; otherwise the error message."""
    state = make_state(False)
    expected = make_state(True)
    try:
        report = load(state, directory)
        common = load_common(directory)
    except CheckpointError as error:
        return str(error)

    assert common == {"iteration": 7, "args": {"lr": 0.1}}
    assert report.objects["rng"] == {"seed": [1, 2, 3]}
    for key in ("w", "u", "b", "s"):
        assert torch.equal(state[key].local, expected[key].local), key
    return None


def test_an_intact_checkpoint_verifies(checkpoint):
    read = []
    report = verify(checkpoint, progress=read.append)
    assert report.ok, report
    assert report.has_checksums, report
    assert not report.notes, report
    assert (report.tensors, report.objects) == (4, 1)

    files = [path for path in checkpoint.iterdir() if path.name != "checksums.bin"]
    assert report.files == len(files)
    assert report.bytes == sum(read) == sum(path.stat().st_size for path in files)
    assert load_and_compare(checkpoint) is None


def write_older_checksums(checkpoint, body):
    line = json.dumps(body).encode()
    (checkpoint / "checksums.json").write_bytes(
        line + b"\n" + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"
    )


def with_older_checksums(checkpoint):
    """Gives a checkpoint the list of checksums that earlier releases wrote; returns its content."""
    sums = read_checksums(checkpoint)
    files = {name: {"size": size, "blocks": blocks.hex()} for name, (size, blocks) in sums.items()}
    body = {"algorithm": "xxh3_64", "block_size": BLOCK_SIZE, "files": files}
    (checkpoint / "checksums.bin").unlink()
    write_older_checksums(checkpoint, body)
    return body


def test_checksums_of_older_checkpoints_are_checked(checkpoint):
    body = with_older_checksums(checkpoint)
    files = body["files"]
    report = verify(checkpoint)

    assert report.ok, report
    assert report.has_checksums, report
    assert not report.notes, report
    assert load_and_compare(checkpoint) is None

    # A damaged shard
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(shard, shard.stat().st_size // 2, 3)
    assert shard.name in load_and_compare(checkpoint)

    # Damaged checksums
    flip(shard, shard.stat().st_size // 2, 3)
    flip(checkpoint / "checksums.json", 40, 0)
    assert "damaged" in load_and_compare(checkpoint)

    # Checksums that are well-formed JSON with wrong content
    file = files[shard.name]
    for wrong, message in (
        ({"files": files}, "no 'algorithm'"),
        (body | {"algorithm": "md5"}, "must be one of xxh3_64"),
        (body | {"block_size": 512}, "must be one of 1048576"),
        (body | {"files": [1]}, "must be a dictionary"),
        (body | {"files": {"../a": file}}, "without a path"),
        (body | {"files": {"a": 3}}, "must be a dictionary"),
        (body | {"files": {"a": {"size": file["size"]}}}, "no 'blocks'"),
        (body | {"files": {"a": file | {"size": "9"}}}, "must be a whole number"),
        (body | {"files": {"a": file | {"size": -1}}}, "must be a whole number"),
        (body | {"files": {"a": file | {"blocks": 7}}}, "must be a text"),
        (body | {"files": {"a": file | {"blocks": "0g"}}}, "not hexadecimal digits"),
        (body | {"files": {"a": file | {"size": file["size"] + BLOCK_SIZE}}}, "bytes of hashes"),
        (body | {"files": {"a": file | {"blocks": file["blocks"] + "00" * 8}}}, "bytes of hashes"),
    ):
        write_older_checksums(checkpoint, wrong)
        with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
            read_checksums(checkpoint)
        assert "checksums.json" in str(caught.value), message


def test_checksums_name_files_of_their_directory_alone(checkpoint):
    records = encode_checksum_records({"../secret": compute_checksums(b"content")})
    (checkpoint / "checksums.bin").write_bytes(b"".join(seal_checksums(records)))
    problems = verify(checkpoint).problems
    assert any("without a path" in problem for problem in problems)


@pytest.mark.parametrize("positions", [80, pytest.param(260, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(checkpoint, positions):
    """Random positions over all files; a flip must be explained by `verify`, and by a verified load
    where it touches the file.
    """
    rng = random.Random(0)
    files = sorted(checkpoint.iterdir())
    flips = []
    for path in files:
        for _ in range(-(-positions // len(files))):
            flips.append((path, rng.randrange(path.stat().st_size)))

    num_noticed_by_load = 0
    for path, position in flips:
        bit = rng.randrange(8)
        case = (path.name, position, bit)
        flip(path, position, bit)
        report = verify(checkpoint, workers=1)
        assert not report.ok, case
        assert path.name in "\n".join(report.problems), case

        problem = load_and_compare(checkpoint)
        if problem is None:
            assert path.name == "metadata.json", "a load does not read this file only"
        else:
            num_noticed_by_load += 1
            assert path.name in problem, case
        flip(path, position, bit)

    assert len(flips) >= positions
    assert num_noticed_by_load > 0.75 * positions
    assert verify(checkpoint).ok


@pytest.mark.parametrize("positions", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_unverified_loads_of_damaged_files_explain_themselves(checkpoint, positions):
    """Without checksums damage may go unnoticed in the data, but never ends in anything but a
    CheckpointError.
    """
    rng = random.Random(1)
    for path in sorted(checkpoint.iterdir()):
        for _ in range(positions):
            position = rng.randrange(min(2000, path.stat().st_size))
            bit = rng.randrange(8)
            flip(path, position, bit)
            try:
                load(make_state(False), checkpoint, strictness="ignore_all")
                load_common(checkpoint)
            except CheckpointError as error:
                assert "\n" not in str(error) or "does not fit" in str(error)
            flip(path, position, bit)


def test_only_read_blocks_are_checked(checkpoint):
    """Damage in a block that a partial load does not touch does not stop it."""
    big = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    blocks = big.stat().st_size // BLOCK_SIZE
    assert blocks >= 2

    flip(big, (blocks - 1) * BLOCK_SIZE + 10, 3)
    problems = verify(checkpoint).problems
    assert problems == [
        f"{big}: damaged: wrong checksum of bytes "
        f"{(blocks - 1) * BLOCK_SIZE}..{blocks * BLOCK_SIZE}"
    ]

    state = make_state(False)
    expected = make_state(True)
    load({"u": state["u"]}, checkpoint, verify=True, strictness="raise_unexpected")

    assert torch.equal(state["u"].local, expected["u"].local)
    with pytest.raises(CheckpointError, match=f"{big.name}: damaged"):
        load({"w": state["w"]}, checkpoint, verify=True, strictness="raise_unexpected")


def test_completeness(checkpoint):
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = shard.stat().st_size
    os.truncate(shard, size // 2)
    assert any("truncated" in problem for problem in verify(checkpoint).problems)

    shard.unlink()
    assert any(
        f"{shard}: the shard file is missing" in problem for problem in verify(checkpoint).problems
    )

    (checkpoint / ".metadata").unlink()
    assert any("is not a complete checkpoint" in problem for problem in verify(checkpoint).problems)
    assert verify(checkpoint / "nowhere").problems == [
        f"{checkpoint / 'nowhere'}: no such directory"
    ]


def empty(path):
    path.write_bytes(b"")


def change(path):
    path.write_bytes(path.read_bytes().replace(b"12", b"13"))


@pytest.mark.parametrize("damage", [empty, change, Path.unlink])
def test_lineage_is_part_of_a_checkpoint(tmp_path, damage):
    """Otherwise a restart of a job does not recognize the newest checkpoint as its own."""
    directory = tmp_path / "iter_0000012"
    lineage = Lineage((Segment(1, 12, "a"),))
    content = lineage.encode(None)
    save(make_state(True), directory, common={}, extra_files={LINEAGE: content})

    assert verify(directory).ok
    assert not find_missing_or_truncated(directory)

    damage(directory / LINEAGE)
    assert any(LINEAGE in problem for problem in verify(directory).problems)
    if damage is not change:
        assert any(LINEAGE in problem for problem in find_missing_or_truncated(directory))


def test_lineage_of_older_checkpoints_has_no_checksum(checkpoint):
    assert verify(checkpoint).ok
    assert not find_missing_or_truncated(checkpoint)

    lineage = Lineage((Segment(1, 12, "a"),))
    (checkpoint / LINEAGE).write_bytes(lineage.encode(None))
    assert verify(checkpoint).ok
    assert not find_missing_or_truncated(checkpoint)

    empty(checkpoint / LINEAGE)
    assert not verify(checkpoint).ok
    assert LINEAGE in find_missing_or_truncated(checkpoint)[0]


def test_appended_bytes_and_foreign_files(checkpoint):
    (checkpoint / "__7_0.distcp").write_bytes(b"left over")
    report = verify(checkpoint)
    assert report.ok
    assert "__7_0.distcp: belongs to no tensor" in report.notes[0]
    with (checkpoint / "common.pt").open("ab") as file:
        file.write(b"x")
    assert not verify(checkpoint).ok


def test_foreign_checkpoints_have_no_checksums(tmp_path):
    dcp.save({"w": torch.randn(30, 4)}, checkpoint_id=tmp_path / "c")
    report = verify(tmp_path / "c")
    assert report.ok
    assert not report.has_checksums
    assert len(report.notes) == 2

    state = {"w": ShardedTensor.replicated("w", torch.zeros(30, 4))}
    load(state, tmp_path / "c")
    assert state["w"].local.any()


def with_manifest(pristine, tmp_path, **changes):
    """A copy without our checksums, and with the list of hashes that Megatron-LM's
    --verify-integrity leaves.
    """
    directory = tmp_path / "c"
    shutil.copytree(pristine, directory)
    (directory / "checksums.bin").unlink()
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }
    (directory / "integrity.json").write_text(
        json.dumps({"algorithm": "sha256", "files": files} | changes)
    )
    return directory


def test_the_hashes_of_megatron_lm_are_checked(pristine, tmp_path):
    directory = with_manifest(pristine, tmp_path)
    report = verify(directory)
    assert report.ok
    assert report.has_checksums
    assert report.notes == []
    assert report.bytes == sum(
        path.stat().st_size for path in directory.iterdir() if path.name != "integrity.json"
    )

    shard = sorted(directory.glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert verify(directory).problems == [
        f"{shard}: damaged: its content does not match the hash in integrity.json"
    ]

    manifest = json.loads((directory / "integrity.json").read_text())
    del manifest["files"][shard.name]
    (directory / "integrity.json").write_text(json.dumps(manifest))
    missing = [f"{shard}: integrity.json has no hash of it"]
    assert verify(directory).problems == find_integrity_problems(directory) == missing

    manifest["files"][shard.name] = ""
    (directory / "integrity.json").write_text(json.dumps(manifest))
    shard.unlink()
    assert any(
        "integrity.json names it, but it cannot be read" in problem
        for problem in verify(directory).problems
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"algorithm": "md5"}, "unknown algorithm 'md5', only sha256 is known"),
        ({"files": {"../escape": "0"}}, "the name of a file, without a path"),
        ({"files": ["a"]}, "a dictionary"),
    ],
)
def test_a_list_of_hashes_that_is_none_is_named(pristine, tmp_path, changes, message):
    assert any(
        message in problem
        for problem in verify(with_manifest(pristine, tmp_path, **changes)).problems
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", "checksums.bin", "common.pt", ".metadata"])
def test_only_regular_files_are_read(checkpoint, name, monkeypatch):
    """A pipe in place of a shard, or of the checksums, was waited for without end; /dev/zero was
    read without end.
    """
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("/dev/null")
    monkeypatch.setenv("MEGATRON_FOLLOW_LINKS", "1")
    expected = f"{checkpoint / name} is not a regular file"

    assert expected in verify(checkpoint).problems

    with pytest.raises(CheckpointError, match=expected):
        load_common(checkpoint)
        reader = Reader(checkpoint)
        for key, tensor in reader.metadata.tensors.items():
            reader.read(key, (0,) * len(tensor.shape), tensor.shape)


def test_load_detects_data_file_of_another_checkpoint(pristine, checkpoint, tmp_path):
    """A partial copy of an older checkpoint has files of the right names and sizes."""
    older = make_state(True)
    for key in ("w", "u", "b", "s"):
        older[key].local.add_(1)
    save(older, tmp_path / "older", common={"iteration": 7, "args": {"lr": 0.1}}, workers=2)

    for shard in checkpoint.glob("*.distcp"):
        content = (tmp_path / "older" / shard.name).read_bytes()
        assert len(content) == shard.stat().st_size
        if content == shard.read_bytes():
            continue
        original = shard.read_bytes()
        shard.write_bytes(content)
        message = load_and_compare(checkpoint)
        assert f"{shard}: damaged: wrong checksum of bytes" in message
        assert "belongs to another checkpoint" in message
        shard.write_bytes(original)

    assert load_and_compare(checkpoint) is None


def test_load_without_verification_is_optional(checkpoint):
    """`verify=False` reads damaged data; it is the only way to salvage them."""
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(shard, shard.stat().st_size // 2, 3)
    first = shard.stat().st_size // 2 // BLOCK_SIZE * BLOCK_SIZE
    assert f"{shard}: damaged: wrong checksum of bytes {first}.." in load_and_compare(checkpoint)

    state = make_state(False)
    load(state, checkpoint, verify=False)
    differing = [k for k in "wubs" if not torch.equal(state[k].local, make_state(True)[k].local)]
    assert len(differing) == 1


def test_load_of_a_checkpoint_without_checksums_succeeds(checkpoint):
    (checkpoint / "checksums.bin").unlink()
    assert load_and_compare(checkpoint) is None


@pytest.mark.parametrize("position", [0, 5, BLOCK_SIZE - 1, BLOCK_SIZE, 3 * BLOCK_SIZE + 7])
def test_verified_file_returns_the_bytes_of_any_range(tmp_path, position):
    """Compared with slicing, for ranges that begin and end inside and at the edges of blocks."""
    content = random.Random(3).randbytes(20 * BLOCK_SIZE + 11)
    path = tmp_path / "data"
    path.write_bytes(content)
    (tmp_path / "checksums.bin").write_bytes(
        b"".join(seal_checksums(encode_checksum_records({"data": compute_checksums(content)})))
    )
    sizes = [1, 9, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 5, 12 * BLOCK_SIZE + 3]
    for size in [*sizes, len(content) - position]:
        with ChecksumVerifier(tmp_path).open(path) as file:
            assert file.read(position, size) == content[position : position + size]
            assert file.read(position + 1, size) == content[position + 1 : position + 1 + size]

    damaged = bytearray(content)
    damaged[position] ^= 4
    path.write_bytes(damaged)
    block = position // BLOCK_SIZE
    for start in (block * BLOCK_SIZE, position, min(position + 1, (block + 1) * BLOCK_SIZE - 1)):
        with (
            ChecksumVerifier(tmp_path).open(path) as file,
            pytest.raises(CheckpointError, match=f"wrong checksum of bytes {block * BLOCK_SIZE}"),
        ):
            file.read(start, 1)


def test_a_load_reads_only_its_own_part_of_the_metadata(tmp_path, monkeypatch):
    """`.metadata` grows with the number of ranks; the part that one rank reads does not."""
    state = {}
    for index in range(24):
        key = f"tensor_{index:02d}"
        values = torch.full((2000, 1), float(index))
        boxes = tuple(Box((row, 0), values[row : row + 1]) for row in range(len(values)))
        state[key] = ShardedTensor(key, (2000, 1), torch.float32, boxes)

    save(state, tmp_path / "c", common={})
    num_blocks = -(-(tmp_path / "c/.metadata").stat().st_size // BLOCK_SIZE)
    assert num_blocks >= 3

    verifiers = []
    find = ChecksumVerifier.find
    monkeypatch.setattr(
        ChecksumVerifier,
        "find",
        lambda path: verifiers.append(find(path)) or verifiers[-1],
    )
    expected = torch.zeros(2000, 1)
    reader = Reader(tmp_path / "c")
    reader.read_into([("tensor_05", Box((0, 0), expected))])

    assert bool((expected == 5).all())
    assert sum(verifiers[0]._verified[".metadata"]) < num_blocks
