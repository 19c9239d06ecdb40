"""Compose and its derivatives on one block of scores (H t s): t queries, s keys, all heads.

The sums over heads of Eqn 7 are written out with one term for each head. XLA compiles them to a few loops over scores
that stay in the processor's cache; einsums over the head axis would read and write all scores for each branch. The
letters are those of `dcvit.dcmha.compose`, and J = H/G. In the weights of a block, the heads precede the length
(`arrange`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import DTypeLike

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.numerics import total
from dcvit.dcmha.shapes import Array, Bool, Float

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FOLDS = 4  # runs of queries that are added to each other before a sum over queries
Pair: TypeAlias = tuple[Array, Array]


class Hidden(NamedTuple):
    """Hidden planes of a compose, A·w_q1 and A·w_k1 of Eqn 7; None for an absent branch."""

    q: Float[Array, "G R t s"] | None
    k: Float[Array, "G R t s"] | None


def no_inline(f: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `f` as a function that XLA does not inline in the compiled program, so that its results are stored.

    XLA's CPU compiler fuses a cheap loop into each loop that reads its result, and would compute the hidden planes
    again for every head. It removes optimization barriers before the fusion, but it keeps calls.
    """
    compiled = jax.jit(f, static_argnames="groups" if "groups" in inspect.signature(f).parameters else ())

    @functools.wraps(f)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        tagged: Result = set_xla_metadata(compiled(*args, **kwargs), inlineable=False)
        return tagged

    return call


def arrange(w: ComposeWeights | None, batch: int, dtype: DTypeLike) -> ComposeWeights | None:
    """Return the weights with their length as the last axis, (B R H T), and the static weights with an axis B."""
    if w is None:
        return None
    moved = [None if x is None else jnp.moveaxis(x.astype(dtype), 1, -1) for x in w[:-1]]
    static = None if w.static is None else jnp.broadcast_to(w.static.astype(dtype), (batch, *w.static.shape))
    return ComposeWeights(*moved, *[static])


def transposed(w: ComposeWeights | None) -> ComposeWeights | None:
    """Return the weights of the transposed compose, which maps a gradient of the output to one of the input."""
    if w is None:
        return None
    static = None if w.static is None else jnp.swapaxes(w.static, 1, 2)
    return ComposeWeights(q1=w.q2, q2=w.q1, qg=w.qg, k1=w.k2, k2=w.k1, kg=w.kg, static=static)


@no_inline
def hidden(a: Float[Array, "H t s"], w: ComposeWeights | None, groups: int) -> Hidden:
    """Return the hidden planes A·w_q1 and A·w_k1 of Eqn 7: R weighted sums over the heads of each group."""
    grouped = _split(a, groups)

    def down(weights: Array | None, axis: int) -> Array | None:
        if weights is None:
            return None
        by_rank = jnp.swapaxes(_expand(weights, groups, axis), 0, 1)  # G R J t 1 or G R J 1 s
        return total([grouped[:, None, j] * by_rank[:, :, j] for j in range(grouped.shape[1])])

    return Hidden(None, None) if w is None else Hidden(down(w.q1, 0), down(w.k1, 1))


def _compose(a: Float[Array, "H t s"], planes: Hidden, w: ComposeWeights | None, groups: int) -> Float[Array, "H t s"]:
    """Return A' of Eqn 7 for the scores or weights `a` with the hidden planes `planes`."""
    if w is None:
        return a
    grouped = _split(a, groups)
    gates = [_expand(x, groups, axis) for x, axis in ((w.qg, 0), (w.kg, 1)) if x is not None]
    terms = [grouped * total([1, *gates]) if gates else grouped]
    for plane, up, axis in ((planes.q, w.q2, 0), (planes.k, w.k2, 1)):
        if plane is not None and up is not None:
            expanded = _expand(up, groups, axis)
            terms += [plane[:, r, None] * expanded[r] for r in range(up.shape[0])]
    if w.static is not None:
        static = w.static[..., None, None]  # G J J 1 1
        terms += [grouped[:, n, None] * static[:, n] for n in range(grouped.shape[1])]
    return total(terms).reshape(a.shape)


@no_inline
def compose_planes(
    a: Float[Array, "H t s"], planes: Hidden, w: ComposeWeights | None, mask: Bool[Array, "#t #s"] | None, groups: int
) -> Float[Array, "H t s"]:
    """Return A' of Eqn 7 from the planes that `hidden` returns for `a` and `w`; masked scores are minus infinity."""
    return _apply_mask(_compose(a, planes, w, groups), mask)


@no_inline
def softmax(scores: Float[Array, "H t s"]) -> Float[Array, "H t s"]:
    """Return the softmax over the keys of each query; it is zero for a query whose keys are all masked."""
    top = jax.lax.stop_gradient(jnp.max(scores, -1))  # it cancels
    top = jnp.where(top == -jnp.inf, 0, top)
    powers = _exponentials(scores, top)
    sums = _over_keys(powers)
    sums = jnp.where(sums == 0, 1, sums)
    return powers * (1 / sums)[..., None]


@no_inline
def _exponentials(scores: Float[Array, "H t s"], top: Float[Array, "H t"]) -> Float[Array, "H t s"]:
    return jnp.exp(scores - top[..., None])


