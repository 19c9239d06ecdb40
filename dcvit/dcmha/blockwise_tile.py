"""Compose and its derivatives on one block of scores (H t s): t queries, s keys, all heads.

The sums over heads of Eqn 7 are written out, one term for each head, so that they become a few loops over scores that
stay in the cache; einsums over the head axis would read and write all scores for each branch. Letters as in
`dcvit.dcmha.compose`; the weights of a block have the heads in front of its length: `arrange`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Bool, Float

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FOLDS = 4  # runs of queries that are added to each other before a sum over queries


class Hidden(NamedTuple):
    """What travels between the heads of a group, query-wise and key-wise; None without that branch."""

    q: Float[Array, "G R t s"] | None
    k: Float[Array, "G R t s"] | None


def stage(f: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`f` as a function of the compiled program that is not inlined: its results are in memory when it returns.

    XLA's CPU compiler fuses a cheap loop into each of the loops that read it, and would compute the hidden scores
    again for every head. Its optimization barriers are gone by then; a call is not.
    """
    compiled = jax.jit(f, static_argnames="groups" if "groups" in inspect.signature(f).parameters else ())

    @functools.wraps(f)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        tagged: Result = set_xla_metadata(compiled(*args, **kwargs), inlineable=False)
        return tagged

    return call


def arrange(w: ComposeWeights | None, batch: int, dtype: Any) -> ComposeWeights | None:
    """The weights with B in front and their length behind: (B T R H) to (B R H T), (B T H) to (B H T)."""
    if w is None:
        return None
    moved = [None if x is None else jnp.moveaxis(x.astype(dtype), 1, -1) for x in w[:-1]]
    static = None if w.static is None else jnp.broadcast_to(w.static.astype(dtype), (batch, *w.static.shape))
    return ComposeWeights(*moved, *[static])


def transposed(w: ComposeWeights | None) -> ComposeWeights | None:
    """The weights of the transposed map, which takes a gradient of a compose's output to one of its input."""
    if w is None:
        return None
    static = None if w.static is None else jnp.swapaxes(w.static, 1, 2)
    return ComposeWeights(q1=w.q2, q2=w.q1, qg=w.qg, k1=w.k2, k2=w.k1, kg=w.kg, static=static)


@stage
def hidden(a: Float[Array, "H t s"], w: ComposeWeights | None, groups: int) -> Hidden:
    """A·w_q1 and A·w_k1 of Eqn 7: the heads of each group summed into R."""
    grouped = _split(a, groups)

    def down(weights: Array | None, axis: int) -> Array | None:
        if weights is None:
            return None
        spread = _spread(weights, groups, axis)  # R G J t 1 or R G J 1 s
        by_rank = jnp.swapaxes(spread, 0, 1)
        return _sum([grouped[:, None, j] * by_rank[:, :, j] for j in range(grouped.shape[1])])

    return Hidden(None, None) if w is None else Hidden(down(w.q1, 0), down(w.k1, 1))


def _mix(a: Float[Array, "H t s"], between: Hidden, w: ComposeWeights | None, groups: int) -> Float[Array, "H t s"]:
    if w is None:
        return a
    grouped = _split(a, groups)
    gates = [_spread(x, groups, axis) for x, axis in ((w.qg, 0), (w.kg, 1)) if x is not None]
    terms = [grouped * _sum([1, *gates]) if gates else grouped]
    for scores, up, axis in ((between.q, w.q2, 0), (between.k, w.k2, 1)):
        if scores is not None and up is not None:
            spread = _spread(up, groups, axis)
            terms += [scores[:, r, None] * spread[r] for r in range(up.shape[0])]
    if w.static is not None:
        static = w.static[..., None, None]  # G J J 1 1
        terms += [grouped[:, n, None] * static[:, n] for n in range(grouped.shape[1])]
    return _sum(terms).reshape(a.shape)


@stage
def mix(
    a: Float[Array, "H t s"], between: Hidden, w: ComposeWeights | None, seen: Bool[Array, "#t #s"] | None, groups: int
) -> Float[Array, "H t s"]:
    """Eqn 7, given `hidden` of the same scores and weights; minus infinity where a key is not `seen`."""
    return _see(_mix(a, between, w, groups), seen)


@stage
def softmax(scores: Float[Array, "H t s"]) -> tuple[Float[Array, "H t s"], Float[Array, "H t"]]:
    """The softmax of each row, and log Σ exp of each row and head; zeros for a row that sees nothing."""
    top = jnp.max(scores, -1)
    top = jnp.where(top == -jnp.inf, 0, top)
    powers = _exponentials(scores, top)
    sums = _over_keys(powers)
    sums = jnp.where(sums == 0, 1, sums)
    return powers * (1 / sums)[..., None], top + jnp.log(sums)


@stage
def _exponentials(scores: Float[Array, "H t s"], top: Float[Array, "H t"]) -> Float[Array, "H t s"]:
    return jnp.exp(scores - top[..., None])


@stage
def softmax_again(
    a: Float[Array, "H t s"], between: Hidden, w: ComposeWeights | None, seen: Array | None, log_sum: Array, groups: int
) -> Float[Array, "H t s"]:
    """The softmax of `mix`, given the log Σ exp of its rows: one loop."""
    return jnp.exp(_see(_mix(a, between, w, groups), seen) - log_sum[..., None])


