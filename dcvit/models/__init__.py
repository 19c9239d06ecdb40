"""Flax linen models. The `model_name` of a config is the name of a module here, such as "vit"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# Trees whose inner nodes are dicts. The type of a leaf is an array, which Python's types cannot say of such a tree.
Params: TypeAlias = Mapping[str, Any]  # parameters by module
Outputs: TypeAlias = dict[str, Any]  # named intermediates of a model
