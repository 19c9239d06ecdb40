"""Loaded models: a flax module with its parameters, and the methods common to models of images and of text.

`dcvit.load` returns one of the two kinds, `dcvit.inference.images.ImageModel` and
`dcvit.inference.texts.LanguageModel`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from dcvit.dcmha.backends.xla.reference import AttentionMatrices
from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError, InputError
from dcvit.interpret.activations import Activations, Hook, run_with_cache
from dcvit.interpret.attention_maps import attention_maps
from dcvit.models import Outputs, Params
from dcvit.models.lm import LM
from dcvit.models.packed_images import PackedImages
from dcvit.models.trees import intermediate, param_shapes
from dcvit.models.vit import ViT
from dcvit.parallel.trees import check_tree, shapes_of


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
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """A trained model: a flax module with its parameters and its config.

    Fields:
      module: the flax module.
      params: its parameters.
      config: the config of its run.
      source: name of the folder or file that it was loaded from.
      mesh: the mesh that the parameters are sharded over; None for the first device.
      open_evaluators: function that returns the evaluators of its run by name; None for another library's weights.
    """

    module: ViT | LM
    params: Params
    config: Mapping[str, Any]
    source: str = dataclasses.field(default="", kw_only=True)
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)
    open_evaluators: Callable[[], Mapping[str, Any]] | None = dataclasses.field(default=None, kw_only=True)

    kind: ClassVar[str]  # what the model is, and the command for it, for messages

    def __repr__(self) -> str:
        """Return one line about the model, without the parameters, which would be a hundred thousand characters."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"{type(self).__name__}({self.source!r}, {type(self.module).__name__} with {count:,} parameters)"

    def features(self, inputs: Images | Tokens, name: str = "pre_logits") -> np.ndarray:
        """Return a named intermediate of the model, such as "logits" or "encoder/block00/sa", of shape B ….

        Args:
          inputs: one or several images, or a text or its tokens.
          name: the path of the intermediate.

        Raises:
          CheckpointError: the intermediate has numbers that are not finite.
          ConfigError: the model has no intermediate of this name; the message has the nearest one.
          InputError: an image cannot be read or does not have the shape of the others, or tokens are out of range.
        """
        arrays = [self._intermediate(batch, name) for batch in self._batches(inputs)]
        if not arrays:
            raise InputError("no image is given")
        if not all(np.isfinite(array).all() for array in arrays):
            raise CheckpointError(f"{self.source}: numbers of {name!r} are {NOT_FINITE}")
        return np.concatenate(arrays)

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
        check_tree(shapes_of(self.params), _param_shapes(self.module, inputs.shape, np.dtype(inputs.dtype)), what)

    def on_devices(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the model runs on the mesh of its parameters; kernels need one."""
        if self.mesh is not None:
            return jax.set_mesh(self.mesh)
        arrays = [x for x in jax.tree.leaves(self.params) if isinstance(x, jax.Array)]
        devices = {device for x in arrays for device in x.devices()} or {jax.local_devices()[0]}
        return jax.set_mesh(Mesh([*devices], ("own",))) if len(devices) == 1 else contextlib.nullcontext()

    def _batches(self, inputs: Images | Tokens) -> Iterable[np.ndarray | PackedImages]:
        """Return the given images or tokens as batches of model inputs."""
        raise NotImplementedError

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


def of_kind(model: LoadedModel, kind: type[Kind], what: object) -> Kind:
    """Return `model` unchanged. Raise ConfigError, which names it `what`, if it is not of the class `kind`."""
    if not isinstance(model, kind):
        raise ConfigError(f"{what} is {model.kind}")
    return model


@functools.partial(jax.jit, static_argnums=0)
def apply(module: nn.Module, params: Mapping[str, Any], inputs: Array | PackedImages) -> tuple[Array, Outputs]:
    """Run a module without dropout, and return its first result, such as the logits, and named intermediates."""
    found: tuple[Array, Outputs] = module.apply({"params": params}, inputs, train=False)  # type: ignore[assignment]
    return found


@functools.lru_cache
def _param_shapes(module: nn.Module, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, tuple[int, ...]]:
    return shapes_of(param_shapes(module, jax.ShapeDtypeStruct(shape, dtype)))
