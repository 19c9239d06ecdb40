"""Checkpoints of LoRA adapters (`dcvit.models.lora`), merged into the base model's parameters as they are read."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from dcvit.errors import CheckpointError, ConfigError, check_call
from dcvit.models.lora import A, Adaptation, B
from dcvit.parallel.trees import Shapes, Tensor, Tensors, check_tree
from dcvit.weights.placement import unrolled
from dcvit.weights.tensors import Json

FACTORS = (f"/{A}", f"/{B}")  # ends of the names of adapters


def described(about: Json, what: str) -> tuple[Adaptation, str]:
    """Return the adaptation and the `model_init` (the base model) in the description of a checkpoint of adapters.

    Raises:
      CheckpointError: one of them is missing or invalid.
    """
    config = about.get("config", {})
    options, init = config.get("lora"), config.get("model_init")
    if not isinstance(options, dict) or not options or not isinstance(init, str):
        raise CheckpointError(f"{what} holds adapters, but its config has no lora and model_init")
    try:
        check_call(Adaptation, options, "config.lora")
    except ConfigError as e:
        raise CheckpointError(f"{what}: {e}") from None
    return Adaptation(**options), init


def merged(base: Tensors, adapters: Tensors, about: Json, what: str) -> Tensors:
    """Return the parameters of an adapted model, of unrolled layers.

    Args:
      base: the parameters that the run started from.
      adapters: the parameters of its checkpoint.
      about: the description of the checkpoint.
      what: the name of the checkpoint in messages.

    Raises:
      CheckpointError: `base` lacks an adapted matrix; or, when a tensor is read, its checksum differs from training.
    """
    found, init = described(about, what)
    whole, changed = single_layers(base), single_layers(adapters)
    names = {name.removesuffix(f"/{A}") for name in changed if name.endswith(f"/{A}")}
    if missing := sorted(name for name in names if name not in whole or f"{name}/{B}" not in changed):
        raise CheckpointError(f"{what} adapts {missing[0]}, but it or {init} lacks a part of it")
    known = about.get("base", {})
    tensors = {name: _checked(tensor, name, known, what) for name, tensor in whole.items()}
    for name, tensor in changed.items():
        if not name.endswith(FACTORS):
            tensors[name] = tensor
    for name in names:
        tensors[name] = _adapted(tensors[name], changed[f"{name}/{A}"], changed[f"{name}/{B}"], found)
    return tensors


def checksums(base: Tensors, model: Shapes, found: Adaptation, what: str) -> dict[str, int]:
    """Return the CRC-32 of each base parameter that a run does not train as a whole, by names of unrolled layers.

    Raises:
      CheckpointError: names or shapes of the base differ from those of the model, for instance if it was resized.
    """
    layers = single_layers(base)
    wanted = single_layers({name: Tensor(shape, lambda: np.zeros(0)) for name, shape in model.items()})
    whole = found.whole_names(layers | wanted)
    layers = {name: tensor for name, tensor in layers.items() if name not in whole}
    expected = {name: tensor.shape for name, tensor in wanted.items() if name not in whole}
    check_tree({name: tensor.shape for name, tensor in layers.items()}, expected, what)
    return layer_checksums(base, layers)


def layer_checksums(tensors: Tensors, names: Collection[str] | None = None) -> dict[str, int]:
    """Return the CRC-32 of each parameter, or of `names`, in unrolled layers; an array of several is read once."""
    places: dict[str, dict[str, int | None]] = {}  # layers by name, of each array
    for name, (path, layer) in unrolled({path: tensor.shape for path, tensor in tensors.items()}).items():
        if names is None or name in names:
            places.setdefault(path, {})[name] = layer
    found: dict[str, int] = {}
    for path, layers in places.items():
        array = tensors[path].read()
        found |= {name: crc(array if layer is None else array[layer]) for name, layer in layers.items()}
    return found


def single_layers(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of unrolled layers, from those of scanned or unrolled layers."""
    parts = unrolled({name: tensor.shape for name, tensor in tensors.items()})
    return {name: _part(tensors[path], layer) for name, (path, layer) in parts.items()}


def _part(tensor: Tensor, layer: int | None) -> Tensor:
    if layer is None:
        return tensor
    return Tensor(tensor.shape[1:], lambda: tensor.read()[layer])


def _adapted(base: Tensor, a: Tensor, b: Tensor, found: Adaptation) -> Tensor:
    def read() -> np.ndarray:
        update = np.asarray(a.read(), np.float32) @ np.asarray(b.read(), np.float32)
        return np.asarray(base.read(), np.float32) + np.float32(found.factor) * update.reshape(base.shape)

    return Tensor(base.shape, read)


def _checked(tensor: Tensor, name: str, known: Mapping[str, int], what: str) -> Tensor:
    def read() -> np.ndarray:
        array = tensor.read()
        if name in known and crc(array) != known[name]:
            raise CheckpointError(f"{what} adapts another {name} than config.model_init has now")
        return array

    return Tensor(tensor.shape, read)


def crc(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes as float32."""
    return zlib.crc32(np.ascontiguousarray(array, np.float32).tobytes())


def changed(saved: Mapping[str, int], current: Mapping[str, int]) -> Sequence[str]:
    """Return the names of the parameters whose checksums differ."""
    return sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
