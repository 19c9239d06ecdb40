"""Muon against its equations in numpy, its split of the parameters, its sharded state, and resumed runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict
from small_models import jit
from training_runs import interrupted_before, optimizer_of, refusal, same_runs, small_lm_setup, steps_on_meshes

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


@pytest.mark.exhaustive
def test_sharded_state_trains_as_one_device():
    """The momentum is sharded as its parameters."""
    options = {"optax_name": "muon", "optax": {"ns_steps": 1}, "model.compose": "both", "input.batch_size": 16}
    options["model.head_zeroinit"] = False  # which would make the gradients of all layers below it zero
    options |= {"schedule": {"decay_type": "constant"}, "model.num_heads": 4, "model.mlp_dim": 32, "lr": 0.01}
    found = [after for _, after in steps_on_meshes(1, **options)]
    for one, many in zip(*(jax.tree.leaves(state.params) for state in found), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-4)
    momenta = {name: x for name, x in by_name(found[1].opt_state).items() if "/mu/" in name}
    for name, p in by_name(found[1].params).items():
        (momentum,) = (x for path, x in momenta.items() if path.endswith("/mu/" + name))
        assert momentum.sharding == p.sharding
    assert any("fsdp" in p.sharding.spec for p in jax.tree.leaves(found[1].params))


@pytest.mark.exhaustive
def test_interrupted_run_resumes_to_the_same_bits(digits_run, monkeypatch):
    """Also with layers that are scanned and partly frozen, and with an average of the weights that warms up."""
    options = {"optax_name": "muon", "optax": {"mu_dtype": "bfloat16", "ns_steps": 1}, "model.depth": 2}
    options |= {"model.scan": True, "layer_decay": 0.7, "freeze_layers": 1, "ema_decay": 0.9, "ema_warmup": True}
    options["evals"] = {}
    status, complete = digits_run("complete", **options)
    assert status == 0
    with interrupted_before(monkeypatch, 5):
        assert digits_run("stopped", **options)[0] == 130
    status, stopped = digits_run("stopped", **options)
    assert status == 0
    assert same_runs(complete, stopped)


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
