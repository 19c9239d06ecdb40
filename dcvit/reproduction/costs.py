"""Costs of models that need no training: operations, parameters and cache, by formula and counted."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcvit.models import flops, lm


def row_of(length: int) -> jax.ShapeDtypeStruct:
    """Return the shape of one row of tokens."""
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def parameters(net: nn.Module) -> int:
    """Return the number of parameters of a language model."""
    shapes = jax.eval_shape(net.init, jax.random.key(0), row_of(2))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def cache_per_token(net: lm.LM, context: int) -> float:
    """Return the numbers in the cache of a full context, over all layers, divided by its tokens."""
    cache = jax.eval_shape(functools.partial(lm.init_cache, net, 1, context))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(cache["layers"])) / context


def training_operations(net: lm.LM, context: int) -> int:
    """Return the operations of a training step for one row; masked query-key pairs do not count."""
    count = flops.training_flops(net, row_of(context))
    assert count is not None
    return count


def forward_operations(net: lm.LM, context: int) -> int:
    """Return the operations of a forward pass for one row; masked query-key pairs do not count."""
    return flops.lm_flops(net, context)


def program_operations(net: lm.LM, context: int) -> float:
    """Return the operations of a forward pass that XLA counts in the program, before it is optimized.

    With the implementation "reference" they include masked query-key pairs and element-wise operations.
    """
    shapes = jax.eval_shape(net.init, jax.random.key(0), row_of(2))
    lowered = jax.jit(lambda variables, tokens: net.apply(variables, tokens)[0]).lower(shapes, row_of(context))
    counted = lowered.cost_analysis()
    assert counted is not None
    return float(counted["flops"])
