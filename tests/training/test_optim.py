"""The optimizer against its equation in numpy, and the schedules against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from training_runs import optimizer_of

from dcvit.errors import ConfigError
from dcvit.training import optim

pytestmark = pytest.mark.usefixtures("library_promotion")

PARAMS = {
    "block": {"kernel": jnp.array([1.0, -2.0, 3.0]), "bias": jnp.array([0.5])},
    "head": {"kernel": jnp.array([4.0])},
}
GRADS = [jax.tree.map(lambda p, s=s: 0.1 * (s + 1) * jnp.cos(p + s), PARAMS) for s in range(4)]


def train(**options):
    """Return the parameters after four gradients."""
    tx = optimizer_of(PARAMS, 4, **options)
    params, state = PARAMS, tx.init(PARAMS)
    for grads in GRADS:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def expected(*, lr, wd=0.0, clip=None, b1=0.9, b2=0.999, lr_mult=None, wd_mult=None, frozen=()):
    """Compute -schedule · (lr · lr_mult · Adam(clip(g)) + wd · wd_mult · p) with the cosine schedule, in numpy."""
    p = {name: np.asarray(x, np.float64) for name, x in flatten_dict(PARAMS, sep="/").items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for step, grads in enumerate(GRADS):
        flat = flatten_dict(grads, sep="/")
        g = {name: np.asarray(x, np.float64) for name, x in flat.items() if name not in frozen}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        schedule = 0.5 * (1 + np.cos(np.pi * step / 4))
        for name, x in g.items():
            x = x * min(1, clip / norm) if clip else x
            m[name] = b1 * m[name] + (1 - b1) * x
            v[name] = b2 * v[name] + (1 - b2) * x**2
            adam = (m[name] / (1 - b1 ** (step + 1))) / (np.sqrt(v[name] / (1 - b2 ** (step + 1))) + 1e-8)
            rate = lr * (lr_mult or {}).get(name, 1)
            decay = wd * (wd_mult or {"block/kernel": 1, "head/kernel": 1}).get(name, 0)
            p[name] = p[name] - schedule * (rate * adam + decay * p[name])
    return unflatten_dict(p, sep="/")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "equation"),
    [
        ({}, {}),
        ({"wd": 0.01}, {"wd": 0.01}),
        ({"wd": 0.1, "wd_times_lr": True}, {"wd": 0.1 * 0.02}),
        ({"grad_clip_norm": 0.05}, {"clip": 0.05}),
        ({"optax": {"b1": 0.8, "b2": 0.9}}, {"b1": 0.8, "b2": 0.9}),
        ({"lr_mults": [("head/.*", 0.1)]}, {"lr_mult": {"head/kernel": 0.1}}),
        (
            {"wd": 0.01, "wd_mults": [("head/.*", 3.0), (".*/kernel", 1.0), (".*", 0.5)]},
            {"wd": 0.01, "wd_mult": {"head/kernel": 3, "block/kernel": 1, "block/bias": 0.5}},
        ),
        (
            {"frozen": ["block/.*"], "wd": 0.01, "grad_clip_norm": 0.05},
            {"frozen": ("block/kernel", "block/bias"), "wd": 0.01, "clip": 0.05},
        ),
    ],
)
def test_update_follows_the_equation(options, equation):
    got = train(lr=0.02, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected(lr=0.02, **equation))


def test_bfloat16_momentum_stays_near_float32():
    narrow = train(lr=0.02, optax={"mu_dtype": "bfloat16"})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-3), narrow, expected(lr=0.02))


def test_frozen_parameters_have_no_optimizer_state():
    def numbers(**options):
        tx = optimizer_of(PARAMS, 4, **options)
        return sum(x.size for x in jax.tree.leaves(tx.init(PARAMS)))

    assert numbers() - numbers(frozen=["block/.*"]) == 2 * 4


def test_the_state_has_the_structure_that_checkpoints_store():
    """Empty nodes included, with any options: a run that an earlier version began is resumed."""
    expected = ["Masked", "Empty", "Masked", "Empty", "Empty", "ScaleBySchedule", "Empty", "Masked"]
    for options in ({}, {"wd": 1e-4, "grad_clip_norm": 1.0, "layer_decay": 0.5, "freeze_layers": 0}):
        params = {"embedding": {"kernel": jnp.zeros((2, 2))}, "head": {"kernel": jnp.zeros((2, 2))}}
        state = optimizer_of(params, 10, **options).init(params)
        assert [type(each).__name__ for each in state] == [f"{name}State" for name in expected]


def test_schedules_have_their_defined_values_at_the_corners():
    def at(step, **options):
        return float(optim.schedule(100, **options)(step))

    assert at(0, warmup_steps=10) == 0
    assert at(5, warmup_steps=10) == pytest.approx(0.5 * at(5, decay_type="cosine", warmup_steps=5))
    assert at(10, warmup_steps=10) == pytest.approx(1)
    assert at(55, warmup_steps=10) == pytest.approx(0.5)
    assert at(100, warmup_steps=10) == pytest.approx(0, abs=1e-6)
    assert at(100, warmup_steps=10, end=0.1) == pytest.approx(0.1)
    assert at(55, warmup_steps=10, decay_type="linear", end=0.2) == pytest.approx(0.6)
    assert at(40, decay_type="rsqrt", timescale=10, warmup_steps=10) == pytest.approx(0.5)
    assert at(40, decay_type="constant") == 1
    assert at(90, decay_type="constant", cooldown_steps=20) == pytest.approx(0.5)
    assert at(100, decay_type="rsqrt", cooldown_steps=20) == 0
    assert at(1000) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wd": 0.1, "wd_mults": [(".*/kernal", 1.0)]}, "wd_mults: '.*/kernal' matches no parameter"),
        ({"schedule": {"decay_type": "cosin"}}, "decay_type='cosin'"),
        ({"schedule": {"warmup_steps": 3, "cooldown_steps": 2}}, "do not fit into 4 steps"),
    ],
)
def test_rules_without_a_match_and_invalid_schedules_are_refused(options, message):
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        optimizer_of(PARAMS, 4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 4, 3)])
def test_adafactor_equals_its_equations(shape):
    """Shazeer & Stern, 2018, Algorithms 1 and 4, with a capped β2, and an average of the updates without debiasing.

    Second moments are the product of the means over either of the two largest dimensions, if both have at least 4.
    """
    options = {"min_dim_size_to_factor": 4, "beta2_cap": 0.5, "clipping_threshold": 0.9, "dtype_momentum": "float32"}
    tx = optim.scale_by_adafactor(**options)
    params = jnp.zeros(shape)
    state = tx.init(params)
    average, whole, rows, columns = (np.zeros(shape) for _ in range(4))
    factored = shape == (4, 6)
    for step in range(5):
        grad = np.random.default_rng(step).normal(size=shape)
        beta = min(0.5, 1 - (step + 1) ** -0.8)
        square = grad**2 + 1e-30
        whole = beta * whole + (1 - beta) * square
        rows = beta * rows + (1 - beta) * square.mean(axis=-1, keepdims=True)
        columns = beta * columns + (1 - beta) * square.mean(axis=0, keepdims=True)
        moment = rows * columns / rows.mean(axis=0, keepdims=True) if factored else whole
        update = grad / np.sqrt(moment)
        update /= max(1, np.sqrt(np.mean(update**2)) / 0.9)
        average = 0.9 * average + 0.1 * update
        found, state = tx.update(jnp.asarray(grad, jnp.float32), state, params)
        np.testing.assert_allclose(found, average, rtol=1e-4, atol=1e-6)
