"""Preprocessing strings of big_vision, whose op `onehot` has other default keys."""

from __future__ import annotations

import ast
import inspect

from dcvit.config.big_vision.part import Part
from dcvit.errors import ConfigError, InputError

ON_LABELS = ("onehot", "keep", "drop")  # ops that an image file without label does not need


def translate_pp(part: Part, key: str) -> str:
    """Remove a preprocessing string of big_vision, and return it with the keys of each `onehot` given.

    A string without such an op is returned as it is, and a missing one as "".

    Raises:
      ConfigError: this is no string, or it cannot be parsed.
    """
    from input_pipeline.preprocess import ops  # in functions: configs of dcvit load without the libraries of images

    pp = part.values.pop(key, "")
    found = _calls(pp, f"{part.name}.{key}")
    changed = False
    for call in found:
        if _name(call) == "onehot":
            names = [*list(inspect.signature(ops.onehot).parameters)[: len(call.args)], *(k.arg for k in call.keywords)]
            missing = {"key": "labels", "key_result": None}.items()
            added = [ast.keyword(key, ast.Constant(value)) for key, value in missing if key not in names]
            call.keywords += added
            changed = changed or bool(added)
    if not changed:
        return str(pp)
    part.note(f"onehot in {key} -> onehot with big_vision's default keys")
    return "|".join(map(ast.unparse, found))


def without_labels(pp: str) -> str:
    """Return the ops that an image without label needs."""
    from input_pipeline.preprocess.builder import calls

    return "|".join(ast.unparse(call) for call in calls(pp) if _name(call) not in ON_LABELS)


def _calls(pp: object, what: str) -> list[ast.Call]:
    """Return the ops of a string. Raises ConfigError if it cannot be parsed."""
    from input_pipeline.preprocess.builder import calls

    if not isinstance(pp, str):
        raise ConfigError(f"{what}={pp!r} should be of type str")
    try:
        return calls(pp)
    except InputError as e:
        raise ConfigError(f"{what}: {e}") from None


def _name(call: ast.Call) -> str:
    """Return the name of an op, "" for what is no name."""
    return call.func.id if isinstance(call.func, ast.Name) else ""
