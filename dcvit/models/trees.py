"""Trees of parameters: their shapes, hidden matrices, named intermediates, and stacks of layers.

A scan stacks the parameters of its layers along a new first axis.
"""

from __future__ import annotations

import functools
import re

import flax.linen as nn
import jax

from dcvit.dcmha.plan import Policy, Selection, selecting
from dcvit.errors import ConfigError, first_line, nearest
from dcvit.models import Params
from dcvit.parallel.trees import by_name

# The matrices of hidden layers, by a regex on the end of their name, with the numbers of their last axes that are
# inputs and outputs: all heads are one side of a matrix.
MATRICES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"(query|key|value)/kernel", (1, 2)),
    (r"MultiHeadDotProductAttention_0/out/kernel", (2, 1)),
    (r"MlpBlock_0/(in|gate|out|Dense_0|Dense_1)/kernel", (1, 1)),
    (r"pre_logits/kernel", (1, 1)),
)
# The stacks of a scan, and the beginning of the names of unrolled blocks. A stack has "layer_0", "layer_1", …, or is a
# single layer.
STACKS = {"encoderblock": "encoderblock_", "encodergroup": "encoderblock_", "group": "decoderblock_"}


def matrix_axes(name: str) -> tuple[int, int] | None:
    """Return how many of a hidden matrix's last axes are inputs, and how many outputs; None for other parameters.

    Axes before these are those of a stack of matrices.
    """
    return next((axes for end, axes in MATRICES if re.fullmatch(f"(.*/)?{end}", name)), None)


def intermediate(out: object, name: str, what: str = "intermediate") -> jax.Array:
    """Return the array at path `name` in a model's intermediates `out`, or raise ConfigError, which calls it `what`."""
    found: dict[str, jax.Array] = by_name(out)
    if name not in found:
        raise ConfigError(f"the model has no {what} {name!r}; {nearest(name, found)}")
    return found[name]


def param_shapes(model: nn.Module, example: jax.ShapeDtypeStruct, kernels: Policy = "off") -> Params:
    """Return the tree of parameter shapes for model inputs like `example`; of equal unrolled layers, one is traced.

    Args:
      model: the module.
      example: shape and dtype of its inputs.
      kernels: policy of `dcvit.dcmha.plan` in the trace, which does not change the shapes.

    Raises:
      ConfigError: the model's fields do not fit each other or the input.
    """
    found: Params = (_param_shapes if kernels == "off" else _param_shapes.__wrapped__)(model, example, kernels)
    return found


@functools.lru_cache(maxsize=8)  # a model is opened, loaded and checked with the same inputs
def _param_shapes(model: nn.Module, example: jax.ShapeDtypeStruct, kernels: Policy) -> Params:
    """Return `param_shapes`; with kernels, the result depends on the device and on `fused_only`."""
    are_equal = getattr(model, "compose_layers", ()) is None and getattr(model, "window_pattern", "none") == "none"
    depth = model.depth if are_equal and not model.scan else 0
    traced = model.clone(depth=1) if depth > 1 and kernels == "off" else model
    try:
        with selecting(Selection(kernels)):
            shapes: Params = jax.eval_shape(lambda x: traced.init(jax.random.key(0), x), example)["params"]
    except (ValueError, TypeError) as e:
        raise ConfigError(f"config.model: {first_line(e)}") from e
    if traced is model:
        return shapes
    transformer = dict(shapes["Transformer"])
    first = next(name for name in transformer if name.endswith("block_0"))
    layers = {f"{first[:-1]}{i}": jax.tree.map(lambda shape: shape, transformer[first]) for i in range(depth)}
    return {**shapes, "Transformer": dict(sorted({**transformer, **layers}.items()))}


def unstack_blocks(params: Params) -> Params:
    """Convert the parameters of a scanned model to those of an unrolled one; unrolled ones are returned unchanged.

    Repetition r of layer i of n in the body of the scan becomes block r·n + i.
    """
    transformer = dict(params["Transformer"])
    for stack, prefix in STACKS.items():
        if stack not in transformer:
            continue
        group = transformer.pop(stack)
        layers = [group[f"layer_{i}"] for i in range(len(group))] if "layer_0" in group else [group]
        for i, layer in enumerate(layers):
            for repeat in range(len(jax.tree.leaves(layer)[0])):
                block = jax.tree.map(lambda x, at=repeat: x[at], layer)
                transformer[f"{prefix}{repeat * len(layers) + i}"] = block
    return {**params, "Transformer": transformer}
