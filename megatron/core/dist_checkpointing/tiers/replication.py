"""Replication of node-local checkpoints: pieces of files on their way to other nodes.

A piece goes from the host buffer to the local disk and then, by the thread that wrote it, over the
gloo group of the replication group. On the receiving rank one thread per source writes and hashes
the pieces that arrive. At the end the source sends its marker; the receiver compares checksums,
stores the marker if all files match, and answers. No collective is needed, and a neighbor that is
dead or has no room costs a warning: the save itself is on the local disk.

Every message carries a MAC (keyed BLAKE2b) if the launcher sets the environment variable
MEGATRON_JOB_SECRET to the same secret value on all nodes. The key is derived from it and from a
nonce that is new in every launch of the job, so that messages of earlier launches are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import struct
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.background import PAGE, SLOT_SIZE, Slot
from megatron.core.dist_checkpointing.format.checksums import FileChecksums, decode_checksums
from megatron.core.dist_checkpointing.saving.shard import Shard, ShardFile
from megatron.core.durable_files import check_free_space, fsync_directory, write_flushed
from megatron.core.object_storage import first_line
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import file_name
from megatron.core.safe_files.torch_zip import view_bytes

JOB_SECRET = "MEGATRON_JOB_SECRET"
MAX_MARKER = 64 << 20  # bytes: the checksums of 8 TB
MAX_WRITERS = 1 << 20  # ranks of one save

_MARKER = re.compile(r"\.done-(\d{1,7})-of-(\d{1,7})")
_DATA_FILE = re.compile(r"__(\d{1,7})_\d{1,7}\.distcp")

_MAC_SIZE = 32
# A piece is one message, because under load every message costs a millisecond: a page that begins
# with a header and its MAC, then the content. A header without a name ends a failed save. After the
# marker, an answer returns: the reason why there is no replica, or an empty string.
_HEADER = struct.Struct("<QQQ256p")  # size of the file, position, length, name
_ANSWER = struct.Struct("512s")
_PIECES_TAG = 1
_ANSWERS_TAG = 2


def marker_name(writer: int, size: int) -> str:
    return f".done-{writer}-of-{size}"


def parse_marker_name(name: str) -> tuple[int, int] | None:
    """Return writer and number of writers, or None if `name` is not the name of a marker."""
    match = _MARKER.fullmatch(name)
    if match is None:
        return None
    writer = int(match[1])
    size = int(match[2])
    return (writer, size) if writer < size <= MAX_WRITERS else None


def writer_of(file: str) -> int:
    """Return the rank of the save that wrote `file`; rank 0 writes the files of all ranks."""
    match = _DATA_FILE.fullmatch(file)
    return 0 if match is None else int(match[1])


class MessageAuthenticator:
    """MACs of the messages among the ranks of `group`; without a secret they are empty."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self.size = 0 if key is None else _MAC_SIZE

    @classmethod
    def create(cls, group: dist.ProcessGroup | None) -> MessageAuthenticator:
        """Derive the key of this launch from the job's secret and nonces of all ranks. Collective.

        Raises CheckpointError if only some ranks have a secret.
        """
        secret = os.environ.get(JOB_SECRET, "").encode()
        # A nonce of zeros means that the rank has no secret.
        nonce = bytes(_MAC_SIZE)
        if secret:
            nonce = secrets.token_bytes(_MAC_SIZE)
        nonces = _all_gather(nonce, group)
        has_secret = [any(peer_nonce) for peer_nonce in nonces]
        if any(has_secret) and not all(has_secret):
            raise CheckpointError(
                f"{JOB_SECRET} is set on some ranks only: set it to the same value on all nodes"
            )
        if not secret:
            return cls(None)
        # The key depends on the nonces of all ranks: messages of earlier launches are not valid.
        key = hmac.digest(secret, b"".join(nonces), "sha256")
        authenticator = cls(key)
        # Equal keys have equal MACs, from which the keys cannot be computed.
        proof = authenticator.sign("equal keys")
        proofs = _all_gather(proof, group)
        if set(proofs) != {proof}:
            raise CheckpointError(
                f"{JOB_SECRET} differs between ranks: set it to the same value on all nodes"
            )
        return authenticator

    def sign(self, purpose: str, *buffers: bytes | memoryview) -> bytes:
        """Return the MAC of `buffers` for `purpose`: sender, receiver and context."""
        if self._key is None:
            return b""
        mac = hashlib.blake2b(key=self._key, digest_size=_MAC_SIZE)
        # The length separates the purpose from the content.
        length = len(purpose).to_bytes(8, "little")
        for buffer in (length, purpose.encode(), *buffers):
            mac.update(buffer)
        return mac.digest()

    def is_valid(self, mac: bytes | memoryview, purpose: str, *buffers: bytes | memoryview) -> bool:
        return hmac.compare_digest(bytes(mac), self.sign(purpose, *buffers))


