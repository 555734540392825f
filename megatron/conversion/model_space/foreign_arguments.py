"""Arguments of runs as files of other programs contain them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.safe_files import schema


def plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are plain data, which files of other programs can contain."""
    return {name: value for name, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Return whether the value consists of None, booleans, numbers, texts and containers."""
    if isinstance(value, dict):
        # Other programs may read the file with `weights_only`, which refuses other keys.
        has_plain_names = all(type(name) is str for name in value)
        return has_plain_names and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def refuse_other_models(
    args: Mapping[str, Any], accepted_values: Mapping[str, tuple[Any, ...]], location: str
) -> None:
    """Raise ValueError with the arguments of a run that trained another kind of model than ours.

    `accepted_values` contains the values of our models. A missing argument is accepted. Values are
    compared with ==, so 0, 0.0 and False are equal.
    """
    wrong = []
    for name, accepted in accepted_values.items():
        if name in args and args[name] not in accepted:
            formatted = schema.format_value(args[name])
            wrong.append(f"{name} = {formatted}")
    if wrong:
        raise ValueError(f"{location} was trained with {', '.join(wrong)}, which is not supported")
