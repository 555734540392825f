"""The order of the messages of a transfer: rounds with bounded buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.mapping import cut_rows
from megatron.transfer.schedule import Copy, Item, Round, TransferSchedule


class _Move(NamedTuple):
    """Elements that are sent from one rank to another."""

    sender: int
    receiver: int
    source: Item
    target: Item
    position: int
    """Bytes that the sender sends before."""


_MovesByRound = dict[int, list[_Move]]


@dataclass
class _Direction:
    """Sends or receives of a rank: the last round, and the bytes in that round."""

    round: int = 0
    nbytes: int = 0

    def find_round(self, nbytes: int, limit: int) -> int:
        """Return the first round with room; more than `limit` bytes have a round of their own."""
        if self.nbytes > 0 and self.nbytes + nbytes > limit:
            return self.round + 1
        return self.round

    def add(self, round: int, nbytes: int) -> None:
        """Add bytes to the last round or to a later one."""
        if round > self.round:
            self.round = round
            self.nbytes = 0
        self.nbytes += nbytes


class Router:
    """Copies and messages of all ranks, collected tensor by tensor."""

    def __init__(self, num_ranks: int, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._copies: list[list[Copy]] = [[] for _ in range(num_ranks)]
        self._moves: list[_Move] = []
        self._sent_bytes = [0] * num_ranks
        self._received_bytes = [0] * num_ranks

    def choose_sender(self, owners: Iterable[int], receiver: int) -> int:
        """Return the receiver if it is an owner, else the owner that has sent least so far."""
        if receiver in owners:
            return receiver
        return min(owners, key=lambda rank: (self._sent_bytes[rank], rank))

    def add(self, sender: int, receiver: int, elements: Copy, dtype: torch.dtype) -> None:
        """Add elements to copy or to send; those larger than a bucket are cut into rows."""
        if sender == receiver:
            self._copies[sender].append(elements)
            return
        source, target = elements
        for extent in cut_rows(source.shape, dtype.itemsize, self._bucket_bytes):
            sent = Item(source.narrow(*extent), dtype)
            received = Item(target.narrow(*extent), dtype)
            position = self._sent_bytes[sender]
            self._moves.append(_Move(sender, receiver, sent, received, position))
            self._sent_bytes[sender] += sent.nbytes
            self._received_bytes[receiver] += sent.nbytes

    def make_schedules(self) -> list[TransferSchedule]:
        """Return the schedule of each rank."""
        moves_by_rank = self._assign_rounds()
        bytes_by_rank = tuple(self._received_bytes)
        schedules = []
        for rank, copies in enumerate(self._copies):
            # Rounds in which the rank has no messages are left out.
            rounds = []
            for _, moves in sorted(moves_by_rank[rank].items()):
                rounds.append(_make_round(rank, moves))
            schedule = TransferSchedule(rank, tuple(copies), tuple(rounds), bytes_by_rank)
            schedules.append(schedule)
        return schedules

    def _assign_rounds(self) -> list[_MovesByRound]:
        """Return the moves of each rank by round. In each round a rank fills at most one bucket.

        Ranks wait for each other in the order of the rounds only, so that they cannot deadlock.
        """
        limit = self._bucket_bytes
        num_ranks = len(self._copies)
        moves_by_rank: list[_MovesByRound] = [{} for _ in range(num_ranks)]
        sends = [_Direction() for _ in range(num_ranks)]
        receives = [_Direction() for _ in range(num_ranks)]

        # All senders begin in the first round: pipeline stages send at the same time.
        self._moves.sort(key=lambda move: move.position)
        for move in self._moves:
            nbytes = move.source.nbytes
            # The first round with room in both buffers
            outgoing = sends[move.sender]
            incoming = receives[move.receiver]
            sender_round = outgoing.find_round(nbytes, limit)
            receiver_round = incoming.find_round(nbytes, limit)
            round = max(sender_round, receiver_round)
            outgoing.add(round, nbytes)
            incoming.add(round, nbytes)

            # Both ranks list the move at the same position of the same round.
            for rank in (move.sender, move.receiver):
                moves_of_rank = moves_by_rank[rank]
                moves_of_rank.setdefault(round, []).append(move)
        return moves_by_rank


def _make_round(rank: int, moves: Sequence[_Move]) -> Round:
    """Return the messages of a rank in a round."""
    # By peer
    sends: dict[int, list[Item]] = {}
    receives: dict[int, list[Item]] = {}
    for move in moves:
        if move.sender == rank:
            sends.setdefault(move.receiver, []).append(move.source)
        else:
            receives.setdefault(move.sender, []).append(move.target)
    return Round.of(sends, receives)