def softmax_gradient(
    weights: Float[Array, "H t s"], g: Float[Array, "H t s"], between: Hidden, w: ComposeWeights | None, groups: int
) -> Float[Array, "H t s"]:
    """dL = P∘(dP - Σ_s P∘dP), where dP is `mix` of g: from a gradient after the post-compose to one before softmax."""
    return _centred(weights, _products(weights, g, between, w, groups=groups))


@stage
def _products(
    weights: Float[Array, "H t s"], g: Float[Array, "H t s"], between: Hidden, w: ComposeWeights | None, groups: int
) -> Float[Array, "H t s"]:
    return weights * _mix(g, between, w, groups)


@stage
def _centred(weights: Float[Array, "H t s"], products: Float[Array, "H t s"]) -> Float[Array, "H t s"]:
    return products - weights * _over_keys(products)[..., None]


@stage
def weight_gradients(
    a: Float[Array, "H t s"], g: Float[Array, "H t s"], inner: Hidden, outer: Hidden, w: ComposeWeights, groups: int
) -> ComposeWeights:
    """Gradients of a compose's weights from its input `a` and the gradient `g` of its output, arranged as `w` is.

    Args:
      inner: `hidden` of `a` by `w`.
      outer: `hidden` of `g` by `transposed(w)`.
    """
    a_grouped, g_grouped = _split(a, groups), _split(g, groups)

    def of(sums: Callable[..., list[Array]], down: Array | None, gate: Array | None, one: Any, two: Any) -> list[Any]:
        ranks = range(0 if down is None else down.shape[0])
        pairs = [(a_grouped, two[:, r, None]) for r in ranks] + [(g_grouped, one[:, r, None]) for r in ranks]
        pairs += [] if gate is None else [(a_grouped, g_grouped)]
        total = [x.reshape(a.shape[0], -1) for x in sums(pairs)] if pairs else []
        both = (
            [None, None]
            if down is None
            else [jnp.stack(total[: len(ranks)]), jnp.stack(total[len(ranks) : 2 * len(ranks)])]
        )
        return [*both, None if gate is None else total[-1]]

    static = None
    if w.static is not None:
        static = jnp.einsum("gnts,gmts->gnm", a_grouped, g_grouped, precision=jax.lax.Precision.HIGHEST)
    query_wise = of(_sums_over_keys, w.q1, w.qg, inner.q, outer.q)
    key_wise = of(_sums_over_queries, w.k1, w.kg, inner.k, outer.k)
    return ComposeWeights(*query_wise, *key_wise, *[static])


def _sums_over_keys(pairs: list[tuple[Array, Array]]) -> list[Float[Array, "G J t"]]:
    """Sums of products along rows. XLA's loop is scalar, but several sums in one loop do not wait for each other."""
    products = tuple(x * y for x, y in pairs)
    zeros = (jnp.zeros((), products[0].dtype),) * len(products)
    axis = (products[0].ndim - 1,)
    return list(jax.lax.reduce(products, zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)), axis))


def _sums_over_queries(pairs: list[tuple[Array, Array]]) -> list[Float[Array, "G J s"]]:
    """Sums of products along columns: runs of rows are multiplied and added in one loop, then a product with ones."""

    def fold(x: Array, y: Array) -> Array:
        rows = x.shape[-2]
        if rows % FOLDS:
            return x * y
        parts = [slice(i * rows // FOLDS, (i + 1) * rows // FOLDS) for i in range(FOLDS)]
        return _sum([x[..., i, :] * y[..., i, :] for i in parts])

    folded = [fold(x, y) for x, y in pairs]
    return [_ones_dot(x) for x in folded]


def _ones_dot(x: Array) -> Array:
    n = x.ndim - 2
    ones = jnp.ones(x.shape[:-1], x.dtype)
    batch = tuple(range(n))
    return jax.lax.dot_general(ones, x, (((n,), (n,)), (batch, batch)), precision=jax.lax.Precision.HIGHEST)


def _over_keys(x: Float[Array, "H t s"]) -> Float[Array, "H t"]:
    """A sum as a product with ones, which is vectorised; XLA's own along rows is not."""
    return jnp.einsum("hts,s->ht", x, jnp.ones(x.shape[-1], x.dtype), precision=jax.lax.Precision.HIGHEST)


def _see(scores: Float[Array, "H t s"], seen: Array | None) -> Float[Array, "H t s"]:
    return scores if seen is None else jnp.where(seen[None], scores, -jnp.inf)


def _split(x: Array, groups: int) -> Array:
    """(H …) to (G J …)."""
    return x.reshape(groups, -1, *x.shape[1:])


def _spread(x: Array, groups: int, axis: int) -> Array:
    """(… H n) to (… G J n 1) for queries, axis 0, or (… G J 1 n) for keys, axis 1."""
    x = x.reshape(*x.shape[:-2], groups, -1, x.shape[-1])
    return x[..., :, None] if axis == 0 else x[..., None, :]


def _sum(terms: list[Any]) -> Any:
    return functools.reduce(jnp.add, terms)
