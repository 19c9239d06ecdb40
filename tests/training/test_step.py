"""The training step: loss, gradients, accumulation, averages, randomness and non-finite values."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import jit
from test_distillation import save_teacher
from training_runs import (
    make_step,
    nats,
    perturbed_params,
    same,
    shared_step,
    small_lm_setup,
    small_setup,
    steps_on_meshes,
)

from dcvit.parallel.trees import by_name
from dcvit.training import step
from dcvit.training.step import non_finite_arrays

pytestmark = pytest.mark.usefixtures("library_promotion")

# Plain gradient descent: Adam would amplify rounding errors of near-zero gradients to full steps.
DESCENT = {
    "optax_name": "scale_by_learning_rate", "optax": {"learning_rate": -1.0}, "lr": 0.1,
    "schedule": {"decay_type": "constant"},
}  # fmt: skip


def assert_same_step(got, expected):
    """Compare (state, metrics) up to rounding."""
    for name in ("loss", "grad_norm"):
        assert float(got[1][name]) == pytest.approx(float(expected[1][name]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got[0].params, expected[0].params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "mixup", "depth"), [(2, 0.2, 1), pytest.param(8, 0.0, 0, marks=pytest.mark.exhaustive)]
)
def test_accumulated_gradients_equal_those_of_the_whole_batch(parts, mixup, depth):
    options = {**DESCENT, "mixup": mixup, "model.depth": depth}
    state, batch, update = make_step(small_setup(**options))
    _, _, accumulated = make_step(small_setup(**options, grad_accum=parts))
    expected = update(state, batch)
    assert_same_step(accumulated(state, batch), expected)
    assert not same(expected[0].params, state.params)


@pytest.mark.slow
def test_averaged_weights_follow_their_definition():
    _, state, batch, update = shared_step()
    expected = jax.device_get(state.params)
    for _ in range(3):
        state, _ = update(state, batch)
        expected = jax.tree.map(lambda e, p: 0.8 * e + 0.2 * np.asarray(p), expected, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.ema, expected)
    assert state.best is state.ema


@pytest.mark.slow
def test_loss_and_gradient_equal_those_of_the_model_written_out():
    setup, state, batch, update = shared_step()

    def loss(params):
        images = batch["image"].astype(jnp.float32) / 127.5 - 1
        log_p = nn.log_softmax(setup.model.module.apply({"params": params}, images)[0])
        return -jnp.mean(jnp.sum((0.9 * batch["labels"] + 0.01) * log_p, axis=-1))  # label smoothing 0.1

    @jit
    def expected(params):
        value, grads = jax.value_and_grad(loss)(params)
        return value, optax.tree.norm(grads)

    value, norm = expected(state.params)
    _, metrics = update(state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    assert float(metrics["lr"]) == 0  # the first step of the warm-up


@pytest.mark.slow
def test_loss_of_a_language_model_is_the_mean_over_targets_also_in_parts():
    """Parts of the batch, and of the positions."""
    found = []
    for parts, chunk in ((1, None), (4, 5)):
        setup = small_lm_setup(**DESCENT, wd=0.0, loss_chunk=chunk, grad_accum=parts, **{"input.batch_size": 32})
        params = perturbed_params(setup)
        batch = next(setup.data.batches(0))
        batch["is_target"][3, 7:] = False  # as in the last row of a text, which is padded
        batch["is_target"][9:] = False
        update = jax.jit(step.make_update(setup))
        found.append(update(step.initial_state(setup, params), jax.tree.map(jnp.asarray, batch)))
    expected = nats(setup.model.module, params, batch["tokens"])[batch["is_target"][:, 1:]].mean()
    for _, metrics in found:
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(found[1][1]["grad_norm"]) == pytest.approx(float(found[0][1]["grad_norm"]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "random",
    [
        {"model.dropout": 0.5, "model.stochastic_depth": 0.9, "model.depth": 2},
        pytest.param({"mixup": 0.5, "model.depth": 0}, marks=pytest.mark.exhaustive),
    ],
)
def test_random_choices_depend_on_the_step_and_nothing_else(random):
    state, batch, update = make_step(small_setup(**random))
    losses = [float(update(state.replace(step=jnp.int32(number)), batch)[1]["loss"]) for number in (0, 1, 1, 2)]
    assert losses[1] == losses[2]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_non_finite_step_changes_nothing_but_the_counts():
    _, state, batch, update = shared_step()
    state, _ = update(state, batch)  # the learning rate of the first step is zero
    after, metrics = update(state, batch | {"labels": batch["labels"] * np.nan})
    assert not np.isfinite(metrics["loss"])
    for name in ("params", "opt_state", "ema"):
        assert same(getattr(state, name), getattr(after, name))
    assert (after.step, after.nonfinite, metrics["nonfinite"]) == (2, 1, 1)
    finite, _ = update(after, batch)
    assert not same(finite.params, state.params)
    assert (finite.step, finite.nonfinite) == (3, 1)


@pytest.mark.slow
def test_applied_learning_rate_is_the_logged_one_also_after_skipped_steps():
    """Gradient descent changes a parameter by rate · gradient, so the lengths of both give the applied rate."""
    decay = {"schedule": {"decay_type": "linear", "warmup_steps": 1}, "total_steps": 6, "model.depth": 0}
    state, batch, update = make_step(small_setup(**DESCENT | decay, wd=0.0))
    applied, logged = [], []
    for number in range(6):
        bad = batch | {"labels": batch["labels"] * np.nan}
        after, metrics = update(state, bad if number in (1, 3) else batch)
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, state.params))
        applied.append(float(moved / metrics["grad_norm"]))
        logged.append(float(metrics["lr"]))
        state = after
    assert logged == pytest.approx([0, 0.1, 0.08, 0.06, 0.04, 0.02])
    finite = [0, 2, 4, 5]
    assert [applied[i] for i in finite] == pytest.approx([logged[i] for i in finite], rel=1e-4)


@pytest.mark.slow
def test_non_finite_arrays_are_found_on_every_device():
    mesh = jax.make_mesh((8,), ("x",))
    tree = {name: np.zeros((16, 2), np.float32) for name in "abc"} | {"n": np.int32(3)}
    tree["b"][15, 1] = np.nan
    tree["c"][0, 0] = -np.inf
    split = jax.NamedSharding(mesh, jax.P("x"))
    placed = {k: jax.device_put(v, split if v.ndim else jax.NamedSharding(mesh, jax.P())) for k, v in tree.items()}
    with jax.set_mesh(mesh):
        assert non_finite_arrays(placed) == ["b", "c"]


@pytest.mark.exhaustive
def test_sharded_steps_are_those_of_one_device(tmp_path):
    """Momenta are sharded as their parameters, and the teacher too, which is constant and not saved."""
    options = {"optax_name": "muon", "optax": {"ns_steps": 1}, "lr": 0.01, "schedule": {"decay_type": "constant"}}
    options |= {"model.num_heads": 4, "model.mlp_dim": 32, "model.depth": 2, "model.scan": True, "input.batch_size": 16}
    options |= {"layer_decay": 0.5, "freeze_layers": 1, "ema_decay": 0.9, "ema_warmup": True}
    options["model.head_zeroinit"] = False  # which would make the gradients of all layers below it zero
    options["model.qkv_bias"] = "qv"  # the gradient of a bias of keys is zero but for rounding, which Adam amplifies
    (before, one), (_, many) = steps_on_meshes(2, **options, **{"distill.teacher": save_teacher(tmp_path / "teacher")})
    for tree in ("params", "ema"):
        for a, b in zip(*(jax.tree.leaves(getattr(state, tree)) for state in (one, many)), strict=True):
            np.testing.assert_allclose(b, a, atol=1e-4)
    assert not same(one.params, before.params)
    momenta = {name.split("/mu/")[1]: x for name, x in by_name(many.opt_state).items() if "/mu/" in name}
    params = by_name(many.params)
    assert len(momenta) > 10
    assert all(momentum.sharding == params[name].sharding for name, momentum in momenta.items())
    assert any("fsdp" in p.sharding.spec for p in params.values())
    assert same(jax.device_get(many.teacher), before.teacher)
    assert not any("teacher" in name for name in by_name(many.items()))
    kernel = many.teacher["Transformer"]["encoderblock_0"]["MlpBlock_0"]["Dense_0"]["kernel"]
    assert {"fsdp", "tensor"} <= {name for axis in kernel.sharding.spec for name in np.ravel(axis)}
