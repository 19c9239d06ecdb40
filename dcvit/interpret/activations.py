"""Named arrays of a forward pass, and hooks that replace them: capture, patching and ablation.

Training uses fused implementations, which never hold attention matrices. Here every attention layer of a model is
computed by `dcvit.dcmha.backends.xla.reference` instead, during one call; the model and its parameters are not changed.
The names, with the number of a layer in two digits:

    block00/resid_pre, resid_post    residual stream before and after the layer, B T M
    block00/q, k, v                  after QK-norm and rotary embedding, B T H D or B T K D
    block00/pre/q1, q2, qg           query-wise factors of pre-compose, see `dcvit.dcmha.compose.ComposeWeights`
    block00/pre/k1, k2, kg, static   key-wise factors, and the static projection
    block00/post/q1, ...             factors of post-compose
    block00/scores                   scaled products of queries and keys, B H T S
    block00/composed_scores          after pre-compose: the inputs of the softmax, B H T S
    block00/weights                  the result of the softmax, B H T S
    block00/composed_weights         after post-compose, B H T S
    block00/heads                    the sums of the values by these weights, B T H D
    block00/attention_out, mlp_out   outputs of attention and MLP, B T M

Scores of keys that a query may not attend to are 0. A model without pre-compose has the same `scores` and
`composed_scores`, and without post-compose the same `weights` and `composed_weights`.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.module import InterceptorContext
from jax.tree_util import Partial

from dcvit.dcmha.backends.xla.reference import (
    AttentionMatrices,
    composed_inside,
    composed_pairs,
    masked_softmax,
    visible,
)
from dcvit.dcmha.compose import ComposeWeights, compose
from dcvit.dcmha.inputs import Options
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.errors import nearest
from dcvit.models import Params
from dcvit.models.attention import Attended, Attention, LayerInputs, attention_inputs
from dcvit.models.decoder import DecoderBlock
from dcvit.models.encoder import Encoder1DBlock
from dcvit.models.layers import MlpBlock
from dcvit.models.lm import LM
from dcvit.models.trees import unstack_blocks
from dcvit.models.vit import ViT

Hook: TypeAlias = Callable[[Array], Array]
BLOCK = re.compile(r"(?:en|de)coderblock_(\d+)")


class Activations(NamedTuple):
    """The result of `run_with_cache`.

    Fields:
      output: the first result of the model: the logits, or the features of a ViT without a head.
      arrays: the arrays by name.
    """

    output: Float[Array, "..."]
    arrays: dict[str, Array]


def run_with_cache(
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "B height width channels"] | Int[Array, "B T"],
    hooks: Mapping[str, Hook] | None = None,
    names: Sequence[str] = ("*",),
) -> Activations:
    """Run a model and return its output and its named arrays; the module's docstring lists the names.

    Args:
      model: the model.
      params: its parameters, of unrolled or scanned layers.
      inputs: preprocessed images, or tokens.
      hooks: by name, a function from an array to the array that replaces it in the rest of the forward pass. A name may
        be a pattern, such as "block*/heads"; the first that matches counts. Returned arrays are those after the hooks.
        Each new function object, such as a lambda in a loop, compiles the model again. To avoid this, pass
        `jax.tree_util.Partial(function, x)`, which calls `function(x, array)` and may have a new number or array `x`.
      names: patterns of the names of the arrays to return. Arrays that are not asked for cost no memory.

    Raises:
      ValueError: no array matches a name, a hook returns another shape, or the model has `heads` or `compose_layers`.
    """
    hooks = hooks or {}
    functions = tuple(hook if isinstance(hook, Partial) else Partial(hook) for hook in hooks.values())
    return _run(model, params, inputs, tuple(hooks), functions, tuple(names))


@functools.partial(jax.jit, static_argnums=(0, 3, 5))
def _run(
    model: ViT | LM,
    params: Params,
    inputs: Array,
    hooked: tuple[str, ...],
    hooks: tuple[Partial, ...],
    names: tuple[str, ...],
) -> Activations:
    layer_numbers(model, None)  # refuses compositions in some layers
    tap = _Tap(dict(zip(hooked, hooks, strict=True)), names)
    with nn.intercept_methods(functools.partial(_intercept, tap)):
        unrolled = model.clone(scan=False, remat="none")
        found: tuple[Array, object] = unrolled.apply({"params": unstack_blocks(params)}, inputs)
    tap.check()
    return Activations(found[0], tap.arrays)


class _Tap:
    """Applies hooks to the named arrays of a forward pass, and stores the requested ones."""

    def __init__(self, hooks: Mapping[str, Hook], names: Sequence[str]):
        self.hooks, self.names = hooks, names
        self.arrays: dict[str, Array] = {}
        self.seen: list[str] = []

    def __call__(self, name: str, x: Array) -> Array:
        """Apply the hook of a name to an array, store the result if it is requested, and return it."""
        self.seen.append(name)
        pattern = next((pattern for pattern in self.hooks if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is not None:
            replaced = jnp.asarray(self.hooks[pattern](x))
            if replaced.shape != x.shape:
                raise ValueError(f"the hook of {name} returns shape {replaced.shape}, expected {x.shape}")
            x = replaced.astype(x.dtype)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names):
            self.arrays[name] = x
        return x

    def check(self) -> None:
        """Raise ValueError if a pattern matched no array."""
        for pattern in (*self.hooks, *self.names):
            if not fnmatch.filter(self.seen, pattern):
                raise ValueError(f"the model has no array {pattern!r}; {nearest(pattern, self.seen)}")


def _intercept(
    tap: _Tap, method: Callable[..., object], args: tuple, kwargs: dict, context: InterceptorContext
) -> object:
    """Return a flax method's result; `tap` gets its named arrays, and attention is computed with all its matrices."""
    module, name = context.module, context.method_name
    numbers = [found[1] for part in module.path or () if (found := BLOCK.fullmatch(part))]
    if not numbers:
        return method(*args, **kwargs)
    block = f"block{int(numbers[0]):02d}"
    if isinstance(module, Attention) and name == "attend":
        heads = _attend(module, args[0], lambda array, x: tap(f"{block}/{array}", x))
        return Attended(heads, None, None)  # type: ignore[arg-type]  # only the output is read
    if name != "__call__":
        return method(*args, **kwargs)
    if isinstance(module, Encoder1DBlock | DecoderBlock):
        x, *rest = args
        y, out = cast("tuple[Array, object]", method(tap(f"{block}/resid_pre", x), *rest, **kwargs))
        return tap(f"{block}/resid_post", y), out
    result = method(*args, **kwargs)
    if isinstance(result, Array) and isinstance(module, Attention | MlpBlock):
        return tap(f"{block}/{'mlp' if isinstance(module, MlpBlock) else 'attention'}_out", result)
    return result


