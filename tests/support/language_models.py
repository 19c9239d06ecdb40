"""Small language models without training: random ones, and one that follows given chains of tokens."""

import itertools

import jax.numpy as jnp
import numpy as np
from small_models import param_shapes, random_params

from dcvit.inference.generation import generate
from dcvit.models import lm

VOCAB, CONTEXT = 7, 18
TINY = {"context": CONTEXT, "width": 16, "mlp_dim": 16, "num_heads": 4, "depth": 2, "window": 4}
GPT3 = {"position": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "use_bias": True}
LLAMA = {"position": "rotary", "norm": "rmsnorm", "mlp": "swiglu"}
DC = {"compose": "both", "window_pattern": "1:1"}


def random_model(**fields):
    """A model with random parameters, large enough that its compositions change the result."""
    model = lm.Model(VOCAB, **{**TINY, **fields})
    return model, random_params(param_shapes(model, jnp.zeros((1, 2), jnp.int32)), std=0.1)


def chain_model(*chains, size=257):
    """A model without layers in which each token of a chain is followed by the next one, and its parameters."""
    model = lm.Model(size, context=512, width=size, depth=0, num_heads=1, rotary_fraction=0.008)
    kernel = np.zeros((size, size), np.float32)
    for chain in chains:
        for a, b in itertools.pairwise(chain):
            kernel[a, b] = 10
    params = {"embedding": {"embedding": np.eye(size, dtype=np.float32)}, "head": {"kernel": kernel}}
    return model, params | {"Transformer": {"decoder_norm": {"scale": np.ones(size, np.float32)}}}


def complete(model, params, prompts, options, examples=None):
    """All new tokens of each example of `generate`."""
    steps = [*generate(model, params, prompts, options, examples)]
    return [[step[i] for step in steps if step[i] is not None] for i in range(len(prompts))]
