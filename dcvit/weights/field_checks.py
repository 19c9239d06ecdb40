"""Checks of the fields of a description that a file of this project holds, before a link uses them.

Choices of strings are checked where the model is built.
"""

from __future__ import annotations

import math

from dcvit.errors import CheckpointError
from dcvit.weights.family import Description, defaults
from dcvit.weights.hf_config import LARGEST, LARGEST_DEPTH

MODELS = ("vit", "lm")
INTEGERS = ("width", "depth", "num_heads", "mlp_dim", "rank", "groups", "context", "num_key_heads", "mlp_groups",
            "window", "prefill_window", "registers", "end_of_text")  # fmt: skip
FROM_ZERO = ("registers", "end_of_text", "mlp_groups")
NUMBERS = ("rotary_fraction", "rotary_base", "norm_epsilon", "qk_norm_epsilon", "layer_scale")
FLAGS = ("projection", "gate", "static", "use_bias", "parallel", "tied", "pre_norm", "pool_norm")
NAMES = ("compose", "heads", "branches", "compose_gelu", "qk_norm", "posemb", "pool_type", "mlp", "position", "norm",
         "window_pattern", "qkv_bias")  # fmt: skip
OPTIONAL = ("mlp_dim", "num_key_heads", "mlp_groups", "prefill_window", "end_of_text", "layer_scale", "compose",
            "heads", "qk_norm", "qkv_bias", "rotary_scaling")  # fmt: skip


def check(description: Description) -> Description:
    """Return a description whose fields have values of their types, in their ranges.

    Raises:
      CheckpointError: the model is of no known name, or a field has another value; the message names it.
    """
    if description.model_name not in MODELS:
        raise CheckpointError(f"model_name={description.model_name!r:.100}; expected {' or '.join(MODELS)}")
    outputs = description.num_outputs
    if outputs is None and description.model_name == "lm":
        raise CheckpointError("a language model needs a vocabulary, found num_outputs=None")
    if outputs is not None and not _is_integer(outputs, 1, LARGEST):
        raise CheckpointError(f"num_outputs={outputs!r:.100}; expected an integer in 1 … {LARGEST}")
    for name, value in description.fields.items():
        expected = _expected(name, value)
        if expected and not (value is None and name in OPTIONAL):
            raise CheckpointError(f"the field {name}={value!r:.100}; expected {expected}")
    sizes = {**defaults(description.model_name, ("width", "num_heads", "num_key_heads")), **description.fields}
    width, heads, keys = sizes["width"], sizes["num_heads"], sizes["num_key_heads"]
    if width % heads or heads % (keys or heads):
        raise CheckpointError(f"{heads} heads should divide the width {width}, and {keys or heads} key heads the heads")
    return description


def _expected(name: str, value: object) -> str:
    """Return what a field should be, or "" if the value is; a field of another name is not checked."""
    if name in INTEGERS:
        least, largest = int(name not in FROM_ZERO), LARGEST_DEPTH if name == "depth" else LARGEST
        return "" if _is_integer(value, least, largest) else f"an integer in {least} … {largest}"
    if name == "rep_size":
        return "" if isinstance(value, bool) or _is_integer(value, 0, LARGEST) else "true, false or an integer"
    if name in NUMBERS:
        positive = isinstance(value, float) and 0 < value < math.inf
        return "" if positive or _is_integer(value, 1, LARGEST) else "a positive number"
    if name in FLAGS:
        return "" if isinstance(value, bool) else "true or false"
    if name in NAMES:
        return "" if isinstance(value, str) else "a string"
    if name == "rotary_scaling":
        numbers = isinstance(value, list | tuple) and all(not _expected("rotary_base", x) for x in value)
        return "" if numbers else "positive numbers"
    if name == "patch_size":
        pair = isinstance(value, list | tuple) and len(value) == 2 and all(_is_integer(x, 1, LARGEST) for x in value)
        return "" if pair else "a height and width"
    return ""


def _is_integer(value: object, least: int, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest
