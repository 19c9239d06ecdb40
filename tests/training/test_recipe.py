"""The recipe of configs/vit_i1k.py against simulations in numpy: order of the records, optimizer."""

import math

import image_datasets
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import input_pipeline
from dcvit.config import load as configs
from dcvit.config.durations import Durations
from dcvit.training.optim import make_optimizer
from dcvit.training.setup import make_setup

SPEC = "vit_i1k:variant=DCViT-S/16"
AVERAGE = 0.9999  # the decay of averaged weights in the test; the recipe has none
PARAMS = {"head": {"bias": np.ones(4, np.float32), "kernel": np.ones(4, np.float32)}}  # kernels decay
LIMIT = 5e-4  # relative difference of float32 from the simulation in float64, after all steps


def order(size, seed, epoch):
    """Return the simulated order of an epoch: the records sorted by 64 random bits of Philox for each."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
    return np.argsort(generator.bit_generator.random_raw(size), kind="stable")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("library_promotion")
def test_batches_hold_the_records_of_the_simulated_order(tmp_path):
    """At steps on both sides of the borders of epochs, each of which has every record once."""
    image_datasets.imagenet2012(tmp_path, n_train=41)
    words = ["input.batch_size=8", "total_epochs=3", "schedule.warmup_steps=4", "model.depth=1"]
    setup = make_setup(configs.load(SPEC, [f"input.data.data_dir={tmp_path}", *words]), evaluate=False)
    source, seed = setup.data.source, setup.config.seed
    orders = [order(len(source), seed, epoch) for epoch in range(4)]
    for step in range(setup.plan.total_steps):
        places = [divmod(step * 8 + row, len(source)) for row in range(8)]
        records = [int(orders[epoch][place]) for epoch, place in places]
        assert [x["index"] for x in input_pipeline.batch_ids(source, 8, seed, step)] == records
        batches = setup.data.batches(step, range(8))
        found = next(batches)
        batches.close()
        assert np.argmax(found["labels"], axis=-1).tolist() == [int(source[i]["label"]) for i in records]
    for epoch in (0, 2):
        at = range(epoch * len(source), (epoch + 1) * len(source))
        found = np.array([input_pipeline.shuffle.example_at(i, len(source), seed) for i in at])
        assert {*found[:, 0]} == {epoch}
        np.testing.assert_array_equal(np.sort(found[:, 1]), np.arange(len(source)))


def simulated_factor(step, total_steps, warmup):
    """Return the factor of the learning rate in float64: a linear warm-up times a cosine over the other steps."""
    progress = np.clip((step - warmup) / (total_steps - warmup), 0, 1)
    return np.minimum(1, step / warmup) * 0.5 * (1 + np.cos(np.pi * progress))


def gradients(total_steps):
    """Return a gradient for each step and parameter, some of which are clipped, float32 of shape (total_steps, 8)."""
    step, parameter = np.arange(total_steps)[:, None], np.arange(8)
    noise = np.random.default_rng(0).normal(size=(total_steps, 8))
    return np.float32(0.15 * np.cos(step * (parameter + 1) / 3000) + 0.15 * noise * (1 + parameter % 3))


def optimized(optimizer, grads):
    """Return the parameters and their averages after each step of the optimizer, (steps, 8) each; kernels come last."""

    def step(carry, grad):
        params, state, average = carry
        tree = {"head": {"bias": grad[:4], "kernel": grad[4:]}}
        updates, state = optimizer.update(tree, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1 - AVERAGE)
        flat = [jnp.concatenate([x["head"]["bias"], x["head"]["kernel"]]) for x in (params, average)]
        return (params, state, average), (flat[0], flat[1])

    _, history = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))((PARAMS, optimizer.init(PARAMS), PARAMS))
    return np.asarray(history[0]), np.asarray(history[1])


def simulated(config, factor, grads):
    """Return the same in float64 with Adam's mean in bfloat16, and the number of steps whose gradient is clipped."""
    beta1, beta2, epsilon = config.optax.b1, config.optax.b2, 1e-8
    kept = float(ml_dtypes.bfloat16(beta1))  # optax multiplies the mean by β1 in bfloat16, and so by 0.8984
    params = average = np.ones(8)
    mean, square, clipped = np.zeros(8), np.zeros(8), 0
    decay = np.repeat([0.0, config.wd], 4)
    history = np.empty((2, *grads.shape))
    for step, raw in enumerate(grads.astype(np.float64)):
        norm = math.sqrt((raw**2).sum())
        grad = raw * min(1.0, config.grad_clip_norm / norm)
        clipped += norm > config.grad_clip_norm
        mean, square = kept * mean + (1 - beta1) * grad, beta2 * square + (1 - beta2) * grad**2
        corrected = mean / (1 - beta1 ** (step + 1)), square / (1 - beta2 ** (step + 1))
        update = config.lr * corrected[0] / (np.sqrt(corrected[1]) + epsilon) + decay * params
        params = params - factor[step] * update
        average = AVERAGE * average + (1 - AVERAGE) * params
        mean = mean.astype(ml_dtypes.bfloat16).astype(np.float64)
        history[:, step] = params, average
    return history[0], history[1], clipped


@pytest.mark.exhaustive
@pytest.mark.usefixtures("library_promotion")
def test_schedule_and_optimizer_are_those_of_the_simulation_over_all_steps():
    """Learning rate, Adam with a mean in bfloat16, clipping, weight decay and averaged parameters."""
    total, warmup = 20_000, 2_000
    config = configs.load(SPEC, [f"total_steps={total}", f"schedule.warmup_steps={warmup}"])
    optimizer, schedule, _ = make_optimizer(config, PARAMS, Durations(1024, 1_268_355, total))
    factor, grads = simulated_factor(np.arange(total), total, warmup), gradients(total)
    expected, expected_average, clipped = simulated(config, factor, grads)
    found, average = optimized(optimizer, grads)
    assert 0 < clipped < total
    assert relative(np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(total))), factor) < LIMIT
    assert relative(found, expected) < LIMIT
    assert relative(average, expected_average) < LIMIT


def relative(found, expected):
    """Return the largest difference, relative to the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
