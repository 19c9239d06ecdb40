"""The GPU kernels, interpreted on tiny shapes against the reference, and lowered for every model of the presets.

Interpretation includes the ring of shared-memory slots and its barriers, but not the tensor cores' layouts; those are
fixed in lowering, which needs no GPU. scripts/check_gpu.py is the same contract on a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from dcvit.dcmha import ComposeWeights, reference
from dcvit.dcmha.pallas_gpu import api
from dcvit.models.presets import PRESETS


def problem(*, queries, keys, batch=1, heads=2, key_heads=2, width=16, rank=2, groups=1, branches=("qkpg", "qkpg")):
    """Random q, k, v, pre, post and output cotangent, float32."""
    rng = np.random.default_rng(0)
    sizes = {"batch": batch, "queries": queries, "keys": keys, "heads": heads, "rank": rank, "groups": groups}

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def weights(names):
        if names is None:
            return None
        fields = oracle.random_weights(rng, names, **sizes)
        return ComposeWeights(**{k: None if x is None else jnp.asarray(x, jnp.float32) for k, x in fields.items()})

    k, v = (array(batch, keys, key_heads, width) for _ in range(2))
    q, cotangent = (array(batch, queries, heads, width) for _ in range(2))
    return (q, k, v, weights(branches[0]), weights(branches[1])), cotangent


def check(inputs, cotangent, *, dtype=jnp.float32, tolerance=3e-5, groups=1, **options):
    """Output and all gradients within `tolerance` of the reference's in float32, in the norm."""
    options = {"causal": False, "window": None, "mask": None, "groups": groups, "scale": 0.3} | options
    given = jax.tree.map(lambda x: x.astype(dtype), (inputs, cotangent))

    def run(function, inputs, cotangent):
        out, vjp = jax.vjp(function, *inputs)
        return out, vjp(cotangent)

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    right = jax.jit(lambda *x: run(lambda *y: reference.attention(*y, **options), *x))(*wide)
    found = jax.jit(lambda *x: run(lambda *y: api.attention(*y, **options), *x))(*given)
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(right), strict=True):
        assert x.dtype == dtype
        x, y = np.asarray(x, np.float32), np.asarray(y)
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-6)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


def test_float32_with_grouped_queries_and_padding():
    inputs, cotangent = problem(queries=50, keys=20, heads=2, key_heads=1, width=24)
    check(inputs, cotangent)


def test_plain_attention_of_examples_with_masks_of_their_own(monkeypatch):
    monkeypatch.setattr(api, "WARPGROUPS", 1)
    inputs, cotangent = problem(queries=8, keys=20, batch=2, branches=(None, None))
    check(inputs, cotangent, mask=jnp.asarray(np.random.default_rng(1).random((2, 1, 1, 20)) > 0.3))


def test_groups(monkeypatch):
    monkeypatch.setattr(api, "WARPGROUPS", 1)
    sizes = dict(queries=8, keys=8, heads=4, key_heads=4, rank=1, groups=2)
    inputs, cotangent = problem(**sizes, branches=("qp", None))
    check(inputs, cotangent, groups=2)


def test_bfloat16_causal(monkeypatch):
    monkeypatch.setattr(api, "WARPGROUPS", 1)
    inputs, cotangent = problem(queries=20, keys=20, rank=1, branches=(None, "kpg"))
    check(inputs, cotangent, causal=True, dtype=jnp.bfloat16, tolerance=1e-2)


def test_window_beyond_the_keys_and_absent_branches(monkeypatch):
    """Queries 15 and on see nothing: zeros, and no gradient. The last rectangle has no keys at all."""
    monkeypatch.setattr(api, "ROWS_WINDOW", 64)
    monkeypatch.setattr(api, "WARPGROUPS", 1)
    inputs, cotangent = problem(queries=132, keys=10, branches=("kg", None))
    mask = jnp.asarray(np.random.default_rng(1).random((1, 1, 1, 10)) > 0.3)
    check(inputs, cotangent, window=6, mask=mask)


def shapes(preset, dtype, length, window):
    """ShapeDtypeStructs of one attention layer's q, k, v, pre, post and output cotangent."""
    fields = PRESETS.get(preset, {"num_heads": 6, "width": 384})
    heads = fields["num_heads"]
    width = fields["width"] // heads
    array = lambda *shape: jax.ShapeDtypeStruct((1, length, *shape), dtype)  # noqa: E731
    weights = ComposeWeights(*(array(2, heads), array(2, heads), array(heads)) * 2)
    return (*(array(heads, width) for _ in range(3)), weights, weights), array(heads, width), window


CASES = [
    ("DCViT-S", jnp.bfloat16, 196, None),
    ("DCViT-S", jnp.float32, 197, None),
    ("DCFormer++-405M", jnp.bfloat16, 512, 256),
    ("DCPythia-2.8B", jnp.bfloat16, 256, 256),
    ("DCPythia-6.9B", jnp.bfloat16, 256, 10**6),
    ("DCPythia-6.9B", jnp.float32, 256, 256),
]


@pytest.mark.parametrize(("preset", "dtype", "length", "window"), CASES)
def test_lowers_for_cuda(preset, dtype, length, window):
    inputs, cotangent, window = shapes(preset, dtype, length, window)
    static = api._Static(window is not None, window, 1, 0.1, interpret=False)

    def both(inputs, cotangent):
        out, vjp = jax.vjp(lambda *x: api._attention(static, *x, None), *inputs)
        return out, vjp(cotangent)

    text = jax.jit(both).trace(inputs, cotangent).lower(lowering_platforms=("cuda",)).as_text()
    for kind in ("statistics", "weights", "post_grad", "pre_grad"):
        assert f"dcmha_{kind}" in text


def test_every_dynamic_preset_is_taken():
    for name, fields in PRESETS.items():
        if "compose" in fields:
            inputs, _, _ = shapes(name, jnp.bfloat16, 2048, 256)
            options = {"causal": True, "window": 256, "mask": None, "groups": 1}
            assert api.refuses(*inputs, **options) is None, name


def test_refusals_are_one_line():
    def why(inputs, groups=1):
        said = api.refuses(*inputs, causal=False, window=None, mask=None, groups=groups)
        assert said is not None
        assert "\n" not in said
        return said

    inputs, _ = problem(queries=4, keys=4)
    assert "static" in why(problem(queries=4, keys=4, branches=("s", None))[0])
    assert "rank" in why(problem(queries=4, keys=4, rank=5)[0])
    assert "float16" in why(jax.tree.map(lambda x: x.astype(jnp.float16), inputs))
    assert "wide" in why(problem(queries=4, keys=4, width=512)[0])
    assert "heads" in why(problem(queries=1, keys=1, heads=128, key_heads=128)[0])
    inputs, _ = problem(queries=4, keys=4, branches=(None, "s"))
    with pytest.raises(ValueError, match="static"):
        api.attention(*inputs, causal=False, window=None, mask=None, groups=1, scale=1.0)
