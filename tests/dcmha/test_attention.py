"""One contract for the implementations of `dcvit.dcmha.attention` that support all cases, and the argument checks."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import on_arrays, queries_with_nan, random_case, to_jax
from gpu_interpreter import interpreted
from jax.test_util import check_grads
from marks import exhaustive

from dcvit.dcmha import ComposeWeights, attention, device, plan

IMPLEMENTATIONS = ("reference", "blockwise", "elementwise")  # these also support float64

SHAPES = {
    "self": {},
    "causal": {"causal": True},
    "window": {"window": 2},
    "causal window of 1": {"causal": True, "window": 1},
    "composed window": {"causal": True, "compose_window": 2},
    "composed window, fewer keys": {"keys": 3, "causal": True, "compose_window": 3},
    "cross": {"keys": 6},
    "fewer keys": {"keys": 3, "causal": True},
    "grouped query": {"key_heads": 2, "causal": True},
    "one key head": {"key_heads": 1},
    "mask": {"mask": (2, 1, 5, 5)},
    "key padding": {"mask": (2, 1, 1, 5)},
    "row mask": {"mask": (1, 1, 5, 1)},
    "causal mask": {"mask": (1, 1, 5, 5), "causal": True},
    "two groups": {"groups": 2},
    "four groups": {"groups": 4, "causal": True},
    "scale": {"scale": 0.3},
    "segments": {"segments": 3, "causal": True},
    "cross segments, mask": {"segments": 2, "keys": 6, "mask": (2, 1, 1, 6)},
}
# The shapes of the default suite, which together have every option.
MIXED = (
    "window", "cross", "fewer keys", "grouped query", "key padding", "row mask", "four groups", "causal mask", "scale",
    "segments", "cross segments, mask", "composed window",
    "composed window, fewer keys",
)  # fmt: skip
ABLATIONS = [  # every pair of branches, composes, shapes and implementations
    pytest.param(
        branches, where, ("causal", "cross", "two groups")[(i + 2 * j) % 3], IMPLEMENTATIONS[(i + j) % 3],
        marks=[] if (3 * i + j) % 4 == 0 else pytest.mark.exhaustive,
    )
    for i, branches in enumerate(oracle.BRANCHES)
    for j, where in enumerate(("both", "pre", "post"))
]  # fmt: skip


def each(values, default):
    """Parametrize over pairs of a value and an implementation.

    The default suite runs each value of `default` with one implementation in turn, the exhaustive suite all pairs.
    """
    params = []
    for value in values:
        for n, implementation in enumerate(IMPLEMENTATIONS):
            chosen = value in default and list(default).index(value) % len(IMPLEMENTATIONS) == n
            params.append(pytest.param(value, implementation, marks=[] if chosen else pytest.mark.exhaustive))
    return params


def implementations(default):
    """Parametrize over the implementations, of which the default suite runs one."""
    marks = {name: [] if name == default else pytest.mark.exhaustive for name in IMPLEMENTATIONS}
    return pytest.mark.parametrize("implementation", [pytest.param(name, marks=marks[name]) for name in marks])


def make_case(shape, pre="qkpg", post="qkpg", rank=2, dtype=jnp.float32):
    """Return random arguments (q, k, v, pre, post) and the options of `attention`."""
    options = {"scale": None, **SHAPES[shape]}
    return random_case(5, heads=4, head_dim=3, batch=2, branches=pre, post=post, rank=rank, dtype=dtype, **options)


def run(args, options, implementation, compiled=True):
    attend = functools.partial(attention, **options, implementation=implementation)
    return (jax.jit(attend) if compiled else attend)(*args)


def check_oracle(args, options, implementation):
    """Compare with a loop over query-key pairs in float64."""
    q, k, v, *weights = jax.tree.map(np.asarray, args)
    weights = [w and w._asdict() for w in weights]
    expected = oracle.attention(q, k, v, *weights, **jax.tree.map(np.asarray, options))
    np.testing.assert_allclose(run(args, options, implementation), expected, rtol=0, atol=1e-10)


class TestContract:
    @pytest.mark.parametrize(("shape", "implementation"), each(SHAPES, default=MIXED))
    def test_output_equals_a_loop_over_query_key_pairs(self, x64, implementation, shape):
        check_oracle(*make_case(shape, dtype=jnp.float64), implementation)

    @pytest.mark.slow
    @pytest.mark.parametrize(("branches", "where", "shape", "implementation"), ABLATIONS)
    def test_every_ablation_equals_a_loop_over_query_key_pairs(self, x64, branches, where, shape, implementation):
        pre, post = (branches if where in (side, "both") else None for side in ("pre", "post"))
        check_oracle(*make_case(shape, pre, post, rank=1, dtype=jnp.float64), implementation)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("shape", "implementation"),
        each(["window", "two groups", "key padding"], ["two groups", "key padding"]),
    )
    def test_gradients_agree_with_finite_differences(self, x64, implementation, shape):
        args, options = make_case(shape, "qkpgs", "qkpgs", dtype=jnp.float64)

        def f(*leaves):  # check_grads passes numpy arrays
            arrays = jax.tree.unflatten(tree, map(jnp.asarray, leaves))
            return attention(*arrays, **options, implementation=implementation)

        leaves, tree = jax.tree.flatten(args)
        check_grads(jax.jit(f), leaves, order=1, modes=["rev"], atol=4e-6, rtol=4e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("shape", "implementation"),
        each(["causal", "mask", "two groups"], ["causal", "mask", "two groups"]),
    )
    def test_zero_compose_weights_give_plain_attention_bitwise(self, implementation, shape):
        args, options = make_case(shape, "qkpgs", "qkpgs")
        zero = jax.tree.map(jnp.zeros_like, args[3:])
        composed = run((*args[:3], *zero), options, implementation, compiled=False)
        plain = run((*args[:3], None, None), options, implementation, compiled=False)
        np.testing.assert_array_equal(composed, plain)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("shape", "implementation"),
        each(["window", "causal mask", "segments"], ["causal mask", "window", "segments"]),
    )
    def test_no_output_depends_on_a_masked_key_through_any_branch(self, implementation, shape):
        (q, k, v, *weights), options = make_case(shape, "qkpgs", "qkpgs")

        def f(k, v, *key_side):
            composed = (w._replace(**fields) for w, fields in zip(weights, key_side, strict=True))
            return attention(q, k, v, *composed, **options, implementation=implementation)

        key_side = [{n: getattr(w, n) for n in ("k1", "k2", "kg")} for w in weights]
        jacobians = jax.jit(jax.jacobian(f, argnums=(0, 1, 2, 3)))(k, v, *key_side)
        masking = [*map(jax.tree.map(np.asarray, options).get, ("causal", "window", "mask", "segments"))]
        for jacobian in jax.tree.leaves(jacobians):  # B T H D, then B S …
            strength = np.abs(np.asarray(jacobian)).max(axis=(2, 3))
            strength = strength.reshape(*strength.shape[:4], -1).max(axis=-1)  # B T B S
            for b in range(2):
                for i in range(strength.shape[1]):
                    for j in range(strength.shape[3]):
                        attended = oracle.attends(b, i, j, *masking)
                        assert strength[b, i, 1 - b, j] == 0
                        assert attended or strength[b, i, b, j] == 0
            assert strength.max() > 0

    @pytest.mark.slow
    @implementations(default="elementwise")
    def test_bfloat16_is_close_to_float32_and_large_scores_do_not_overflow(self, implementation):
        args, options = make_case("causal")
        wide = run(args, options, implementation)
        narrow = run(jax.tree.map(lambda x: x.astype(jnp.bfloat16), args), options, implementation)
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=0, atol=0.05 * float(jnp.abs(wide).max()))
        huge = run((1e4 * args[0], *args[1:]), options, implementation)
        assert bool(jnp.isfinite(huge).all())

    @pytest.mark.slow
    @implementations(default="blockwise")
    def test_a_fully_masked_query_has_zero_output_and_finite_gradients(self, implementation):
        arrays, _ = make_case("self")
        mask = jnp.zeros((1, 1, 5, 5), bool).at[:, :, 1:].set(True)
        f = lambda q, k, v: attention(q, k, v, *arrays[3:], mask=mask, implementation=implementation)  # noqa: E731

        @jax.jit
        def both(*args):
            out, pull = jax.vjp(f, *args)
            return out, pull(jnp.ones_like(out))

        out, gradients = jax.tree.map(np.asarray, both(*arrays[:3]))
        assert not out[:, 0].any()
        assert out[:, 1:].any()
        assert all(np.isfinite(g).all() for g in gradients)


def test_plain_attention_equals_jax_nn_dot_product_attention():
    (q, k, v, *_), _ = make_case("causal", None, None)
    np.testing.assert_allclose(
        attention(q, k, v, causal=True), jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 5, 3, 8), "v": (2, 5, 3, 8)}, r"query heads \(4\) is not a multiple of the key heads \(3\)"),
        ({"groups": 3}, "groups=3 does not divide 4 heads"),
        ({"compose_window": 0}, "compose_window=0: expected at least 1"),
        ({"compose_window": 2, "pre": "kg"}, "compose_window=2 needs causal attention"),
        ({"segments": jnp.zeros((2, 4), int)}, r"segments of queries are int32\(2, 4\), expected int32\(2, 5\)"),
        ({"implementation": "flash"}, "unknown implementation 'flash'; expected one of folded, "),
    ],
)
def test_inconsistent_arguments_are_named(change, message):
    arrays = {name: jnp.zeros(change.pop(name, (2, 5, 4, 8))) for name in ("q", "k", "v")}
    if "pre" in change:
        change["pre"] = ComposeWeights(kg=jnp.zeros((2, 5, 4)))
    if "mask" in change:
        change["mask"] = jnp.ones(change["mask"], bool)
    with pytest.raises(ValueError, match=message):  # without the executed annotations
        inspect.unwrap(attention)(**arrays, **change)


@pytest.mark.parametrize("implementation", ["folded", "pallas_gpu"])
def test_a_window_of_composition_is_refused_by_implementations_that_compose_all_pairs(implementation, monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    q = jnp.zeros((2, 5, 4, 8), jnp.bfloat16)
    post = ComposeWeights(qg=jnp.zeros((2, 5, 4), jnp.bfloat16))
    with pytest.raises(ValueError, match="window"):
        attention(q, q, q, None, post, causal=True, compose_window=2, implementation=implementation)


@pytest.mark.parametrize(("shape", "implementation"), [((0, 5, 4, 8), None), ((2, 0, 4, 8), "reference")])
def test_empty_batches_and_empty_queries_give_empty_outputs(shape, implementation):
    q, k = jnp.zeros(shape), jnp.zeros((shape[0], 5, 4, 8))
    assert attention(q, k, k, implementation=implementation).shape == shape
    pre = ComposeWeights(*(jnp.zeros((*shape[:2], 2, 4)) for _ in range(2)), jnp.zeros((*shape[:2], 4)))
    assert attention(q, k, k, pre, pre, implementation=implementation).shape == shape


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("place", ["plain k", *[pytest.param(x, marks=pytest.mark.slow) for x in ("q", "k", "k1")]])
def test_nan_reaches_the_queries_that_attend_with_it_and_no_others(place, implementation):
    """Several blocks of "blockwise" attend to one token."""
    branches, place = None if "plain" in place else "qkpg", place.removeprefix("plain ")
    attend = plan.BACKENDS[implementation].load().run
    found = queries_with_nan(attend, place, 600, 300, 70, branches=branches, rank=1)
    assert found == ([300] if place[0] == "q" else list(range(300, 370)))


@pytest.mark.parametrize(
    ("implementation", "relative_error"),
    [
        ("blockwise", 3e-6),
        exhaustive("elementwise", 3e-6),
        pytest.param("pallas_tpu", 4e-7 * 1e5, marks=pytest.mark.weekly),
        pytest.param("pallas_gpu", 4e-7 * 1e5, marks=pytest.mark.weekly),
    ],
)
def test_gradients_are_right_where_all_scores_of_a_row_are_large(implementation, relative_error):
    """Composed scores are multiples of 1/8 near 5e4 and 1e5, which float32 holds; those of a row are close.

    q and k are also exact in bfloat16, the only dtype of "pallas_gpu".
    """
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-3, 4, size=(1, 16, 2, 16)) / size for size in (1, 8))
    q[..., 0], k[..., 0] = 50_176, 1
    v, cotangent = rng.normal(size=(2, *q.shape))
    pre = dict.fromkeys(ComposeWeights._fields) | {"qg": rng.integers(0, 2, size=q.shape[:3]).astype(float)}
    each_key = np.broadcast_to(np.eye(16)[None, :, None], q.shape)
    w = oracle.attention(q, k, each_key, pre, None, causal=True, scale=1.0)
    d_w = np.einsum("bthd,bshd->bths", cotangent, v)
    d_scores = w * (d_w - (w * d_w).sum(-1, keepdims=True)) * (1 + pre["qg"])[..., None]

    def attend(q, k, v, pre):
        return on_arrays(plan.BACKENDS[implementation].load().run)(q, k, v, pre, causal=True)

    is_gpu = implementation == "pallas_gpu"
    dtype = jnp.bfloat16 if is_gpu else jnp.float32
    args = *(jnp.asarray(x, dtype) for x in (q, k, v)), to_jax(pre, dtype)
    with interpreted() if is_gpu else contextlib.nullcontext():
        dq, _, dv, _ = jax.jit(lambda args: jax.vjp(attend, *args)[1](jnp.asarray(cotangent, dtype)))(args)
    for found, right in (
        (dq, np.einsum("bths,bshd->bthd", d_scores, k)), (dv, np.einsum("bths,bthd->bshd", w, cotangent)),
    ):  # fmt: skip
        np.testing.assert_allclose(np.float32(found), right, atol=relative_error * np.abs(right).max())


def test_a_traced_scale_raises():
    q = jnp.zeros((2, 5, 4, 8))
    with pytest.raises(ValueError, match="known at trace time"):
        jax.jit(lambda scale: inspect.unwrap(attention)(q, q, q, scale=scale))(0.3)
    given = inspect.unwrap(attention)(q, q, q, scale=jnp.float32(0.25))
    np.testing.assert_array_equal(given, attention(q, q, q, scale=0.25))
