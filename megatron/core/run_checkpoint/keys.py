"""Keys of model space: the names of a model's tensors and of their optimizer state.

There is one key per layer with its global number, and the optimizer state of a parameter is under
`optimizer.state.*` (see "Keys" in `docs/architecture.md`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from megatron.core.optimizer import AVERAGE_PREFIX, UPDATE_RULES

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def _list_state_sets(only_uniform: bool = False) -> list[tuple[str, ...]]:
    """Return the sets of states that the registered optimizers may have of a parameter.

    `only_uniform` leaves out optimizers with other states of matrices.
    """
    state_sets: list[tuple[str, ...]] = []
    for rule in UPDATE_RULES.values():
        if rule.HAS_UNIFORM_STATE or not only_uniform:
            state_sets.extend(rule.STATE_SETS)
    return state_sets


_UNIFORM_STATE_SETS = _list_state_sets(only_uniform=True)
# Names of the optimizer's tensors; param is the fp32 main parameter. The rest are the states of the
# registered optimizers, each once.
OPTIMIZER_STATES = ("param", *dict.fromkeys(itertools.chain.from_iterable(_list_state_sets())))
# The state of a parameter that is its average, which does not belong to the optimizer.
AVERAGE = "ema"
ADAM = ("param", *UPDATE_RULES["adam"].STATE_SETS[0])
SGD = ("param", *UPDATE_RULES["sgd"].STATE_SETS[0])


def optimizer_key(state: str, parameter: str) -> str:
    """Return the key of a parameter's optimizer state."""
    assert state in OPTIMIZER_STATES, state
    return f"optimizer.state.{state}.{parameter}"


def average_key(parameter: str) -> str:
    """Return the key of a parameter's average (--ema-decay)."""
    return f"{AVERAGE_PREFIX}{parameter}"


def split_key(key: str) -> tuple[str, str | None]:
    """Return the parameter of a key, and its state: one of the optimizer's, AVERAGE, or None for
    the parameter itself.
    """
    if key.startswith(AVERAGE_PREFIX):
        return key.removeprefix(AVERAGE_PREFIX), AVERAGE
    if not key.startswith("optimizer.state."):
        return key, None
    state, _, parameter = key.removeprefix("optimizer.state.").partition(".")
    return parameter, state


# Prefix of the keys of foreign tensors, which are copied byte for byte (--keep-foreign).
_FOREIGN_PREFIX = "foreign."


def foreign_key(name: str) -> str:
    """Return the key of a tensor that the model does not have, called `name` in the files."""
    return f"{_FOREIGN_PREFIX}{name}"


def is_foreign(key: str) -> bool:
    """Return whether a key is that of a tensor that the model does not have."""
    return key.startswith(_FOREIGN_PREFIX)


def foreign_name(key: str) -> str:
    """Return the name in the files of a foreign tensor. Other keys are returned unchanged."""
    return key.removeprefix(_FOREIGN_PREFIX)


def is_weight(key: str) -> bool:
    """Return whether a key is that of a parameter of the model, not of its state."""
    _, state = split_key(key)
    return state is None and not is_foreign(key)


def optimizer_states(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the optimizer states of a parameter that `keys` contain, in order."""
    found = set()
    for key in keys:
        _, state = split_key(key)
        if state is not None:
            found.add(state)
    return tuple(state for state in OPTIMIZER_STATES if state in found)


def complete_states(found: Iterable[str]) -> tuple[str, ...] | None:
    """Return the smallest set of states of an optimizer that includes `found`, with `param`.

    None if they belong to several optimizers. All parameters have the same states.
    """
    return _find_smallest_set(found, _UNIFORM_STATE_SETS)


def has_mixed_states(args: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of a run has other states of matrices than of the rest."""
    rule = UPDATE_RULES.get(args.get("optimizer") or "")
    return rule is not None and not rule.HAS_UNIFORM_STATE


def complete_mixed_states(args: Mapping[str, Any], found: Iterable[str]) -> tuple[str, ...] | None:
    """Return the smallest set of states of one parameter that includes `found`, with `param`.

    The optimizer of the run has other states of matrices (see `has_mixed_states`).
    """
    return _find_smallest_set(found, UPDATE_RULES[args["optimizer"]].STATE_SETS)


def _find_smallest_set(
    found: Iterable[str], state_sets: Iterable[tuple[str, ...]]
) -> tuple[str, ...] | None:
    moments = set(found) - {"param"}
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


_UNTRAINED = (".router.expert_bias", ".activation.beta", ".activation.eps")


def is_trained(key: str) -> bool:
    """Return whether the optimizer trains the parameter.

    A router's bias follows the load. Constants and foreign tensors do not change.
    """
    return not key.endswith(_UNTRAINED) and not is_foreign(key)


# ---- Other names of the same parameters ----

# Name of a norm in Megatron-core's local modules -> its name in ours and Transformer Engine's,
# where it is part of the projection that follows. Norms without a single following projection
# (before experts, before latent attention) have a module of their own everywhere, but
# Megatron-core's local modules write the one before experts under the fused name.
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def find_norm_key(name: str, names: Container[str]) -> str:
    """Return the key of a norm's parameter that has either of its names; others are unchanged.

    `names` contains the names of all weights.
    """
    for local, fused in NORMS.items():
        if f".{local}" in name:
            before, _, part = name.partition(f".{local}")
        elif f".{fused}" in name:
            before, _, part = name.partition(f".{fused}")
        else:
            continue
        # The norm is fused if the projection that follows is in the model.
        projection = f"{before}.{fused}".replace(".layer_norm_", ".weight")
        if projection in names:
            return f"{before}.{fused}{part}"
        return f"{before}.{local}{part}"
    return name


HYBRID_FINAL_NORM = "decoder.final_norm."


def is_hybrid(keys: Iterable[str]) -> bool:
    """Return whether the keys of a torch_dist checkpoint are those of HybridModel."""
    return any(key.startswith(HYBRID_FINAL_NORM) for key in keys)
