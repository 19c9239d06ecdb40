"""Vision models of other libraries with random weights, and comparisons with the model that is read from a file."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from foreign_models import links_of, tensors_of
from small_models import jit

from dcvit.models import vit
from dcvit.weights import links as linking
from dcvit.weights.families import open_weights

TOLERANCE = 2e-5  # of logits of standard deviation about 1


def randomize(model, seed=0):
    """Set every parameter of a torch model to random values, around 1 for scales."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.ndim == 1 and name.endswith(("weight", "gamma", "lambda1")) else 0.0
            std = 1 / math.sqrt(parameter[0].numel()) if parameter.ndim in (2, 4) and "token" not in name else 0.3
            parameter.copy_(around + std * torch.randn(parameter.shape, generator=generator))
    return model.eval().float()


def images(size, seed=1):
    """Return two random images, B height width channels."""
    return np.random.default_rng(seed).normal(size=(2, *size, 3)).astype(np.float32)


def of_torch(model, pixels, result=lambda out: out):
    """Return the result of a torch model for images B height width channels."""
    with torch.no_grad():
        return result(model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))).numpy()


def of_dcvit(weights, pixels):
    """Return the output of the described model, after checking the names and shapes of all parameters."""
    net = vit.Model(weights.description.num_outputs, **weights.description.fields)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights.tree())
    expected = jax.eval_shape(net.init, jax.random.key(0), pixels)["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    return np.asarray(jit(lambda p, x: net.apply({"params": p}, x)[0])(params, jnp.asarray(pixels)))


def check_read(path, expected, pixels):
    """Open a file, compare the output of the model with the original's, and return the weights."""
    weights = open_weights(Path(path))
    assert 0.2 < expected.std() < 5
    found = of_dcvit(weights, pixels)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    return weights


def check_written_back(weights, sums=()):
    """Write the parameters with the links that read them: the tensors must be the same, bit for bit.

    `sums` names the tensors of tokens in front and of their position embeddings, of which only the sum is a parameter;
    so it is with the biases of the two heads of a distilled model.
    """
    links, tensors = links_of(weights), tensors_of(weights)
    written = dict(linking.write(links, weights.params))
    assert written.keys() == {name for link in links for name in link.theirs}
    ignored = {name for link in links if not link.ours for name in link.theirs}
    for link in (link for link in links if link.ours == ("head/bias",) and len(link.theirs) == 2):
        read, back = ([source[name] for name in link.theirs] for source in (tensors, written))
        np.testing.assert_array_equal(sum(back), sum(x.read() for x in read))
        ignored |= {*link.theirs}
    for name, value in written.items():
        if name not in sums and name not in ignored:
            np.testing.assert_array_equal(value, tensors[name].read(), err_msg=name, strict=True)
    if sums:
        *tokens, positions = (np.atleast_3d(written[name]) for name in sums)
        *read, table = (tensors[name].read() for name in sums)
        before, expected = np.concatenate(tokens, axis=1), np.concatenate(read, axis=1)
        count = table.shape[1] - weights.tree()["pos_embedding"].shape[1]
        np.testing.assert_array_equal(before[:, :count] + positions[:, :count], expected[:, :count] + table[:, :count])
        np.testing.assert_array_equal(before[:, count:], expected[:, count:])
        np.testing.assert_array_equal(positions[:, count:], table[:, count:])
