"""Runs that need more memory than the machine has are refused, before they start or before the first step."""

import jax
import jax.numpy as jnp
import pytest
from training_runs import small_setup

from dcvit.errors import ConfigError
from dcvit.parallel.sharding import data_mesh
from dcvit.training import memory
from dcvit.training.step import state_shapes

pytestmark = pytest.mark.usefixtures("library_promotion")

ARRAYS = 4  # as large as the parameters: these, their gradients, and two moments of Adam


def check(setup, monkeypatch, available):
    monkeypatch.setattr(memory.memory, "available", lambda: available)
    shapes = state_shapes(setup)
    memory.check_state(setup.model.mesh, shapes, shapes.params)


def test_state_and_gradients_are_compared_with_the_memory_of_all_devices(monkeypatch):
    setup = small_setup(mesh=[("data", -1)], sharding_strategy="ddp")
    devices, size = jax.device_count(), sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
    needed = ARRAYS * 4 * size * devices
    with pytest.raises(ConfigError, match=f"^{size:,} trained parameters .* need .*; --config.check_memory=False"):
        check(setup, monkeypatch, needed - devices)
    check(setup, monkeypatch, 2 * needed)


def test_many_layers_are_refused_before_they_are_traced_and_the_check_can_be_disabled(monkeypatch):
    monkeypatch.setattr(memory, "MANY_LAYERS", 2)
    monkeypatch.setattr(memory.memory, "available", lambda: 1000)
    shapes = small_setup(**{"model.depth": 4, "check_memory": False}).model.shapes
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    with pytest.raises(ConfigError, match=f"^about {size:,} parameters with gradients need"):
        small_setup(**{"model.depth": 4})


def test_temporary_arrays_of_the_compiled_step_are_compared_too(monkeypatch):
    mesh, size = data_mesh(), 1000
    outer = jax.jit(lambda x: jnp.sin(jnp.outer(x, x)) @ x)  # its matrix is the temporary array
    compiled = outer.lower(jax.ShapeDtypeStruct((size,), jnp.float32)).compile()
    enough = 2 * 4 * size**2 * jax.device_count()
    monkeypatch.setattr(memory.memory, "available", lambda: enough)
    memory.check_step(mesh, compiled)
    monkeypatch.setattr(memory.memory, "available", lambda: 4 * size * jax.device_count())
    with pytest.raises(ConfigError, match="temporary arrays of a training step need"):
        memory.check_step(mesh, compiled)
