"""Meshes and strategies: what is split, what is refused, and that nothing of it changes what is learnt."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import build, cli, sharding, step, train
from dcvit import config as configs
from dcvit.checkpoint import Checkpoints, load_params
from dcvit.config import ConfigError
from dcvit.models import lm, vit
from dcvit.tasks import TrainingData

MESHES = {
    "ddp": [("data", 8)],
    "fsdp": [("data", 2), ("fsdp", 4)],
    "tensor": [("data", 2), ("tensor", 4)],
    "fsdp+tensor": [("data", 2), ("fsdp", 2), ("tensor", 2)],
}
ATTENTION = {
    "plain": {"model.compose": None},
    "all heads": {"model.compose": "both", "model.static": True},
    "groups": {"model.compose": "both", "model.static": True, "model.groups": 4},
}
TINY = {
    "vit": {"model.width": 32, "model.depth": 2, "model.num_heads": 8, "model.mlp_dim": 64, "model.patch_size": (4, 4)},
    "lm": {
        "model.width": 32, "model.num_heads": 8, "model.mlp_dim": 64, "model.window": 8,
        "model.context": 32, "input.data.context": 32, "evals.validation.data.context": 32,
    },
}  # fmt: skip
CONFIGS = {"vit": "vit_digits", "lm": "lm_stdlib"}


def configured(model, **overrides):
    """A tiny config whose optimiser keeps each step's gradient as its state."""
    fixed = {"total_steps": 10, "input.batch_size": 16, "optax_name": "trace", "optax": {"decay": 0.0}, "lr": 0.02}
    fixed |= {"grad_clip_norm": None, "schedule": {"decay_type": "constant"}, "wd": 0.01, "ema_decay": 0.9}
    if model == "lm":  # window patterns of two layers: a scan of two, or one unrolled
        fixed["model.depth"] = 4 if overrides.get("model.scan") else 2
    words = [f"{k}={v}" for k, v in {**fixed, **TINY[model], **overrides}.items()]
    return configs.load(CONFIGS[model], words)


def five_steps(config, devices=None):
    """The losses, and the state after each step, of a config on the first devices, on the host."""
    mesh = build.mesh(config, jax.devices()[:devices])
    data = TrainingData(config, mesh)
    net = build.model(data.config)
    tx, schedule = build.optimiser(config, build.param_shapes(net, data.task.example), data)
    placed = step.state_shapes(data.config, net, tx, data.task.example, mesh)
    update = step.jit_update(net, data.task, tx, schedule, placed, mesh)

    def fresh():  # heads start at zero, and then nothing else has a gradient
        params = net.init(jax.random.key(0), jnp.zeros(data.task.example.shape, data.task.example.dtype))["params"]
        params = jax.tree.map(lambda p: p + 0.05 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)
        return step.initial_state(data.config, params, tx)

    losses, states = [], []
    with jax.set_mesh(mesh):
        state = jax.jit(fresh, out_shardings=jax.tree.map(lambda s: s.sharding, placed))()
        for batch, _ in zip(data.batches(0), range(5), strict=False):
            state, metrics = update(state, sharding.put_batch(batch, mesh, data.batch_size))
            losses.append(float(metrics["loss"]))
            states.append(jax.device_get(state))
    return losses, states, state


@functools.cache
def alone(model, attention, scan):
    return five_steps(configured(model, **ATTENTION[attention], **{"model.scan": scan}), 1)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("model", CONFIGS)
def test_every_strategy_learns_what_one_device_does(library_promotion, model, attention, scan, strategy):
    """Five steps: losses, gradients (the optimiser's state), parameters and their average."""
    losses, states = alone(model, attention, scan)
    options = {"mesh": MESHES[strategy], "sharding_strategy": strategy, "model.scan": scan}
    found, spread, last = five_steps(configured(model, **ATTENTION[attention], **options))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for one, many in zip(states, spread, strict=True):
        names = jax.tree_util.tree_flatten_with_path(one)[0]
        for (path, a), b in zip(names, jax.tree.leaves(many), strict=True):
            largest = max(1e-3, float(np.abs(a).max(initial=0)))  # of an array; no value is 1e-5 off
            np.testing.assert_allclose(b, a, atol=min(1e-5, 5e-4 * largest), rtol=0, err_msg=jax.tree_util.keystr(path))
    split = {name for leaf in jax.tree.leaves(last.params) for axis in leaf.sharding.spec for name in np.ravel(axis)}
    assert split - {None} == set(strategy.split("+")) - {"ddp"}
