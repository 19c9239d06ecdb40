"""Initial parameters: those of one program, from few small ones."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from training_runs import same, small_lm_setup, small_setup

from dcvit.parallel.sharding import make_mesh, with_shardings
from dcvit.training import initialize, step

pytestmark = pytest.mark.usefixtures("library_promotion")
COMPOSED = {"model.compose": "both", "model.depth": 3}
SETUPS = {
    "vit": lambda: small_setup(**COMPOSED),
    "vit with other initializers": lambda: small_setup(
        **{"model.pool_type": "map", "model.rep_size": True, "model.head_zeroinit": False, "model.static": True}
    ),
    "lm": lambda: small_lm_setup(**COMPOSED),
    "scanned lm": lambda: small_lm_setup(**COMPOSED, **{"model.scan": True}),
}


def both(setup, mesh, strategy="ddp", dont=()):
    """Return the parameters of `initialize`, without those whose name is in `dont`, and those of one program."""
    places = jax.tree.map(lambda s: s.sharding, with_shardings(setup.model.shapes, mesh, strategy))
    words = np.asarray(jax.random.key_data(jax.random.key(3)))

    def init(words):
        return step.init_params(setup, jax.random.wrap_key_data(words))

    with jax.set_mesh(mesh):
        wanted = {name: None if name in dont else places[name] for name in places}
        return initialize.initialize(init, words, wanted), jax.jit(init, out_shardings=places)(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_parameters_are_bitwise_those_of_one_program(name):
    found, expected = both(SETUPS[name](), make_mesh([("data", 1)], jax.devices()[:1]))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert same(found, expected)


@pytest.mark.slow
def test_parameters_are_bitwise_those_of_one_program_at_the_usual_level_of_optimization():
    """The other tests compile everything at level 0."""
    code = "import test_initialize as t; print(t.same(*t.both(t.SETUPS['vit'](), t.make_mesh([('data', -1)]))))"
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


@pytest.mark.slow
def test_sharded_parameters_are_bitwise_those_of_one_program():
    found, expected = both(small_setup(**COMPOSED), make_mesh([("fsdp", 2)], jax.devices()[:2]), "fsdp")
    assert same(found, expected)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, expected)


def test_equal_layers_share_programs_and_parameters_that_are_not_wanted_have_none(monkeypatch):
    traced = []
    program = initialize._from_data
    monkeypatch.setattr(initialize, "_from_data", lambda *args: (traced.append(args), program(*args))[1])
    counts = []
    for depth in (1, 3):
        found, _ = both(small_setup(**{"model.depth": depth}), make_mesh([("data", 1)], jax.devices()[:1]))
        counts.append(len(traced))
        traced.clear()
    assert counts[0] == counts[1]
    found, _ = both(small_setup(), make_mesh([("data", 1)], jax.devices()[:1]), dont=tuple(found))
    assert jax.tree.leaves(found) == traced == []
