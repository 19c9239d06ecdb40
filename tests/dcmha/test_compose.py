"""`compose` compared with loops over Eqn 7 and 8, and the paper's two theorems."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from dcvit.dcmha import ComposeWeights, compose
from dcvit.dcmha.compose import gate_init, hidden_init, projection_init, static_init

GROUPS_AND_RANKS = [(1, 2), (2, 1), (4, 3)]


@pytest.mark.parametrize(
    ("branches", "groups", "rank"),
    [  # the default suite takes each value of the branches once
        pytest.param(branches, *sizes, marks=[] if i % 3 == j else pytest.mark.exhaustive)
        for i, branches in enumerate(oracle.BRANCHES)
        for j, sizes in enumerate(GROUPS_AND_RANKS)
    ],
)
def test_compose_equals_eqn_7_for_every_query_key_pair(x64, branches, groups, rank):
    rng = np.random.default_rng(0)
    sizes = dict(batch=2, queries=3, keys=5, heads=4)
    w = oracle.random_weights(rng, branches, **sizes, rank=rank, groups=groups)
    a = rng.normal(size=(2, 4, 3, 5))
    got = compose(
        jnp.asarray(a), ComposeWeights(**{k: v if v is None else jnp.asarray(v) for k, v in w.items()}), groups=groups
    )
    np.testing.assert_allclose(got, oracle.compose(a, w, groups), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_compose_equals_the_composition_matrix_of_eqn_8(x64):
    """Together, the branches and the skip connection are one H×H matrix for each pair: 1 + W_b + W_q + W_k."""
    rng = np.random.default_rng(1)
    w = oracle.random_weights(rng, "qkpgs", batch=1, queries=3, keys=4, heads=4)
    a = rng.normal(size=(1, 4, 3, 4))
    eye = np.eye(4)
    w_q = np.einsum("trh,trn->thn", w["q1"][0], w["q2"][0]) + np.einsum("th,hn->thn", w["qg"][0], eye)
    w_k = np.einsum("srh,srn->shn", w["k1"][0], w["k2"][0]) + np.einsum("sh,hn->shn", w["kg"][0], eye)
    maps = eye + w["static"][0] + w_q[:, None] + w_k[None]
    expected = np.einsum("hts,tshn->nts", a[0], maps)
    got = compose(jnp.asarray(a), ComposeWeights(**{k: jnp.asarray(v) for k, v in w.items()}))
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=1e-10)


def test_theorem_2_1_composed_scores_are_expanded_query_key_projections(x64):
    rng = np.random.default_rng(3)
    heads, width, d, t, s = 3, 8, 2, 4, 5
    c = rng.normal(size=(heads, heads))
    w_q, w_k = rng.normal(size=(2, heads, width, d))
    x_q, x_k = rng.normal(size=(t, width)), rng.normal(size=(s, width))
    scores = np.einsum("tm,hmd,sn,hnd->hts", x_q, w_q, x_k, w_k)[None]
    skip = ComposeWeights(static=jnp.asarray((c.T - np.eye(heads))[None]))  # the skip connection is always added
    composed = compose(jnp.asarray(scores), skip)[0]
    for i in range(heads):
        expanded_q = np.concatenate([c[i, j] * w_q[j] for j in range(heads)], axis=1)
        expanded_k = np.concatenate([w_k[j] for j in range(heads)], axis=1)
        np.testing.assert_allclose(composed[i], (x_q @ expanded_q) @ (x_k @ expanded_k).T, atol=1e-10)


def test_theorem_2_2_composed_weights_are_expanded_value_output_projections(x64):
    rng = np.random.default_rng(4)
    heads, width, d, t, s = 3, 8, 2, 4, 5
    c = rng.normal(size=(heads, heads))
    w_v, w_o = rng.normal(size=(heads, width, d)), rng.normal(size=(heads, d, width))
    x = rng.normal(size=(s, width))
    weights = rng.random(size=(1, heads, t, s))
    # A'_j = Σ_i C_ij A_i (the proof in Appendix B), the row-vector convention of Eqn 7.
    composed = compose(jnp.asarray(weights), ComposeWeights(static=jnp.asarray((c - np.eye(heads))[None])))[0]
    out = sum(np.asarray(composed[j]) @ x @ w_v[j] @ w_o[j] for j in range(heads))
    tiled_o = np.concatenate(w_o, axis=0)
    expected = 0
    for i in range(heads):
        expanded_v = np.concatenate([c[i, j] * w_v[j] for j in range(heads)], axis=1)
        expected = expected + weights[0, i] @ (x @ expanded_v) @ tiled_o
    np.testing.assert_allclose(out, expected, atol=1e-10)


def test_initializers_have_the_standard_deviations_of_the_paper():
    width, heads, rank = 384, 6, 2
    inner = 2 * rank * heads
    expected = {
        hidden_init(width, inner): np.sqrt(2 / (width + inner)),
        projection_init(rank, heads): 0.02 / (np.sqrt(2 * heads * rank) * (heads + rank)),
        gate_init(width, heads): 0.05 * np.sqrt(2 / (width + heads)),
        static_init(heads): 0.1 * np.sqrt(1 / heads),
    }
    for init, deviation in expected.items():
        drawn = init(jax.random.key(0), (400, 400), jnp.float32)
        assert float(drawn.std()) == pytest.approx(deviation, rel=0.02)
        assert abs(float(drawn.mean())) < 0.02 * deviation


@pytest.mark.parametrize(
    ("fields", "groups", "message"),
    [
        ({}, 3, "groups=3 does not divide 4 heads"),
        ({"q1": (2, 3, 2, 4)}, 1, "q1 and q2 must be given together"),
    ],
)
def test_weights_of_a_wrong_shape_are_named(fields, groups, message):
    w = ComposeWeights(**{k: jnp.zeros(s) for k, s in fields.items()})
    with pytest.raises(ValueError, match=message):
        compose(jnp.zeros((2, 4, 3, 5)), w, groups=groups)
