"""Parser of preprocessing strings "op|op(args)|…"; the ops are functions of `input_pipeline.preprocess.ops`.

A string is parsed, never evaluated: arguments must be literals. Parts may be empty, as in "decode||pad(1)|". Every
function raises InputError for a string that cannot be parsed, and for an op or an argument that is invalid.
"""

import ast
import dataclasses
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.errors import InputError, ReadingError, check_arguments, first_line_with_type, nearest
from input_pipeline.preprocess import ops
from input_pipeline.preprocess.keys import Change, Example, Op

MAX_SHOWN = 200  # characters of a string that an error message shows
# Names and positions of arguments whose defaults are those of images of 8 bits.
RANGES = {"value_range": {"in_max": 3}, "vgg_value_range": {"mean": 0, "std": 1}}
KEYS = ("key", "inkey", "outkey")  # arguments of every op that changes one value
EMPTY = re.compile(r"""('[^']*'|"[^"]*")|\|[\s|]*(?=\|)""")  # a quoted string, or bars that separate nothing


class ValueRange(NamedTuple):
    """The linear map of the op `value_range`, from [in_min, in_max] to [vmin, vmax]."""

    vmin: float = -1
    vmax: float = 1
    in_min: float = 0
    in_max: float = 255


class Step(NamedTuple):
    """An op of a preprocessing string.

    Fields:
      text: the op in the string.
      op: its name.
      arguments: all its arguments by name; `inkey` and `outkey` too if it changes one value.
      function: the op itself.
    """

    text: str
    op: str
    arguments: dict[str, Any]
    function: Op


def defer_value_range(spec: str) -> tuple[str, ValueRange | None]:
    """Split a preprocessing string into the part for the host and the `value_range` that the device can apply.

    `value_range` acts on each pixel separately, so the device can apply it instead of the host. Images are then copied
    to the device as bytes, a quarter of the size of float32.

    Returns:
      The string without `value_range`, and its arguments. If `value_range` is absent, clips, has numbers for each
      channel, or is not the last op that changes the image, the original string and None.
    """
    steps = parsed(spec)
    for at, step in reversed([*enumerate(steps)]):
        if step.op == "value_range":
            *numbers, clips, inkey, outkey = step.arguments.values()
            scalars = not any(isinstance(value, list | tuple) for value in numbers)
            if scalars and not clips and inkey == outkey == "image":
                return "|".join(other.text for other in steps[:at] + steps[at + 1 :]), ValueRange(*numbers)
        if step.op not in ("keep", "onehot", "drop"):
            break
    return spec, None


def decoding(spec: str) -> str:
    """Return the text of the op that decodes an image in a preprocessing string, without a crop, or ""."""
    for step in parsed(spec):
        if step.op == "decode":
            return step.text
        if step.op == "decode_jpeg_and_inception_crop":
            return "decode(exif=True)" if step.arguments["exif"] else "decode()"
    return ""


def encoded_key(spec: str) -> str | None:
    """Return the name of the value that a preprocessing string decodes; None if it decodes none."""
    return next((step.arguments["inkey"] for step in parsed(spec) if step.op.startswith("decode")), None)


def decoded_as(spec: str) -> tuple[int, str]:
    """Return the number of channels and the dtype of the images that a preprocessing string decodes; RGB by default."""
    found = next((step.arguments for step in parsed(spec) if step.op == "decode"), {})
    return found.get("channels", 3), found.get("dtype", "uint8")


def checking(spec: str) -> str:
    """Return the part of a preprocessing string that fails for a damaged example: `decoding`, and the ops on labels."""
    steps = parsed(spec)
    made = {step.arguments.get("outkey") for step in steps if step.op != "copy"} - {"image"}
    kept = [s.text for s in steps if s.op == "onehot" or (s.op == "copy" and s.arguments["inkey"] not in made)]
    return "|".join([decoding(spec), *kept])


def patch_sizes(spec: str) -> tuple[int, int] | None:
    """Return the arguments `patch` and `max_tokens` of the op `patches` in a preprocessing string; None without it."""
    return next(((s.arguments["patch"], s.arguments["max_tokens"]) for s in parsed(spec) if s.op == "patches"), None)


def after_resizing(spec: str) -> tuple[str, tuple[int, int, int] | None]:
    """Return the part of a preprocessing string that an image of the final size still needs, and that size.

    The part has no op on pixels but `patches` and the ranges of values: decoding, crops, resizing and random changes
    need libraries.

    Returns:
      The part, and height, width and channels; None instead of them if images do not all get the same size. Before
      `patches`, they are those of the largest square.
    """
    rest, size, channels = [], None, 3
    for step in parsed(spec):
        if not isinstance(step.function, Change) or step.arguments["outkey"] != "image" or "value_range" in step.op:
            rest.append(step.text)
            if step.op == "patches":
                size = (step.arguments["patch"] * math.isqrt(step.arguments["max_tokens"]),) * 2
            continue
        found, channels = step.arguments, step.arguments.get("channels", channels)
        if step.op == "pad" and size:
            size = (size[0] + 2 * found["border"], size[1] + 2 * found["border"])
        elif sides := found.get("size") or found.get("crop_size"):
            size = (sides, sides) if isinstance(sides, int) else (sides[0], sides[1])
        elif not step.function.keeps_size:
            size = None
    return "|".join(rest), size and (*size, channels)


