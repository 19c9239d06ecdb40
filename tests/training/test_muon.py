"""Muon against its equations in numpy, its split of the parameters, its sharded state, and resumed runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict
from small_models import jit
from training_runs import optimizer_of, refusal, small_lm_setup

from dcvit.models import lm, vit
from dcvit.parallel.trees import by_name
from dcvit.training import optim

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]

ATTENTION = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0"
# For each matrix of Muon: its shape, and the shape as a matrix from inputs to outputs.
MATRICES = {
    f"{ATTENTION}/query/kernel": ((6, 2, 4), (6, 8)),
    f"{ATTENTION}/out/kernel": ((2, 4, 6), (8, 6)),
    "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel": ((6, 10), (6, 10)),
    "Transformer/group/layer_0/MlpBlock_0/out/kernel": ((3, 10, 6), (3, 10, 6)),  # of three scanned layers
    "Transformer/encoderblock/MultiHeadDotProductAttention_0/key/kernel": ((3, 6, 2, 4), (3, 6, 8)),
}
OTHERS = {
    f"{ATTENTION}/query/bias": (2, 4),
    f"{ATTENTION}/pre/w_q1": (6, 1, 8),
    f"{ATTENTION}/pre/w_b": (1, 2, 2),
    "Transformer/encoder_norm/scale": (6,),
    "embedding/embedding": (9, 6),
    "head/kernel": (6, 9),
}


def orthogonalized(x, steps):
    """Newton-Schulz iteration of Jordan et al., 2024: X ← aX + b(XXᵀ)X + c(XXᵀ)²X."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def expected(gradients, name, steps=5):
    """Return the last update of one parameter, in float64."""
    gradients = [np.asarray(g[name], np.float64) for g in gradients]
    beta, square_decay = (0.95, None) if name in MATRICES else (0.9, 0.999)
    mean, square = (np.zeros_like(gradients[0]) for _ in range(2))
    for t, g in enumerate(gradients, start=1):  # the momentum of Nesterov, with corrected bias
        mean = beta * mean + (1 - beta) * g
        ahead = beta * mean / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        if square_decay:
            square = square_decay * square + (1 - square_decay) * g**2
    if square_decay:
        return ahead / (np.sqrt(square / (1 - square_decay**t)) + 1e-8)
    shape = MATRICES[name][1]
    layers = ahead.reshape(-1, *shape[-2:])
    update = np.stack([orthogonalized(layer, steps) for layer in layers]) * 0.2 * np.sqrt(max(shape[-2:]))
    return update.reshape(ahead.shape)


def test_updates_equal_the_equations():
    """Heads count as one axis of a matrix, scanned layers are matrices of their own, and the rest is Adam's."""
    rng = np.random.default_rng(0)
    shapes = {name: shape for name, (shape, _) in MATRICES.items()} | OTHERS
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = [{name: rng.normal(size=p.shape).astype(np.float32) for name, p in params.items()} for _ in range(3)]
    options = {"optax_name": "muon", "lr": 0.1, "schedule": {"decay_type": "constant"}, "wd": 0.01}
    tree = unflatten_dict(params, sep="/")
    tx = optimizer_of(tree, 10, **options, wd_mults=((".*", 1.0),))
    state = tx.init(tree)
    for g in gradients:
        updates, state = jit(tx.update)(unflatten_dict(g, sep="/"), state, tree)
    for name, update in by_name(updates).items():
        wanted = -(0.1 * expected(gradients, name) + 0.01 * params[name])
        np.testing.assert_allclose(update, wanted, rtol=1e-3, atol=1e-4, err_msg=name)


MODELS = {
    "vit": (vit.Model(10, variant="DCViT-mu/16", num_heads=4, depth=2, static=True, rep_size=True), (1, 32, 32, 3)),
    "lm": (lm.Model(20, width=16, depth=2, num_heads=4, mlp_dim=32, compose="both", scan=True), (1, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_muon_updates_the_projections_and_mlps_and_nothing_else(name):
    model, shape = MODELS[name]
    example = jnp.zeros(shape, jnp.float32 if name == "vit" else jnp.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), example)["params"])
    axes = by_name(jax.tree.map(lambda a: a is not None, optim.muon_matrices(shapes), is_leaf=lambda x: x is None or
                                isinstance(x, optax.contrib.MuonDimensionNumbers)))  # fmt: skip
    chosen = {"/".join(n.split("/")[-2:]) for n, is_muon in axes.items() if is_muon}
    mlp = {"Dense_0/kernel", "Dense_1/kernel", "pre_logits/kernel"} if name == "vit" else {
        "in/kernel", "gate/kernel",
    }  # fmt: skip
    assert chosen == {"query/kernel", "key/kernel", "value/kernel", "out/kernel"} | mlp
    rest = {n.split("/")[-1] for n, is_muon in axes.items() if not is_muon}
    assert rest >= {"w_q1", "w_q2", "w_qg", "scale", "kernel" if name == "vit" else "embedding"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 0}, "optax.ns_steps=0 should be in [1, 20]"),
        ({"beta": 1.0}, "optax.beta=1.0 should be in [0, 1)"),
        ({"mu_dtype": "bfloat17"}, "bfloat17"),
    ],
)
def test_a_bad_option_is_one_line(options, message):
    assert message in refusal(small_lm_setup, optax_name="muon", optax=options)
