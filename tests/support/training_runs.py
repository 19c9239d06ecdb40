"""Tiny training set-ups and runs that several test files share."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from small_models import jit
from trained_workdirs import LM_TINY, TINY, load_params

from dcvit import cli, train
from dcvit.config import load as configs
from dcvit.config import values
from dcvit.config.durations import Durations
from dcvit.errors import ConfigError
from dcvit.parallel import sharding
from dcvit.training import hooks, step
from dcvit.training.optim import make_optimizer
from dcvit.training.setup import make_setup


def same(a, b):
    """Return True if two trees of arrays are equal bit for bit."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def same_runs(one, other):
    """Return True if two workdirs have equal metrics and, in the last checkpoint, equal parameters bit for bit."""
    logs = {(workdir / "metrics.jsonl").read_bytes() for workdir in (one, other)}
    return len(logs) == 1 and same(load_params(one), load_params(other))


def small_setup(**overrides):
    """Return the setup of a small image model with plain attention, which compiles fastest."""
    options = {"total_steps": 10, "model.width": 16, "model.depth": 1, "model.compose": None, **overrides}
    return make_setup(configs.load("vit_digits", [f"{k}={v}" for k, v in options.items()]), evaluate=False)


def small_lm_setup(**overrides):
    """Return the setup of a small language model with plain attention."""
    options = LM_TINY | {"model.depth": 1, "model.compose": None} | overrides
    return make_setup(configs.load("lm_stdlib", [f"{k}={v}" for k, v in options.items()]), evaluate=False)


def optimizer_of(params, total_steps, depth=0, **keys):
    """Return the optimizer of a config with these keys."""
    config = ConfigDict(values.defaults() | keys)
    return make_optimizer(config, params, Durations(1, 1, total_steps), depth)[0]


def refusal(make, **overrides):
    """Return the message of the ConfigError of a setup with these overrides, which is one line."""
    with pytest.raises(ConfigError) as error:
        make(**overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def perturbed_params(setup):
    """Return initial parameters plus a pattern, so that no layer is zero."""

    def perturbed(p):
        return p + 0.1 * jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape)

    return jax.jit(lambda: jax.tree.map(perturbed, step.init_params(setup, jax.random.key(0))))()


def make_step(setup):
    """Return a state, a batch and the jitted step of a setup."""
    batch = {k: jnp.asarray(v) for k, v in next(setup.data.batches(0)).items()}
    return step.initial_state(setup, perturbed_params(setup)), batch, jax.jit(step.make_update(setup))


def nats(net, params, tokens):
    """Return -log p of each token but the first of each row, by a softmax in float64."""
    logits = np.asarray(jit(net.apply)({"params": params}, jnp.asarray(tokens[:, :-1]))[0], np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return log_z - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]


def steps_of(run, count):
    """Return the state before and after the first steps of a setup on its mesh, and the metrics of the last."""
    mesh, data, teacher = run.model.mesh, run.data, run.task.distillation
    shapes = step.state_shapes(run)
    with jax.set_mesh(mesh):
        state = jax.jit(
            lambda: step.initial_state(run, step.init_params(run, jax.random.key(0))),
            out_shardings=jax.tree.map(lambda s: s.sharding, shapes.replace(teacher=None)),
        )()
        state = state.replace(teacher=teacher and teacher.load(mesh, run.model.strategy))
        before, update = jax.device_get(state), step.jit_update(run, shapes)
        for batch in itertools.islice(data.batches(0), count):
            state, metrics = update(state, sharding.put_batch(batch, mesh, data.batch_size))
    return before, state, metrics


def steps_on_meshes(count, **overrides):
    """Yield the state before and after some steps of a small model: replicated, and sharded over eight devices."""
    for mesh in ({}, {"mesh": (("data", 2), ("fsdp", 2), ("tensor", 2)), "sharding_strategy": "fsdp+tensor"}):
        before, after, _ = steps_of(small_setup(**overrides, **mesh), count)
        yield before, after


@functools.cache
def shared_step():
    """Return setup, state, batch and jitted step of the default small model, compiled once."""
    with jax.numpy_dtype_promotion("standard"):
        setup = small_setup(ema_decay=0.8)
        return setup, *make_step(setup)


def digits_command(workdir, *words, base=TINY, **overrides):
    """Train a tiny classifier of digits as the command does; return the exit status."""
    options = [f"--config.{key}={value}" for key, value in {**base, **overrides}.items()]
    with jax.numpy_dtype_promotion("standard"):
        return cli.run(train.main, ["--config", "vit_digits", "--workdir", str(workdir), *options, *words])


def lm_command(workdir, *words, **overrides):
    """Train a tiny language model as the command does; return the exit status."""
    options = [f"--config.{key}={value}" for key, value in {**LM_TINY, **overrides}.items()]
    return cli.run(train.main, ["--config", "lm_stdlib", "--workdir", str(workdir), *options, *words])


@contextlib.contextmanager
def interrupted_before(monkeypatch, number):
    """Raise KeyboardInterrupt before a step; yield the list of steps that were started or interrupted."""
    steps = []

    def before_step(self, step):
        steps.append(step)
        if step == number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hooks.MetricsHook, "before_step", before_step)
        yield steps
