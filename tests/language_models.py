"""Small language models without training: random ones, and one that follows given chains of tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.models import lm

VOCAB, CONTEXT = 7, 18
TINY = {"context": CONTEXT, "width": 16, "mlp_dim": 16, "num_heads": 4, "depth": 2, "window": 4}
GPT3 = {"position": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "use_bias": True}
LLAMA = {"position": "rotary", "norm": "rmsnorm", "mlp": "swiglu"}
DC = {"compose": "both", "window_pattern": "1:1"}


def random_model(**fields):
    """A model with random parameters, large enough that its compositions change the result."""
    model = lm.Model(VOCAB, **{**TINY, **fields})
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    rng = np.random.default_rng(1)
    values = lambda path, x: rng.normal(float(path[-1].key == "scale"), 0.1, x.shape).astype(x.dtype)  # noqa: E731
    return model, jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(values, shapes))


def chain_model(*chains, size=257, context=512):
    """A model without layers in which each token of a chain is followed by the next one, and its parameters."""
    model = lm.Model(size, context=context, width=size, depth=0, num_heads=1, rotary_fraction=0.01)
    kernel = np.zeros((size, size), np.float32)
    for chain in chains:
        for a, b in itertools.pairwise(chain):
            kernel[a, b] = 10
    params = {"embedding": {"embedding": np.eye(size, dtype=np.float32)}, "head": {"kernel": kernel}}
    return model, params | {"Transformer": {"decoder_norm": {"scale": np.ones(size, np.float32)}}}
