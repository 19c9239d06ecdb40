"""Comparison of a converted model with its source: logits for real inputs, and pixels of the preprocessing.

A language model of this project is applied layer by layer, with the parameters of one layer in memory. The libraries of
other formats hold all of them, so that they evaluate models of up to `MAX_BYTES`.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from PIL import Image

import input_pipeline
from dcvit.errors import CheckpointError, first_line_with_type
from dcvit.models import lm, vit
from dcvit.models.decoder import token_context
from dcvit.parallel.trees import nested
from dcvit.weights import preprocessing
from dcvit.weights.families import Weights
from dcvit.weights.family import build, example
from dcvit.weights.placement import place_params
from dcvit.weights.preprocessing import Preprocessing
from dcvit.weights.tensors import read_json
from input_pipeline.optional import require
from input_pipeline.preprocess.builder import decoding
from input_pipeline.text.tokenizer import ByteTokenizer

IMAGES, ROWS = 4, 2
DARKEST = 0.4  # brightness of the last channel of an image; that of the first is 1
BEYOND = 32  # tokens of a row beyond the first window, as far as the context allows
TOKENS = 128  # of a row without windows
MAX_BYTES = 2 << 30  # of float32 parameters
PHOTO, ROWS_OF_PHOTO = "china.jpg", 320  # of scikit-learn, cut to 320x640 pixels: libraries round other sides apart
OURS = ("dcvit", "dcformer")  # model types of modeling_dcvit.py


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


def by_dcvit(weights: Weights, x: np.ndarray) -> np.ndarray:
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


def by_transformers(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray | None:
    """Return the logits, or else the features, that transformers computes for a folder. Its code is not executed.

    None if the library is absent, the model is larger than `MAX_BYTES`, or config.json does not name one class of its
    model type whose outputs are logits, or for images also features.

    Raises:
      CheckpointError: transformers cannot load the folder.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    kind, names = config.get("model_type"), config.get("architectures")
    if not kind or not names or not _can_evaluate(weights, "torch", "transformers"):
        return None
    import torch
    import transformers

    library: ModuleType = transformers
    try:
        if kind in OURS:
            from dcvit.weights import modeling_dcvit as library
        (model_class,) = (getattr(library, name) for name in names)
        is_model = issubclass(model_class, transformers.PreTrainedModel) and model_class.config_class.model_type == kind
    except Exception:  # an old release, or torchvision does not fit torch; or the names are no classes
        return None
    if not is_model:
        return None
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            found = model.eval()(_for_torch(x))
    except Exception as e:  # transformers has many types of errors, of values in config.json and of shapes
        raise CheckpointError(f"{folder}: transformers cannot evaluate the model: {first_line_with_type(e)}") from None
    if "logits" in found:
        return np.asarray(found.logits.numpy())
    if weights.description.model_name == "lm":
        return None
    has_pooler = not any("pooler" in name for name in report["missing_keys"])  # a missing one has random weights
    return np.asarray((found.pooler_output if has_pooler else found.last_hidden_state[:, 0]).numpy())


def by_timm(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray | None:
    """Return the logits that timm computes for a folder; None if it is absent or the model exceeds `MAX_BYTES`."""
    if not _can_evaluate(weights, "torch", "timm"):
        return None
    import timm
    import torch
    from safetensors.torch import load_file

    config = read_json(folder / "config.json")
    model = timm.create_model(config["architecture"], **config.get("model_args", {}), num_classes=config["num_classes"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        return np.asarray(model.eval()(_for_torch(x)).numpy())


def _can_evaluate(weights: Weights, *libraries: str) -> bool:
    """Return True for a model that fits libraries which can be imported: torchvision may not fit torch."""
    try:
        return weights.size * 4 <= MAX_BYTES and all(importlib.import_module(name) for name in libraries)
    except (ImportError, RuntimeError):
        return False


def _for_torch(x: np.ndarray) -> Any:
    import torch

    images = x.ndim == 4
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2) if images else x.astype(np.int64)))


def pixel_difference(pp: str) -> tuple[float, float]:
    """Compare the pixels of a preprocessing string, for a photo, with those of the settings that exports write for it.

    Returns:
      The largest and the mean absolute difference, in levels of images of 8 bits.

    Raises:
      CheckpointError: settings of other libraries cannot express the string; see `preprocessing.from_pp`.
      InputError: a library that the string needs, such as TensorFlow, is not installed.
    """
    settings = preprocessing.from_pp(pp)
    pixels = require("sklearn.datasets").load_sample_image(PHOTO)[:ROWS_OF_PHOTO]
    photo = Image.fromarray(pixels).convert("RGB" if settings.channels == 3 else "L")
    photo.save(encoded := io.BytesIO(), "PNG")
    image = encoded.getvalue() if decoding(pp) else np.asarray(photo).reshape(*photo.size[::-1], -1)
    ours = input_pipeline.Preprocess(pp)({"image": image, "label": 0}, np.random.default_rng(0))["image"]
    levels = 255 * (ours * np.asarray(settings.std) + np.asarray(settings.mean))
    theirs = _by_pillow(settings, photo)
    if levels.shape != theirs.shape:
        return float("inf"), float("inf")
    difference = np.abs(levels - theirs)
    return float(difference.max()), float(difference.mean())


def _by_pillow(settings: Preprocessing, photo: Image.Image) -> np.ndarray:
    """Return the pixels in [0, 255] that image processors of other libraries resize and crop, before normalization."""
    rows, columns = settings.squash or settings.size
    if settings.resize and not settings.squash:
        rows, columns = (int(side * settings.resize / min(photo.size)) for side in (photo.height, photo.width))
    resized = np.asarray(photo.resize((columns, rows), Image.Resampling[settings.method.upper()]))
    height, width = settings.size
    top, left = (rows - height) // 2, (columns - width) // 2
    return resized.reshape(rows, columns, -1)[top : top + height, left : left + width].astype(np.float64)