def softmax_gradient(
    weights: Float[Array, "H t s"], g: Float[Array, "H t s"], planes: Hidden, w: ComposeWeights | None, groups: int
) -> Float[Array, "H t s"]:
    """Return the gradient of the softmax's input, dL = P∘(dP - Σ_s P∘dP), for P = `weights`.

    dP = compose_planes(g, planes, w), where `g` is the gradient of the post-compose's output, `w` are the weights of
    the transposed post-compose and `planes` its hidden planes.
    """
    return _center(weights, _products(weights, g, planes, w, groups=groups))


@no_inline
def _products(
    weights: Float[Array, "H t s"], g: Float[Array, "H t s"], planes: Hidden, w: ComposeWeights | None, groups: int
) -> Float[Array, "H t s"]:
    return weights * _compose(g, planes, w, groups)


@no_inline
def _center(weights: Float[Array, "H t s"], products: Float[Array, "H t s"]) -> Float[Array, "H t s"]:
    return products - weights * _over_keys(products)[..., None]


@no_inline
def weight_gradients(
    a: Float[Array, "H t s"], g: Float[Array, "H t s"], inner: Hidden, outer: Hidden, w: ComposeWeights, groups: int
) -> ComposeWeights:
    """Return the gradients of a compose's weights in the layout of `w`.

    Args:
      a: input of the compose.
      g: gradient of its output.
      inner: `hidden` of `a` with `w`.
      outer: `hidden` of `g` with `transposed(w)`.
      w: weights of the compose in the layout of `arrange`, without the axis B.
      groups: number of groups of heads.
    """
    a_grouped, g_grouped = _split(a, groups), _split(g, groups)

    def side(
        sums: Callable[[Sequence[Pair]], list[Array]], down: Array | None, gate: Array | None,
        one: Array | None, two: Array | None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """Return the gradients of down projection, up projection and gate, all query-wise or all key-wise."""
        pairs: list[Pair] = []
        rank = 0
        if down is not None and one is not None and two is not None:
            rank = down.shape[0]
            pairs += [(a_grouped, two[:, r, None]) for r in range(rank)]
            pairs += [(g_grouped, one[:, r, None]) for r in range(rank)]
        if gate is not None:
            pairs.append((a_grouped, g_grouped))
        summed = [x.reshape(a.shape[0], -1) for x in sums(pairs)] if pairs else []
        d_gate = None if gate is None else summed[-1]
        if down is None:
            return None, None, d_gate
        return jnp.stack(summed[:rank]), jnp.stack(summed[rank : 2 * rank]), d_gate

    static = None
    if w.static is not None:
        static = jnp.einsum("gnts,gmts->gnm", a_grouped, g_grouped, precision=jax.lax.Precision.HIGHEST)
    query_wise = side(_sums_over_keys, w.q1, w.qg, inner.q, outer.q)
    key_wise = side(_sums_over_queries, w.k1, w.kg, inner.k, outer.k)
    return ComposeWeights(*query_wise, *key_wise, static)


def _sums_over_keys(pairs: Sequence[Pair]) -> list[Float[Array, "G J t"]]:
    """Return Σ_s x·y for each pair (x, y). XLA's loop is scalar; several sums in one loop hide its latency."""
    products = tuple(x * y for x, y in pairs)
    zeros = (jnp.zeros((), products[0].dtype),) * len(products)
    axis = (products[0].ndim - 1,)
    return list(jax.lax.reduce(products, zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)), axis))


def _sums_over_queries(pairs: Sequence[Pair]) -> list[Float[Array, "G J s"]]:
    """Return Σ_t x·y for each pair (x, y): a loop adds `FOLDS` runs of rows, a product with ones sums the result."""

    def fold(x: Array, y: Array) -> Array:
        rows = x.shape[-2]
        if rows % FOLDS:
            return x * y
        parts = [slice(i * rows // FOLDS, (i + 1) * rows // FOLDS) for i in range(FOLDS)]
        return total([x[..., i, :] * y[..., i, :] for i in parts])

    folded = [fold(x, y) for x, y in pairs]
    return [_ones_dot(x) for x in folded]


def _ones_dot(x: Array) -> Array:
    """Return the sum over the second last axis, computed as a product with ones."""
    n = x.ndim - 2
    ones = jnp.ones(x.shape[:-1], x.dtype)
    batch = tuple(range(n))
    return jax.lax.dot_general(ones, x, (((n,), (n,)), (batch, batch)), precision=jax.lax.Precision.HIGHEST)


def _over_keys(x: Float[Array, "H t s"]) -> Float[Array, "H t"]:
    """Return the sum over keys, as a product with ones, which XLA vectorizes on CPUs, unlike a reduction along rows."""
    return jnp.einsum("hts,s->ht", x, jnp.ones(x.shape[-1], x.dtype), precision=jax.lax.Precision.HIGHEST)


def _apply_mask(scores: Float[Array, "H t s"], mask: Array | None) -> Float[Array, "H t s"]:
    return scores if mask is None else jnp.where(mask[None], scores, -jnp.inf)


def _split(x: Array, groups: int) -> Array:
    """Reshape (H …) to (G J …), for G groups of J heads."""
    return x.reshape(groups, -1, *x.shape[1:])


def _expand(x: Array, groups: int, axis: int) -> Array:
    """Reshape weights (… H n) to (… G J n 1) for n queries (axis 0), or to (… G J 1 n) for n keys (axis 1)."""
    x = x.reshape(*x.shape[:-2], groups, -1, x.shape[-1])
    return x[..., :, None] if axis == 0 else x[..., None, :]
