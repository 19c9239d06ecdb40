"""Loaded models: a flax module with its parameters, and the methods common to models of images and of text.

`load`, which is `dcvit.load`, returns one of the two kinds, `dcvit.inference.images.ImageModel` and
`dcvit.inference.texts.LanguageModel`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array
from ml_collections import ConfigDict

from dcvit.dcmha.backends.xla.reference import AttentionMatrices
from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError, InputError, nearest
from dcvit.hub.open import Opened, open_model
from dcvit.interpret.activations import Activations, Hook, attention_maps, run_with_cache
from dcvit.models import Outputs, Params
from dcvit.models.lm import LM
from dcvit.models.packed_images import PackedImages
from dcvit.models.trees import intermediate, param_shapes
from dcvit.models.vit import ViT
from dcvit.parallel import runtime
from dcvit.parallel.sharding import check_model, make_mesh
from dcvit.parallel.trees import check_tree, shapes_of
from dcvit.runs.files import Folder
from input_pipeline import huggingface


@runtime_checkable
class Picture(Protocol):
    """A picture of Pillow, an `Image`, which is known by its attributes where Pillow is not installed."""

    @property
    def mode(self) -> str: ...

    def getbands(self) -> tuple[str, ...]: ...


# An image: the path of a file, its bytes, a picture of Pillow, or numbers "height width channels" or "height width" of
# uint8, uint16 or int16.
ImageInput: TypeAlias = str | Path | bytes | Picture | np.ndarray
# One or several images, or one or several preprocessed ones: float32 numbers "[B] height width channels".
Images: TypeAlias = ImageInput | Iterable[ImageInput]
Tokens: TypeAlias = str | Sequence[int | np.integer] | np.ndarray | Array  # a text, or tokens "[B] T"
BATCH = 64  # images that are processed at once; a power of two
SHARDINGS = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor"}  # the mesh axis of all devices, by strategy
# Module here and its class, by `model_name`.
CLASSES = {"vit": ("images", "ImageModel"), "lm": ("texts", "LanguageModel")}
Result = TypeVar("Result")


def load(
    source: str | Folder,
    *,
    config: ConfigDict | None = None,
    sharding: str | None = None,
    image_size: int | Sequence[int] | None = None,
) -> LoadedModel:
    """Load a trained model; see `dcvit.load`.

    Raises:
      CheckpointError: the source is missing, damaged, of an unknown format, or does not fit its config.
      ConfigError: an argument or the config is invalid.
    """
    if sharding is not None and sharding not in SHARDINGS:
        raise ConfigError(f"sharding={sharding!r}; {nearest(sharding, SHARDINGS)}")
    runtime.skip_absent_tpu()
    size = None if image_size is None else _height_and_width(image_size)
    opened = open_model(source, config=config, image_size=size)
    return class_of(opened).of(opened, sharding)


def class_of(opened: Opened) -> type[LoadedModel]:
    """Import and return the class of loaded models of an opened model's kind."""
    module, name = CLASSES[opened.config.model_name]
    found: type[LoadedModel] = getattr(importlib.import_module(f"dcvit.inference.{module}"), name)
    return found


