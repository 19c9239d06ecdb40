"""Preprocessing strings: "op|op(args)|…", parsed and never evaluated; the ops are in `preprocess.ops`."""

import ast
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.errors import InputError, ReadingError, check_arguments, first_line_with_type, nearest
from input_pipeline.preprocess import ops

LONGEST_SHOWN = 200  # characters of a string in a message


class ValueRange(NamedTuple):
    """The map of pixel values that the op `value_range` makes, from [in_min, in_max] to [vmin, vmax]."""

    vmin: float = -1
    vmax: float = 1
    in_min: float = 0
    in_max: float = 255


def defer_value_range(spec: str) -> tuple[str, ValueRange | None]:
    """A preprocessing string without its `value_range`, and that, where it is the last op to change the image.

    The map is pointwise, so it may as well be made on the device: images travel as bytes, a quarter of the memory.
    Where it is not the last (or clips, or is absent) the string comes back as it is, with None. Raises InputError.
    """
    nodes = _nodes(spec)
    for at in reversed(range(len(nodes))):
        call = _call(nodes[at])
        name = getattr(call.func, "id", None)
        if name == "value_range":
            _op(nodes[at])  # checks the arguments
            kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            if len(call.args) <= 4 and "clip_values" not in kwargs:
                rest = "|".join(ast.unparse(node) for node in nodes[:at] + nodes[at + 1 :])
                return rest, ValueRange(*map(ast.literal_eval, call.args), **kwargs)
        if name not in ("keep", "onehot"):
            break
    return spec, None


def _nodes(spec: str) -> list[ast.expr]:
    """The ops of a string; none of an empty one. Raises InputError where it does not parse."""
    if not spec.strip():
        return []
    try:
        return _split(ast.parse(spec.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        shown = repr(spec) if len(spec) <= LONGEST_SHOWN else f"{spec[:LONGEST_SHOWN]!r}…"
        raise InputError(f"preprocessing: cannot parse {shown}; expected op|op(args)|…") from None


def _call(node: ast.expr) -> ast.Call:
    """An op as a call: `name` is `name()`."""
    return node if isinstance(node, ast.Call) else ast.Call(node, [], [])


def _split(node: ast.expr) -> list[ast.expr]:
    """The operands of a chain of `|`, left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_split(node.left), *_split(node.right)]
    return [node]


def _op(node: ast.expr) -> ops.Op:
    """One op from `name` or `name(literals)`."""
    call = _call(node)
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
        self.ops = [_op(node) for node in _nodes(spec)]

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        try:
            for op in self.ops:
                example = op(example, rng)
        except InputError:
            raise
        except KeyError as e:
            raise InputError(f"preprocessing needs {e}, the example has {', '.join(example)}") from None
        except Exception as e:  # an op that meets what it was not made for, too little memory
            raise ReadingError(f"preprocessing: {first_line_with_type(e)}") from e
        return example
