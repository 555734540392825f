"""Objects of a checkpoint of a PyTorch program, in any layout in which DCP stores them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing.generators import GeneratorStates, check_generator_states
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.terminal import escape_control_chars

logger = logging.getLogger(__name__)

STATE = "optimizer.state."
GROUPS = "optimizer.param_groups."
RNG = "rng"


def make_rank_key(name: str) -> str:
    """Return the key of this rank's state of `name`."""
    ranks = Coordination.of(None)
    return f"{name}.rank_{ranks.rank}_of_{ranks.size}"


class StoredObjects:
    """The objects that `reader` reads; `context` names the checkpoint in messages."""

    def __init__(self, reader: Reader, context: str) -> None:
        self._reader = reader
        self._tensors = reader.metadata.tensors
        self._keys = reader.metadata.objects
        self._context = context

    def read(self, key: str, name: str) -> Any:
        """Return an object, or a dictionary of stored entries. `name` is its name in `skip`."""
        if key in self._keys:
            return self._reader.read_object(key)
        value = self._read_nested(key)
        if not value:
            raise CheckpointError(
                f"{self._context}: contains no {key}. To leave it as it is, load with "
                f'skip=["{name}"]'
            )
        return value

    def _read_nested(self, key: str) -> dict[str, Any]:
        """Return a dictionary whose entries plain DCP stores one by one, as `<key>.<name>`."""
        value: dict[str, Any] = {}
        prefix = f"{key}."
        for stored_key in (*self._tensors, *self._keys):
            if not stored_key.startswith(prefix):
                continue
            path = stored_key.removeprefix(prefix)
            *outer_names, name = path.split(".")
            inner = value
            for outer_name in outer_names:
                inner = inner.setdefault(outer_name, {})
            if stored_key in self._keys:
                inner[name] = self._reader.read_object(stored_key)
            else:
                shape = self._tensors[stored_key].shape
                origin = (0,) * len(shape)
                inner[name] = self._reader.read(stored_key, origin, shape)
        return value

    def read_of_rank(self, name: str) -> Any:
        """Return the state of `name` on this rank.

        Raises CheckpointError if the states were saved by another number of ranks.
        """
        size = Coordination.of(None).size
        prefix = f"{name}.rank_0_of_"
        counts = [key.removeprefix(prefix) for key in self._keys if key.startswith(prefix)]
        if counts and str(size) not in counts:
            raise CheckpointError(
                f"{self._context}: {name} was saved by {escape_control_chars(counts[0])} ranks, "
                f"one state each, which cannot be distributed over {size}: load with "
                f'skip=["{name}"], and set its position yourself'
            )
        key = make_rank_key(name)
        if key not in self._keys:
            key = name  # plain DCP: one state for all ranks
        return self.read(key, name)

    def read_generators(self) -> GeneratorStates | None:
        """Return the generators of this rank; None if another number of ranks has saved them."""
        key = make_rank_key(RNG)
        if key not in self._keys:
            logger.info(
                f"{self._context}: contains no random number generators of "
                f"{Coordination.of(None).size} ranks; those of the program are left as they are"
            )
            return None
        try:
            return check_generator_states(self._reader.read_object(key))
        except CheckpointError as error:
            raise CheckpointError(
                f"{self._context}: {key} cannot be restored: {error}. To leave the generators "
                f'alone, load with skip=["{RNG}"]'
            ) from error

    def list_state_names(self) -> dict[str, list[str]]:
        """Return the names of optimizer state (e.g. exp_avg) by parameter."""
        state_names: dict[str, list[str]] = {}
        for key in (*self._tensors, *self._keys):
            if key.startswith(STATE):
                path = key.removeprefix(STATE)
                name, _, state_name = path.rpartition(".")
                state_names.setdefault(name, []).append(state_name)
        return state_names

    def read_options(self, parameter_names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the options of the optimizer by parameter."""
        options_of = self._read_groups()
        if options_of:
            return options_of

        # One object for each parameter and option
        for key in self._keys:
            if key.startswith(GROUPS):
                name, _, option = key.removeprefix(GROUPS).rpartition(".")
                if name in parameter_names:
                    options_of.setdefault(name, {})[option] = self._reader.read_object(key)
        if options_of:
            return options_of

        # One object for all groups, as in DCP before torch 2.4
        groups = self.read(GROUPS.removesuffix("."), "optimizer")
        if isinstance(groups, dict):
            groups = [groups]
        for group in groups:
            params = group.pop("params")
            options_of |= dict.fromkeys(params, group)
        return options_of

    def _read_groups(self) -> dict[str, dict[str, Any]]:
        """Return options by parameter from one object for each group and option."""
        options_of: dict[str, dict[str, Any]] = {}
        # Groups are numbered over all optimizers.
        index = 0
        while f"{GROUPS}{index}.params" in self._keys:
            prefix = f"{GROUPS}{index}."
            group = {}
            for key in self._keys:
                if key.startswith(prefix):
                    group[key.removeprefix(prefix)] = self._reader.read_object(key)
            params = group.pop("params")
            if isinstance(params, str):
                params = [params]
            options_of |= dict.fromkeys(params, group)
            index += 1
        return options_of
