"""Parser of layer patterns such as `[0]*3+[1]*61`."""

from __future__ import annotations

import ast
from typing import Any

MAX_REPEAT = 10_000
"""Larger repeat counts are rejected: they would fill the memory before any other check."""


def parse_layer_pattern(text: str) -> int | list[int]:
    """Parse an integer, or lists of 0 and 1 joined by + and repeated by *: `([0]*3+[1]*61)`."""
    try:
        # Unlike `eval`, this only parses: no part of the text is executed.
        expression = ast.parse(text.strip(), mode="eval").body
        return _evaluate(expression)  # type: ignore[no-any-return]
    except (SyntaxError, RecursionError, ValueError):
        raise ValueError(f"{text!r} is not a valid layer pattern") from None


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression; raises ValueError if it is not part of a pattern."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        # Lists are joined, or repeated by a number.
        joins = isinstance(node.op, ast.Add) and isinstance(right, list)
        repeats = isinstance(node.op, ast.Mult) and type(right) is int and right < MAX_REPEAT
        if isinstance(left, list) and joins:
            return left + right
        if isinstance(left, list) and repeats:
            return left * right
    raise ValueError(ast.dump(node))
