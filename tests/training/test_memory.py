"""Runs whose step needs more memory than the machine has are refused before the first step."""

import jax
import jax.numpy as jnp
import pytest

from dcvit.errors import ConfigError
from dcvit.parallel.sharding import data_mesh
from dcvit.training import memory

pytestmark = pytest.mark.usefixtures("library_promotion")


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
