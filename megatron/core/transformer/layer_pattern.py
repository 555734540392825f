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
        tree = ast.parse(text.strip(), mode="eval")
        return _evaluate(tree.body)  # type: ignore[no-any-return]
    except (SyntaxError, RecursionError, ValueError):
        raise ValueError(f"{text!r} is not a valid layer pattern") from None


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression; raises ValueError if it is not part of a pattern."""
    if isinstance(node, ast.Constant):
        is_integer = type(node.value) is int  # not a bool
        if is_integer:
            return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        operands = type(left), type(node.op), type(right)
        if operands == (list, ast.Add, list):
            return left + right
        if operands == (list, ast.Mult, int) and right < MAX_REPEAT:
            return left * right
    raise ValueError(ast.dump(node))
