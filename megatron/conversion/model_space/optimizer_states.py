"""States that the registered optimizers keep of a parameter, and their keys."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from megatron.core.optimizer import AVERAGE_PREFIX, UPDATE_RULES, get_update_rule
from megatron.core.run_checkpoint.keys import split_key


def average_key(parameter: str) -> str:
    """Return the key of a parameter's average (--ema-decay)."""
    return f"{AVERAGE_PREFIX}{parameter}"


def _list_state_sets(only_uniform: bool = False) -> list[tuple[str, ...]]:
    """Return the sets of states that the registered optimizers may have of a parameter.

    `only_uniform` leaves out optimizers with other states of matrices.
    """
    state_sets: list[tuple[str, ...]] = []
    for rule in map(get_update_rule, UPDATE_RULES):
        if rule.HAS_UNIFORM_STATE or not only_uniform:
            state_sets.extend(rule.STATE_SETS)
    return state_sets


_UNIFORM_STATE_SETS = _list_state_sets(only_uniform=True)
# Names of the optimizer's tensors; param is the fp32 main parameter. The rest are the states of the
# registered optimizers, each once.
OPTIMIZER_STATES = ("param", *dict.fromkeys(itertools.chain.from_iterable(_list_state_sets())))
ADAM = ("param", *get_update_rule("adam").STATE_SETS[0])
SGD = ("param", *get_update_rule("sgd").STATE_SETS[0])


def optimizer_key(state: str, parameter: str) -> str:
    """Return the key of a parameter's optimizer state."""
    assert state in OPTIMIZER_STATES, state
    return f"optimizer.state.{state}.{parameter}"


def optimizer_states(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the optimizer states of a parameter that `keys` contain, in order."""
    states = set()
    for key in keys:
        _, state = split_key(key)
        if state is not None:
            states.add(state)
    return tuple(state for state in OPTIMIZER_STATES if state in states)


def complete_states(states: Iterable[str]) -> tuple[str, ...] | None:
    """Return the smallest set of states of an optimizer that includes `states`, with `param`.

    None if they belong to several optimizers. All parameters have the same states.
    """
    return _find_smallest_set(states, _UNIFORM_STATE_SETS)


def has_mixed_states(args: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of a run has other states of matrices than of the rest."""
    optimizer = args.get("optimizer")
    return optimizer in UPDATE_RULES and not get_update_rule(optimizer).HAS_UNIFORM_STATE


def complete_mixed_states(args: Mapping[str, Any], states: Iterable[str]) -> tuple[str, ...] | None:
    """Return the smallest set of states of one parameter that includes `states`, with `param`.

    The optimizer of the run has other states of matrices (see `has_mixed_states`).
    """
    return _find_smallest_set(states, get_update_rule(args["optimizer"]).STATE_SETS)


def _find_smallest_set(
    state_names: Iterable[str], state_sets: Iterable[tuple[str, ...]]
) -> tuple[str, ...] | None:
    moments = set(state_names) - {"param"}
    fitting = [states for states in state_sets if moments.issubset(states)]
    if not fitting:
        return None
    smallest = min(fitting, key=len)
    return ("param", *smallest)


def list_parameter_states(parameter: str, keys: Container[str]) -> tuple[str, ...]:
    """Return the optimizer states of a parameter that are in `keys`."""
    return tuple(state for state in OPTIMIZER_STATES if optimizer_key(state, parameter) in keys)


def full_precision_key(parameter: str, keys: Container[str]) -> str:
    """Return the key of the fp32 main parameter if it is in `keys`, else `parameter`."""
    # Weights are rounded copies of the main parameters.
    main = optimizer_key("param", parameter)
    if main in keys:
        return main
    return parameter
