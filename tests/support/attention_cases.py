"""Random arguments for implementations of attention, their outputs with all gradients, and errors between outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from dcvit.dcmha import ComposeWeights
from dcvit.dcmha.inputs import Call, Composition, Inputs, Options
from dcvit.dcmha.segments import make_segments

SAME = "as the pre-compose"


def to_jax(fields, dtype):
    """ComposeWeights of JAX arrays from numpy fields; None stays None."""
    if fields is None:
        return None
    return ComposeWeights(**{name: None if x is None else jnp.asarray(x, dtype) for name, x in fields.items()})


def random_case(
    queries, keys=None, heads=2, key_heads=None, head_dim=8, batch=1, branches="qkpg", post=SAME, groups=1, rank=2,
    mask=None, segments=None, dtype=jnp.float32, **options,
):  # fmt: skip
    """Arguments (q, k, v, pre, post) of an implementation in `dtype`, and all of its options.

    `branches` are those of `oracle.random_weights`, None for plain attention; `mask` is the shape of a random mask;
    `segments` is the number of documents of a row.
    """
    keys = keys or queries
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, queries, heads, head_dim))
    k, v = rng.normal(size=(2, batch, keys, key_heads or heads, head_dim))
    sizes = dict(batch=batch, queries=queries, keys=keys, heads=heads, rank=rank, groups=groups)
    names = (branches, branches if post == SAME else post)
    weights = [to_jax(b and oracle.random_weights(rng, b, **sizes), dtype) for b in names]
    options = {"causal": False, "window": None, "groups": groups, "scale": 0.3, **options}
    options["mask"] = None if mask is None else jnp.asarray(rng.random(mask) < 0.6)
    if segments is not None:
        options["segments"] = random_segments(batch, queries, keys, segments)
    return (*(jnp.asarray(x, dtype) for x in (q, k, v)), *weights), options


def random_segments(batch, queries, keys, documents):
    """Ids (B T) and (B S) of documents that begin at the same fractions of queries and keys.

    The first id occurs again at the end, and no key has that of query 3.
    """
    rng = np.random.default_rng(2)
    starts = np.sort(rng.random((batch, documents)))
    both = []
    for length in (queries, keys):
        at = (np.arange(length) + 0.5) / length
        both.append((at > starts[..., None]).sum(1).astype(np.int32) % documents)
    both[0][:, 3:4] = -5
    return tuple(map(jnp.asarray, both))


def call_of(inputs, options=Options()):  # noqa: B008 - immutable
    """The call of attention with these arrays and options."""
    return Call(inputs, options, Composition.of_weights(inputs.pre, inputs.post, options.groups))


@functools.cache
def on_arrays(implementation):
    """The function of arrays and options (q, k, v, pre, post, causal=…) that calls an implementation."""

    def attention(
        q, k, v, pre=None, post=None, *, causal=False, window=None, mask=None, segments=None, groups=1, scale=1.0,
        first_query=0, compose_window=None, **more,
    ):  # fmt: skip
        inputs = Inputs(q, k, v, pre, post, mask, make_segments(segments))
        options = Options(causal, window, groups, scale, first_query, compose_window)
        return implementation(call_of(inputs, options), **more)

    return attention


def output_and_gradients(attention, args, options):
    """The output and the gradients of all arguments, for the same cotangent in every call."""
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=args[0].shape), jnp.float32)

    def both(*args):
        out, vjp = jax.vjp(lambda *a: attention(*a, **options), *args)
        return out, vjp(cotangent.astype(out.dtype))

    return jax.jit(both)(*args)


def queries_with_nan(implementation, place, tokens, at, window, **case):
    """Queries whose whole outputs are NaN where one token `at` has NaN in a local layer; all other outputs are finite.

    `place` is "q", "k", or a field of the pre-compose.
    """
    (q, k, v, pre, post), options = random_case(tokens, window=window, **case)
    arrays = {"q": q, "k": k} if place in ("q", "k") else pre._asdict()
    arrays[place] = arrays[place].at[0, at].set(jnp.nan)
    args = (arrays["q"], arrays["k"], v, pre, post) if "q" in arrays else (q, k, v, pre._replace(**arrays), post)
    out = np.asarray(jax.jit(lambda args: on_arrays(implementation)(*args, **options))(args), np.float32)
    found = np.isnan(out).all((0, 2, 3))
    assert np.isfinite(out[:, ~found]).all()
    return np.flatnonzero(found).tolist()


def relative_errors(found, expected):
    """The largest error of each array relative to its largest value, by name.

    Some gradients are zero in exact arithmetic: errors are relative to at least 2 % of the largest value of all arrays.
    """
    least = 0.02 * max(np.abs(np.float32(y)).max() for y in jax.tree.leaves(expected))
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree_util.tree_leaves_with_path(expected), strict=True)
    errors = {}
    for (path, x), (_, y) in pairs:
        x, y = np.float32(x), np.float32(y)
        errors[jax.tree_util.keystr(path)] = float(np.abs(x - y).max() / max(np.abs(y).max(), least))
    return errors


def worst(errors):
    """The largest of `relative_errors`; NaN if any of them is NaN."""
    return np.max([*errors.values()])
