"""Logits of a model for real inputs; a conversion ends with a comparison of them.

A language model is applied layer by layer, with the parameters of one layer in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from PIL import Image

import input_pipeline
from dcvit.models import lm, vit
from dcvit.models.decoder import token_context
from dcvit.parallel.trees import nested
from dcvit.weights.families import Weights
from dcvit.weights.family import build, example
from dcvit.weights.placement import place_params
from input_pipeline.text.tokenizer import ByteTokenizer

IMAGES, ROWS = 4, 2
DARKEST = 0.4  # brightness of the last channel of an image; that of the first is 1
BEYOND = 32  # tokens of a row beyond the first window, as far as the context allows
TOKENS = 128  # of a row without windows
EPSILON = 1e-3  # smallest scale of logits for the tolerance


def inputs(weights: Weights) -> np.ndarray:
    """Return real inputs: scikit-learn's digits at the model's resolution, or source code of Python as tokens."""
    shape = example(weights.description, weights.params).shape
    if weights.description.model_name == "vit":
        return _digits(*shape[1:])
    net = build(weights.description)
    assert isinstance(net, lm.LM)
    length = net.window + BEYOND if net.window_pattern != "none" else TOKENS
    return _text(min(length, net.context), net.vocab_size)


def _digits(height: int, width: int, channels: int) -> np.ndarray:
    """Return images of digits, with values in [-1, 1]; channels differ in brightness, so that their order matters."""
    source = input_pipeline.open_source("digits", split="test")
    images = []
    for i in range(IMAGES):
        gray = Image.fromarray(source[i]["image"][..., 0]).resize((width, height), Image.Resampling.BILINEAR)
        images.append(np.asarray(gray)[..., None] * np.linspace(1, DARKEST, channels))
    return np.stack(images).astype(np.float32) / 127.5 - 1


def _text(length: int, vocab_size: int) -> np.ndarray:
    """Return rows of `length` tokens: bytes of Python code, multiplied so that they spread over the vocabulary."""
    source = input_pipeline.open_source("stdlib", split="validation", context=length)
    rows = np.stack([source[i]["tokens"][:length] for i in range(ROWS)]).astype(np.int64)
    spread = rows * max(vocab_size // ByteTokenizer.vocab_size, 1)
    return (spread % vocab_size).astype(np.int32)


def compute(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Return the float32 logits of a model of this project, computed on the host.

    Raises:
      CheckpointError: a parameter is damaged or not finite.
    """
    with jax.default_device(_host()), jax.default_matmul_precision("highest"):
        net = build(weights.description)
        read = functools.partial(_read, weights)
        return _language_logits(net, read, x) if isinstance(net, lm.LM) else np.asarray(_compiled(net)(read(""), x))


def _host() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _read(weights: Weights, path: str) -> PyTree:
    """Read the parameters at or below a path of the tree, "" for all, in float32."""
    place = jax.sharding.SingleDeviceSharding(_host())
    below = f"{path}/" if path else ""
    chosen = {name: x for name, x in weights.params.items() if name == path or name.startswith(below)}
    like = {name: jax.ShapeDtypeStruct(tensor.shape, np.float32, sharding=place) for name, tensor in chosen.items()}
    tree: PyTree = place_params(chosen, nested(like), str(weights.path))
    for part in path.split("/") if path else ():
        tree = tree[part]
    return tree


@functools.lru_cache(maxsize=1)  # of the source and of the result
def _compiled(net: vit.ViT) -> Callable[..., jax.Array]:
    return jax.jit(lambda params, x: net.apply({"params": params}, x)[0])


def _language_logits(net: lm.LM, read: Callable[[str], PyTree], tokens: np.ndarray) -> np.ndarray:
    """Return logits from the embedding, each layer and the head in turn; `read` returns the parameters at a path."""
    windows = lm.layer_windows(net)
    context = token_context(jnp.asarray(tokens), net.end_of_text)
    x = jnp.take(read("embedding/embedding"), tokens, axis=0)
    if net.position == "learned":
        x = x + jnp.take(read("pos_embedding"), context.positions, axis=0, mode="clip")

    for i in range(net.depth):
        layer = _compiled_layer(net, windows[i % len(windows)])
        x = layer(read(f"Transformer/decoderblock_{i}"), x, context)
    norm = net.decoder(jnp.dtype("float32")).norm()
    hidden: Any = norm.apply({"params": read("Transformer/decoder_norm")}, x)
    kernel = read("embedding/embedding").T if net.tied else read("head/kernel")
    return np.asarray(lm.unembed(hidden, kernel))


@functools.lru_cache(maxsize=2)  # a layer with and without a window
def _compiled_layer(net: lm.LM, window: int | None) -> Callable[..., jax.Array]:
    block = net.decoder(jnp.dtype("float32")).layer(window=window)
    return jax.jit(lambda params, x, context: block.apply({"params": params}, x, context, None)[0])


def difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute difference of logits (inf for other shapes), and the standard deviation of `ours`."""
    if ours.shape != theirs.shape:
        return float("inf"), 0.0
    return float(np.max(np.abs(ours.astype(np.float64) - theirs))), max(float(np.std(ours)), EPSILON)