class Preprocess:
    """A parsed preprocessing string: a function of an example and the example's random number generator."""

    def __init__(self, spec: str):
        """
        Args:
          spec: the preprocessing string; an empty string does not change examples.

        Raises:
          InputError: the string cannot be parsed, or an op or argument is invalid.
        """
        self.ops = [step.function for step in parsed(spec)]

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        """Apply the ops in order.

        Raises:
          InputError: the example is corrupt, or an op needs a key that the example does not have.
          ReadingError: an op failed for another reason, such as too little memory.
        """
        try:
            for op in self.ops:
                example = op(example, rng)
        except InputError:
            raise
        except KeyError as e:
            raise InputError(f"preprocessing needs {e}, the example has {', '.join(example)}") from None
        except Exception as e:
            raise ReadingError(f"preprocessing: {first_line_with_type(e)}") from e
        return example


def calls(spec: str) -> list[ast.Call]:
    """Return the ops of a preprocessing string as syntax trees; `name` is equivalent to `name()`.

    Raises:
      InputError: the string cannot be parsed. Ops and arguments are not checked.
    """
    return [_call(node) for node in _nodes(spec)]


def parsed(spec: str) -> list[Step]:
    """Return the ops of a preprocessing string with all their arguments."""
    nodes = _nodes(spec)
    steps = [_step(node) for node in nodes]
    wide = next((each.text for each in steps if each.op == "decode" and each.arguments["dtype"] != "uint8"), None)
    for step, node in zip(steps, nodes, strict=True):
        for name, position in RANGES.get(step.op, {}).items() if wide else ():
            if not _gives(_call(node), name, position):
                raise InputError(
                    f"preprocessing: {step.op} after {wide} needs {name}, whose default is that of 8 bits; "
                    "`dcvit check-data --statistics` prints a vgg_value_range to use"
                )
    names = [step.op for step in steps]
    if "patches" in names:
        _check_after_patches(steps[names.index("patches") + 1 :])
    return steps


def _gives(call: ast.Call, name: str, position: int) -> bool:
    """Return True if a call gives the argument `name`, which may also be the one at a position."""
    return len(call.args) > position or any(keyword.arg == name for keyword in call.keywords)


def _check_after_patches(steps: Sequence[Step]) -> None:
    """Raise InputError if an op after `patches` takes its result for an image, or drops the grid of the patches."""
    for step in steps:
        keys, in_and_out = step.arguments.get("keys", ()), [step.arguments.get(key) for key in ("inkey", "outkey")]
        changes = isinstance(step.function, Change) and "image" in in_and_out
        if step.op == "patches" or (changes and step.op not in RANGES):
            raise InputError(f"preprocessing: {step.op} cannot follow patches, only {' and '.join(RANGES)} can")
        if (step.op == "keep" and "image" in keys and "grid" not in keys) or (step.op == "drop" and "grid" in keys):
            raise InputError(f"preprocessing: {step.text} drops 'grid', without which patches are no image; keep it")


def _nodes(spec: str) -> list[ast.expr]:
    """Return the syntax trees of a string's ops. Raises InputError if the string cannot be parsed."""
    text = EMPTY.sub(lambda match: match[1] or "", spec).strip("| \t\n")
    if not text:
        return []
    try:
        nodes = _operands(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        nodes = []
    if not nodes:
        raise InputError(f"preprocessing: cannot parse {_shown(spec)}; expected op|op(args)|…")
    return nodes


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return the operands of `|` in a syntax tree such as that of "a|b|c", from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_operands(node.left), *_operands(node.right)]
    return [node]


def _shown(text: str) -> str:
    """Return a string for an error message: quoted, and cut off after MAX_SHOWN characters."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}…"


def _call(node: ast.expr) -> ast.Call:
    """Return an op as a call; `name` is equivalent to `name()`."""
    return node if isinstance(node, ast.Call) else ast.Call(node, [], [])


def _step(node: ast.expr) -> Step:
    """Return the op of `name` or `name(literals)`. Raises InputError if the name or an argument is invalid."""
    call, text = _call(node), ast.unparse(node)
    if not isinstance(call.func, ast.Name):
        raise InputError(f"preprocessing: {_shown(text)} is not of the form op or op(literal, …)")
    name = call.func.id
    if name not in ops.__all__:
        raise InputError(f"preprocessing: unknown op {name!r}; {nearest(name, ops.__all__)}")
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        if len(kwargs) < len(call.keywords):  # **{…} has no name
            raise ValueError
    except (ValueError, TypeError):
        raise InputError(f"preprocessing: the arguments of {_shown(text)} must be literals") from None
    factory, what = getattr(ops, name), f"preprocessing op {name!r}"
    signature = inspect.signature(factory)
    keys = {key: kwargs.pop(key) for key in KEYS if key in kwargs and key not in signature.parameters}
    check_arguments(factory, args, kwargs, what)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    op: Op = factory(*args, **kwargs)
    if isinstance(op, Change):
        inkey, outkey = _checked_keys(keys, what)
        op = dataclasses.replace(op, name=name, inkey=inkey, outkey=outkey)
        bound.arguments |= {"inkey": inkey, "outkey": outkey}
    elif keys:
        raise InputError(f"{what} has no option {next(iter(keys))!r}")
    return Step(text, name, bound.arguments, op)


def _checked_keys(keys: Mapping[str, object], what: str) -> tuple[str, str]:
    """Return `inkey` and `outkey`, both "image" by default, or `key`. Raises InputError if a key is no string."""
    checked: dict[str, str] = {}
    for name, key in keys.items():
        if not isinstance(key, str) or not key:
            raise InputError(f"{what}: {name}={key!r} should be a key of the example")
        checked[name] = key
    inkey, outkey = (checked.get("key", checked.get(name, "image")) for name in ("inkey", "outkey"))
    return inkey, outkey