def _attend(module: Attention, inputs: LayerInputs, tap: Callable[[str, Array], Array]) -> Array:
    """Return the output of self-attention, as `Attention.attend`; `tap` gets each named array and may replace it."""
    x = attention_inputs(module, inputs)
    q, k, v = tap("q", x.q), tap("k", x.k), tap("v", x.v)
    pre, post = (_tapped(where, w, tap) for where, w in (("pre", x.pre), ("post", x.post)))
    options = Options(module.causal, module.window, compose_window=module.compose_window)
    mask = visible(q.shape[1], k.shape[1], options, x.mask, x.segments)
    pairs = composed_pairs(q.shape[1], k.shape[1], options)
    in_groups = functools.partial(compose, groups=module.groups)
    wide = statistics_dtype(q.dtype)
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    a = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide) * jnp.asarray(q.shape[-1] ** -0.5, wide)
    a = tap("scores", a if mask is None else jnp.where(mask, a, 0))
    a = tap("composed_scores", composed_inside(in_groups, a, pre, pairs))
    a = tap("weights", masked_softmax(a, mask))
    a = tap("composed_weights", composed_inside(in_groups, a, post, pairs))
    heads = jnp.einsum("bhts,bshd->bthd", a.astype(v.dtype), v, preferred_element_type=a.dtype).astype(q.dtype)
    return module.output(tap("heads", heads), inputs.q.shape[-1])


def _tapped(where: str, weights: ComposeWeights | None, tap: Callable[[str, Array], Array]) -> ComposeWeights | None:
    factors = {} if weights is None else weights._asdict()
    found = {name: tap(f"{where}/{name}", w) for name, w in factors.items() if w is not None}
    return ComposeWeights(**found) if found else None


def compose_weights_of(arrays: Mapping[str, Array], layer: int, where: str) -> ComposeWeights | None:
    """Return the weights of pre- or post-compose of a layer; None if the layer does not have that composition.

    Args:
      arrays: returned by `run_with_cache`.
      layer: the index of the layer.
      where: "pre" or "post".
    """
    prefix = f"block{layer:02d}/{where}/"
    found = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    return ComposeWeights(**found) if found else None


def attention_maps(
    model: ViT | LM,
    params: Params,
    inputs: Float[Array, "B height width channels"] | Int[Array, "B T"],
    layers: Sequence[int | np.integer] | None = None,
) -> dict[int, AttentionMatrices]:
    """Return the attention matrices of the given layers, by default of all, in float32.

    The scores of a key that the query may not attend to are 0. The result's keys are layer indices from 0 in ascending
    order: `layers=[-1]` of 12 layers gives the key 11.

    Args:
      model: the model.
      params: its parameters.
      inputs: preprocessed images, or tokens.
      layers: indices of layers; negative ones count from the end.

    Raises:
      ValueError: an index is not one of a layer, or only some layers compose.
    """
    chosen = layer_numbers(model, layers)
    names = {n: [f"block{n:02d}/{field}" for field in AttentionMatrices._fields] for n in chosen}
    found = run_with_cache(model, params, inputs, names=[name for some in names.values() for name in some]).arrays
    return {n: AttentionMatrices(*(found[name] for name in some)) for n, some in names.items()}


def layer_numbers(model: ViT | LM, layers: Sequence[int | np.integer] | None) -> list[int]:
    """Return the given layer indices, of which negative ones count from the end, sorted and from 0; all for None.

    Raises:
      ValueError: an index is not one of a layer, or only some layers compose.
    """
    if model.compose_layers is not None:
        raise ValueError(f"compose_layers={tuple(model.compose_layers)}: expected compositions in all layers")
    chosen = range(model.depth) if layers is None else layers
    wrong = [layer for layer in chosen if not -model.depth <= layer < model.depth]
    if wrong:
        raise ValueError(f"there is no layer {wrong[0]}: the model has {model.depth} layers")
    return sorted({int(layer) % model.depth for layer in chosen})
