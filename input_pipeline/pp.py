"""Preprocessing strings: "op|op(args)|…", parsed and never evaluated; the ops are in `input_pipeline.ops`."""

import ast
from typing import Any

import numpy as np

from input_pipeline import ops
from input_pipeline.errors import InputError, check_arguments, nearest


def _split(node: ast.expr) -> list[ast.expr]:
    """The operands of a chain of `|`, left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_split(node.left), *_split(node.right)]
    return [node]


def _op(node: ast.expr) -> ops.Op:
    """One op from `name` or `name(literals)`."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise InputError(f"preprocessing: {ast.unparse(node)!r} is not of the form op or op(literal, …)")
    name = call.func.id
    if name not in ops.__all__:
        raise InputError(f"preprocessing: unknown op {name!r}; {nearest(name, ops.__all__)}")
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, TypeError):
        raise InputError(f"preprocessing: the arguments of {ast.unparse(node)!r} must be literals") from None
    make = getattr(ops, name)
    check_arguments(make, args, kwargs, f"preprocessing op {name!r}")
    return make(*args, **kwargs)


class Preprocess:
    """A parsed preprocessing string; call it on an example, a dict, with that example's own generator."""

    def __init__(self, spec: str):
        """Parses `spec`; an empty string leaves examples as they are. Raises InputError."""
        try:
            parsed = ast.parse(spec.strip() or "()", mode="eval").body
        except SyntaxError:
            raise InputError(f"preprocessing: cannot parse {spec!r}; expected op|op(args)|…") from None
        self.ops = [_op(node) for node in _split(parsed)] if spec.strip() else []

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        try:
            for op in self.ops:
                example = op(example, rng)
        except InputError:
            raise
        except KeyError as e:
            raise InputError(f"preprocessing needs {e}, the example has {', '.join(example)}") from None
        except (TypeError, ValueError, AttributeError, MemoryError) as e:
            raise InputError(f"preprocessing: {e}") from None
        return example