def _all_gather(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of all ranks, which have the same length."""
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return [bytes(view_bytes(peer_tensor)) for peer_tensor in gathered]


class ReplicatedShard(ShardFile):
    """A file on the local disk whose pieces are also sent to other nodes."""

    def __init__(self, path: Path, size: int, links: list[ReplicaLink]) -> None:
        super().__init__(path, size)
        self._links = links

    def write(self, offset: int, slot: Slot, length: int, digests: bytes | None = None) -> None:
        # To the local disk first: the save does not depend on the neighbors.
        super().write(offset, slot, length, digests)
        for link in self._links:
            link.send(slot.frame, self._path.name, self._size, offset, length)

    write_pieces = Shard.write_pieces  # each by `write`


class ReplicaLink:
    """Connection to one neighbor during one save, for any thread.

    It stops sending after the first error.
    """

    def __init__(
        self,
        rank: int,
        target: int,
        group: dist.ProcessGroup | None,
        authenticator: MessageAuthenticator,
        checkpoint: str,
    ) -> None:
        self.target = target
        self._group = group
        self._authenticator = authenticator
        self._to_target = f"{checkpoint} {rank} {target}"
        self._from_target = f"{checkpoint} {target} {rank}"
        self._problem: str | None = None
        self._over = False

    def send(self, frame: torch.Tensor, name: str, size: int, position: int, length: int) -> None:
        """Send a piece of a file of `size` bytes.

        The `length` bytes follow the first page of `frame`, which takes the header.
        """
        if self._problem is not None:
            return
        # [header, MAC, rest of the page, content]
        view = view_bytes(frame)
        _HEADER.pack_into(view, 0, size, position, length, name.encode())
        header = view[: _HEADER.size]
        content = view[PAGE : PAGE + length]
        mac = self._authenticator.sign(self._to_target, header, content)
        view[_HEADER.size : _HEADER.size + len(mac)] = mac
        try:
            dist.send(frame[: PAGE + length], self.target, self._group, _PIECES_TAG)
        except RuntimeError as error:  # gloo does not restore a lost connection
            self._problem = first_line(error)

    def send_content(self, name: str, content: bytes) -> None:
        """Send a whole file that is in memory."""
        for position in range(0, len(content), SLOT_SIZE):
            piece = content[position : position + SLOT_SIZE]
            frame = torch.frombuffer(bytearray(PAGE) + piece, dtype=torch.uint8)
            self.send(frame, name, len(content), position, len(piece))

    def receive_answer(self) -> str | None:
        """Return why the neighbor has no replica, after the marker; None if it has one."""
        self._over = True
        answer = torch.zeros(_ANSWER.size + self._authenticator.size, dtype=torch.uint8)
        if self._problem is None:
            try:
                dist.recv(answer, self.target, self._group, _ANSWERS_TAG)
            except RuntimeError as error:
                self._problem = first_line(error)
        if self._problem is not None:
            return self._problem
        content = bytes(view_bytes(answer))
        # The text is padded with zeros; an empty one means that the replica is stored.
        text = content[: _ANSWER.size]
        mac = content[_ANSWER.size :]
        if not self._authenticator.is_valid(mac, self._from_target, text):
            return "its answer is not authentic"
        return text.rstrip(b"\0").decode(errors="replace") or None

    def abort(self) -> None:
        """End a save that has failed."""
        if not self._over:
            self._over = True
            self.send(torch.zeros(PAGE, dtype=torch.uint8), "", 0, 0, 0)


class ReplicaReceiver:
    """Writes the files of one save of `source` to `directory` of this node."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        source: int,
        group: dist.ProcessGroup | None,
        authenticator: MessageAuthenticator,
        slot: Slot,
    ) -> None:
        self._directory = directory
        self._source = source
        self._group = group
        self._authenticator = authenticator
        self._slot = slot
        self._from_source = f"{directory.name} {source} {rank}"
        self._to_source = f"{directory.name} {rank} {source}"
        self._files: dict[str, ShardFile] = {}
        self._marker = bytearray()
        self._problem = ""  # why there will be no replica; the source goes on sending

    def run(self) -> None:
        """Receive until the marker is complete, or the source aborts the save."""
        try:
            while self._receive_piece():
                pass
        finally:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close(durable=False)

    def _receive_piece(self) -> bool:
        """Receive one piece. Returns whether others follow."""
        dist.recv(self._slot.frame, self._source, self._group, _PIECES_TAG)  # or fewer bytes
        view = view_bytes(self._slot.frame)
        # The header is not trusted before its MAC is checked: its length is limited.
        size, position, length, encoded = _HEADER.unpack_from(view)
        try:
            self._check_authentic(view, min(length, SLOT_SIZE))
            if not encoded:
                return False
            name = self._check_piece(encoded, size, position, length)
            if parse_marker_name(name) is not None:
                self._marker += self._slot.view[:length]
                if len(self._marker) < size:
                    return True
                self._answer(self._problem or self._keep(name))
                return False
            # After an error, receive and drop the remaining pieces: the source goes on.
            if not self._problem:
                self._write(name, size, position, length)
        except (OSError, ValueError) as error:
            self._problem = self._problem or str(error)
            if encoded.startswith(b".done-"):  # the source waits for an answer
                self._answer(self._problem)
                return False
        return True

    def _check_authentic(self, view: memoryview, length: int) -> None:
        mac = view[_HEADER.size : _HEADER.size + self._authenticator.size]
        header = view[: _HEADER.size]
        content = view[PAGE : PAGE + length]
        buffers = (header, content)
        if not self._authenticator.is_valid(mac, self._from_source, *buffers):
            raise CheckpointError(
                f"a message of rank {self._source} is not authentic: it was damaged, or another "
                "program sends to this job"
            )

    def _check_piece(self, encoded: bytes, size: int, position: int, length: int) -> str:
        """Return the name of the file. Raises CheckpointError for a piece no writer would send."""
        location = f"a replica from rank {self._source}"
        name = file_name(encoded.decode(), location)
        marker = parse_marker_name(name)
        writer = writer_of(name) if marker is None else marker[0]
        if name.startswith(".done-") and marker is None:
            raise CheckpointError(f"{location}: {name} is not the name of a marker")
        if writer != self._source:
            raise CheckpointError(f"{location}: {name} belongs to rank {writer}")
        if length > SLOT_SIZE or position + length > size:
            raise CheckpointError(
                f"{location}: {length} bytes at {position} of {name}, which has {size} bytes"
            )
        if marker is not None and (size > MAX_MARKER or position != len(self._marker)):
            raise CheckpointError(
                f"{location}: {name} has {size} bytes, at most {MAX_MARKER} are read"
            )
        return name

    def _write(self, name: str, size: int, position: int, length: int) -> None:
        if name not in self._files:
            self._directory.mkdir(parents=True, exist_ok=True)
            check_free_space(self._directory, size)  # also bounds the memory for checksums
            self._files[name] = ShardFile(self._directory / name, size)
        self._files[name].write(position, self._slot, length)

    def _keep(self, name: str) -> str:
        """Make the replicas durable and store the marker; return why not, or an empty string."""
        path = self._directory / name
        try:
            written: dict[str, FileChecksums] = {}
            for file in sorted(self._files):
                # Files that remain in the dictionary are closed by `run`.
                written[file] = self._files.pop(file).close(durable=True)
            # Compare with the checksums of the source.
            expected = decode_checksums(bytes(self._marker), str(path))
            names = expected.keys() | written.keys()
            damaged = [file for file in sorted(names) if expected.get(file) != written.get(file)]
            if damaged:
                return f"{', '.join(damaged[:3])} came damaged"
            write_marker(path, bytes(self._marker))
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _answer(self, problem: str) -> None:
        text = _ANSWER.pack(problem.encode())
        mac = self._authenticator.sign(self._to_source, text)
        answer = torch.frombuffer(bytearray(text + mac), dtype=torch.uint8)
        dist.send(answer, self._source, self._group, _ANSWERS_TAG)


def write_marker(path: Path, content: bytes) -> None:
    """Write a marker durably, after all files that it describes."""
    # The entries of the files must be durable before the marker is.
    path.parent.mkdir(parents=True, exist_ok=True)
    fsync_directory(path.parent)
    write_flushed(path, content)
    fsync_directory(path.parent)