def _height_and_width(image_size: object) -> tuple[int, int]:
    """Return `image_size`, one number or two, as (height, width). Raise ConfigError if it is neither."""
    numbers = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    try:
        height, width = map(operator.index, numbers)
        if min(height, width) < 1:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"image_size={image_size!r}: expected the number of pixels, or height and width") from None
    return height, width


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel(abc.ABC):
    """A trained model: a flax module with its parameters and its config.

    Fields:
      module: the flax module.
      params: its parameters.
      config: the config of its run, or that which follows from weights of another library.
      source: name of the folder or file that it was loaded from.
      mesh: the mesh that the parameters are sharded over; None for the first device.
      opened: the model in its files; None for a module with parameters that were not loaded.
    """

    module: ViT | LM
    params: Params
    config: Mapping[str, Any]
    source: str = dataclasses.field(default="", kw_only=True)
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)
    opened: Opened | None = dataclasses.field(default=None, kw_only=True)

    kind: ClassVar[str]  # what the model is, and the command for it, for messages

    def __repr__(self) -> str:
        """Return one line about the model, without the parameters, which would be a hundred thousand characters."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"{type(self).__name__}({self.source!r}, {type(self.module).__name__} with {count:,} parameters)"

    def features(self, inputs: Images | Tokens, name: str = "pre_logits") -> np.ndarray:
        """Return a named intermediate of the model, such as "logits" or "encoder/block00/sa", of shape B ….

        Padding after the patches of an image is not part of it.

        Args:
          inputs: one or several images, or a text or its tokens.
          name: the path of the intermediate.

        Raises:
          CheckpointError: the intermediate has numbers that are not finite.
          ConfigError: the model has no intermediate of this name, or it has vectors for patches and the images have
            different numbers of them.
          InputError: an image cannot be read or does not have the shape of the others, or tokens are out of range.
        """
        rows = [row for batch in self._batches(inputs) for row in _rows(self._intermediate(batch, name), batch)]
        if not rows:
            raise InputError("no image is given")
        if len({row.shape for row in rows}) > 1:
            raise ConfigError(f"{name!r} has a vector for each patch: give images with one grid of patches at a time")
        found = np.stack(rows)
        if not np.isfinite(found).all():
            raise CheckpointError(f"{self.source}: numbers of {name!r} are {NOT_FINITE}")
        return found

    def attention(
        self, inputs: Images | Tokens, layers: Sequence[int | np.integer] | None = None
    ) -> dict[int, AttentionMatrices]:
        """Return the attention matrices B H T S of the given layers, by default of all, by index from 0.

        Raises:
          ConfigError: an index is not one of a layer, or the inputs are too many for one batch.
          InputError: see `features`.
        """
        return jax.device_get(self._on_one_batch(inputs, functools.partial(attention_maps, layers=layers)))

    def run_with_cache(
        self, inputs: Images | Tokens, hooks: Mapping[str, Hook] | None = None, names: Sequence[str] = ("*",)
    ) -> Activations:
        """Return the output and the named arrays of a forward pass; see `dcvit.interpret.activations.run_with_cache`.

        Raises:
          ConfigError: the model has no array of a name, a hook returns another shape, or the inputs are too many for
            one batch.
          InputError: see `features`.
        """
        return self._on_one_batch(inputs, functools.partial(run_with_cache, hooks=hooks, names=names))

    def check_inputs(self, inputs: jax.ShapeDtypeStruct, what: str) -> None:
        """Raise CheckpointError, which names `what`, if the parameters do not fit the shape of `inputs`."""
        check_tree(shapes_of(self.params), shapes_of(param_shapes(self.module, inputs)), what)

    def on_devices(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the model runs on the mesh of its parameters; kernels need one."""
        if self.mesh is not None:
            return jax.set_mesh(self.mesh)
        arrays = [x for x in jax.tree.leaves(self.params) if isinstance(x, jax.Array)]
        devices = {device for x in arrays for device in x.devices()} or {jax.local_devices()[0]}
        return jax.set_mesh(Mesh([*devices], ("own",))) if len(devices) == 1 else contextlib.nullcontext()

    @classmethod
    def of(cls: type[Kind], opened: Opened, sharding: str | None = None) -> Kind:
        """Load the parameters of an opened model, split over all devices by a strategy of `SHARDINGS` or on the first.

        Raises:
          CheckpointError: see `dcvit.hub.open.Opened.load_params`.
          ConfigError: the model is of another kind, or cannot be split.
        """
        if (found := class_of(opened)) is not cls:
            raise ConfigError(f"{opened} is {found.kind}")
        assert isinstance(opened.module, ViT | LM)
        mesh = None
        if sharding is not None:
            mesh = make_mesh([(SHARDINGS[sharding], -1)])
            check_model(mesh, opened.module)
        params, config = opened.load_params(mesh, sharding or "ddp"), json.loads(opened.config.to_json())
        source = huggingface.title(opened.place)
        return cls(opened.module, params, config, source=source, mesh=mesh, opened=opened, **cls._facts(opened))

    @classmethod
    @abc.abstractmethod
    def _facts(cls, opened: Opened) -> dict[str, Any]:
        """Return the fields of the class that come from an opened model."""

    @abc.abstractmethod
    def _batches(self, inputs: Images | Tokens) -> Iterable[np.ndarray | PackedImages]:
        """Return the given images or tokens as batches of model inputs."""

    def _intermediate(self, batch: np.ndarray | PackedImages, name: str) -> np.ndarray:
        with self.on_devices():
            outputs = apply(self.module, self.params, jax.tree.map(jnp.asarray, batch))[1]
        return np.asarray(intermediate(outputs, name))

    def _on_one_batch(
        self, inputs: Images | Tokens, function: Callable[[ViT | LM, Params, jax.Array], Result]
    ) -> Result:
        """Return function(module, parameters, inputs). Raise ConfigError if the inputs are not exactly one batch."""
        batches = list(self._batches(inputs))
        if len(batches) != 1:
            raise ConfigError(f"expected 1 … {BATCH} images at once")
        if isinstance(batches[0], PackedImages):
            raise ConfigError("arrays of a forward pass are of images of one size, not of the op patches; use features")
        with self.on_devices():
            try:
                return function(self.module, self.params, jnp.asarray(batches[0]))
            except ValueError as e:
                raise ConfigError(str(e)) from None


Kind = TypeVar("Kind", bound=LoadedModel)


def _rows(values: np.ndarray, batch: np.ndarray | PackedImages) -> Iterable[np.ndarray]:
    """Return the values of each example of a batch, without those of padding after the patches of an image."""
    if not isinstance(batch, PackedImages) or values.ndim < 3:
        return values
    padding = batch.patches.shape[2] - np.prod(batch.grids[:, 0, 0], axis=-1)  # each image is a row of its own
    return [row[: len(row) - count] for row, count in zip(values, padding, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def apply(module: nn.Module, params: Mapping[str, Any], inputs: Array | PackedImages) -> tuple[Array, Outputs]:
    """Run a module without dropout, and return its first result, such as the logits, and named intermediates."""
    found: tuple[Array, Outputs] = module.apply({"params": params}, inputs, train=False)  # type: ignore[assignment]
    return found
