"""Comparison of a converted model with its source: logits for random inputs, and pixels of the preprocessing.

A language model of this project is applied layer by layer, with the parameters of one layer in memory. The libraries of
other formats hold all of them, so that they evaluate models of up to `MAX_BYTES`.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from PIL import Image

from dcvit.errors import CheckpointError, first_line_with_type
from dcvit.models import lm
from dcvit.parallel.trees import nested
from dcvit.weights import dcvit_hf, preprocessing
from dcvit.weights.families import Weights
from dcvit.weights.family import Description, build, example
from dcvit.weights.placement import place_params
from dcvit.weights.preprocessing import Preprocessing
from dcvit.weights.tensors import read_json
from input_pipeline import Preprocess
from input_pipeline.optional import folder_of
from input_pipeline.preprocess.builder import decoding

IMAGES, ROWS = 4, 2
BEYOND = 32  # tokens of a row beyond the first window, as far as the context allows
TOKENS = 128  # of a row without windows
MAX_BYTES = 2 << 30  # of float32 parameters
PHOTO, ROWS_OF_PHOTO = "china.jpg", 320  # of scikit-learn, cut to 320x640 pixels: libraries round other sides apart


def inputs(weights: Weights) -> np.ndarray:
    """Return random inputs: images with values in [-1, 1] at the model's resolution, or rows of tokens."""
    rng = np.random.default_rng(0)
    if weights.description.model_name == "vit":
        shape = example(weights.description, weights.params).shape
        return rng.uniform(-1, 1, (IMAGES, *shape[1:])).astype(np.float32)
    net = build(weights.description)
    length = net.window + BEYOND if net.window_pattern != "none" else TOKENS
    return rng.integers(net.vocab_size, size=(ROWS, min(length, net.context)), dtype=np.int32)


def by_dcvit(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Return the float32 logits of a model of this project, computed on the host.

    Raises:
      CheckpointError: a parameter is damaged or not finite.
    """
    host = jax.local_devices(backend="cpu")[0]
    with jax.default_device(host), jax.default_matmul_precision("highest"):
        net = build(weights.description)
        read = functools.partial(_read, weights, jax.sharding.SingleDeviceSharding(host))
        return _language_logits(net, read, x) if isinstance(net, lm.LM) else np.asarray(_compiled(net)(read(""), x))


def _read(weights: Weights, place: jax.sharding.Sharding, path: str) -> PyTree:
    """Read the parameters at or below a path of the tree, "" for all, in float32."""
    below = f"{path}/" if path else ""
    chosen = {name: tensor for name, tensor in weights.params.items() if f"{name}/".startswith(below)}
    like = {name: jax.ShapeDtypeStruct(tensor.shape, np.float32, sharding=place) for name, tensor in chosen.items()}
    tree: PyTree = place_params(chosen, nested(like), str(weights.path))
    for part in path.split("/") if path else ():
        tree = tree[part]
    return tree


def _language_logits(net: lm.LM, read: Callable[[str], PyTree], tokens: np.ndarray) -> np.ndarray:
    """Return logits from the embedding, each layer and the head in turn; `read` returns the parameters at a path."""
    windows, decoder = lm.layer_windows(net, tokens.shape[1]), net.decoder(jnp.dtype("float32"), tokens.shape[1])
    context = net.token_context(jnp.asarray(tokens))
    x = jnp.take(read("embedding/embedding"), tokens, axis=0)
    if net.position == "learned":
        x = x + jnp.take(read("pos_embedding"), context.positions, axis=0, mode="clip")
    for i in range(net.depth):
        layer = decoder.layer(window=windows[i % len(windows)])
        x = _compiled(layer)(read(f"Transformer/decoderblock_{i}"), x, context, None)
    hidden: Any = decoder.norm().apply({"params": read("Transformer/decoder_norm")}, x)
    kernel = read("embedding/embedding").T if net.tied else read("head/kernel")
    return np.asarray(lm.unembed(hidden, kernel))


@functools.lru_cache(maxsize=2)  # of the source and of the result; a layer with and without a window
def _compiled(module: nn.Module) -> Callable[..., jax.Array]:
    return jax.jit(lambda params, *inputs: module.apply({"params": params}, *inputs)[0])


def auto_class(description: Description) -> str:
    """Return the automatic class of transformers for a model, without a head for one that has none."""
    if description.model_name == "lm":
        return "AutoModelForCausalLM"
    return "AutoModelForImageClassification" if description.num_outputs else "AutoModel"


def by_transformers(weights: Weights, folder: Path, x: np.ndarray) -> np.ndarray | None:
    """Return the logits, or else the features, that transformers computes for a folder. Its code is not executed.

    None for a folder of another library, or if transformers is absent or the model is larger than `MAX_BYTES`.

    Raises:
      CheckpointError: transformers cannot load the folder, or a parameter is missing there.
    """
    kind = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if not kind or not _can_evaluate(weights, "torch", "transformers"):
        return None
    import torch
    import transformers

    name = auto_class(weights.description)
    transformers.utils.logging.disable_progress_bar()
    try:
        if kind in dcvit_hf.CLASSES:
            from dcvit.weights import modeling_dcvit

            load = getattr(modeling_dcvit, dcvit_hf.CLASSES[kind][name]).from_pretrained
        else:
            load = functools.partial(getattr(transformers, name).from_pretrained, trust_remote_code=False)
        model, report = load(folder, dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            found = model.eval()(_for_torch(x))
    except ImportError:  # an old release, or torchvision does not fit torch
        return None
    except Exception as e:  # transformers has many types of errors, of values in config.json and of shapes
        raise CheckpointError(f"{folder}: transformers cannot evaluate the model: {first_line_with_type(e)}") from None
    missing = sorted(report["missing_keys"])  # which have random values
    if name == "AutoModel" and all("pooler" in key for key in missing):
        return np.asarray((found.last_hidden_state[:, 0] if missing else found.pooler_output).numpy())
    if missing:
        raise CheckpointError(f"{folder}: transformers misses parameters of its class: {', '.join(missing):.200}")
    return np.asarray(found.logits.numpy())


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
    with Image.open(folder_of("sklearn") / "datasets" / "images" / PHOTO) as file:
        photo = file.crop((0, 0, file.width, ROWS_OF_PHOTO)).convert("RGB" if settings.channels == 3 else "L")
    photo.save(encoded := io.BytesIO(), "PNG")
    image = encoded.getvalue() if decoding(pp) else np.asarray(photo).reshape(*photo.size[::-1], -1)
    ours = Preprocess(pp)({"image": image, "label": 0}, np.random.default_rng(0))["image"]
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
