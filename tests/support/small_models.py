"""Small models with random parameters, and a `jit` that compiles them quickly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.models import lm
from dcvit.parallel.trees import by_name

VOCAB, LENGTH, WINDOW, HEADS = 17, 12, 3, 4
SMALL = dict(context=LENGTH, width=32, depth=2, mlp_dim=40, num_heads=HEADS, window=WINDOW)

# Compilation takes most of the time of these tests. Without LLVM's optimizations it takes about half as long.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def name_of(path):
    """Return the name of a parameter, such as "Transformer/decoder_norm/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def param_shapes(net, example):
    """Return the parameters of a model as shapes, without computing any."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.tree.map(lambda shape: shape, _param_shapes(net, jax.typeof(example), mesh, jax.config.jax_enable_x64))


@functools.cache
def _param_shapes(net, example, mesh, x64):
    """Trace a model once for each mesh and precision, on which the shapes' shardings and dtypes depend."""
    return jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct(example.shape, example.dtype))["params"]


def stack_blocks(params, period=1):
    """Return the parameters of an unrolled model as those of a scanned one with groups of `period` blocks.

    Blocks that do not repeat the structure of the first group, and those after them, stay as they are.
    """
    transformer = dict(params["Transformer"])
    side = "decoder" if "decoderblock_0" in transformer else "encoder"
    structures = []
    while f"{side}block_{len(structures)}" in transformer:
        structures.append(jax.tree.structure(transformer[f"{side}block_{len(structures)}"]))
    same = next((i for i, found in enumerate(structures) if found != structures[i % period]), len(structures))
    blocks = [transformer.pop(f"{side}block_{i}") for i in range(same - same % period)]
    if blocks:
        layers = [jax.tree.map(lambda *x: jnp.stack(x), *blocks[i::period]) for i in range(period)]
        group = {f"layer_{i}": layer for i, layer in enumerate(layers)}
        single = side == "encoder" and period == 1
        name = "encoderblock" if single else {"encoder": "encodergroup", "decoder": "group"}[side]
        transformer[name] = group["layer_0"] if single else group
    return {**params, "Transformer": transformer}


def random_params(shapes, seed=1, std=0.2):
    """Return random values for every parameter, around 1 for norms, so that no initial zero hides an effect."""
    rng = np.random.default_rng(seed)
    value = lambda path, x: rng.normal(float(path[-1].key == "scale"), std, x.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(value, shapes))


def make_lm(preset=None, **fields):
    """Return a small language model and random parameters."""
    net = lm.Model(VOCAB, preset=preset, **{**SMALL, **fields})
    return net, random_params(param_shapes(net, jnp.zeros((1, 2), jnp.int32)))


def make_tokens(batch=2, length=LENGTH, seed=2):
    """Return random tokens without the token 0."""
    return jnp.asarray(np.random.default_rng(seed).integers(1, VOCAB, size=(batch, length)), jnp.int32)


def logits_of(net, params, inputs):
    """Return the logits of a model."""
    return np.asarray(jit(lambda params, inputs: net.apply({"params": params}, inputs)[0])(params, inputs))


def save_npz(path, params):
    """Write parameters in big_vision's format and return the path."""
    np.savez(path, **by_name(params))
    return str(path)


def assert_trees_close(a, b, rtol=1e-4, atol=1e-5):
    """Assert that the arrays of two trees are close."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


def assert_trees_equal(a, b):
    """Assert that the arrays of two trees are equal."""
    jax.tree.map(np.testing.assert_array_equal, a, b)
