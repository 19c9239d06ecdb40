"""Trained models as Python objects: `dcvit.load`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32
from PIL import Image

from dcvit.dcmha.reference import AttentionMatrices
from dcvit.errors import CheckpointError, ConfigError, InputError, nearest, type_name
from dcvit.inference import classifier
from dcvit.inference.classifier import Prediction
from dcvit.inference.sampling import Sampling
from dcvit.inference.texts import Continuations, continue_texts
from dcvit.interpret.activations import Activations, Hook, run_with_cache
from dcvit.interpret.attention_maps import attention_maps
from dcvit.models import Params
from dcvit.models.lm import LM
from dcvit.models.trees import check_tree, shapes_of
from dcvit.models.vit import ViT
from dcvit.parallel.sharding import check_model, make_mesh, with_shardings
from dcvit.runs import workdir as workdirs
from dcvit.runs.files import Folder, folder
from dcvit.training.model import build, errors_name_file, example
from dcvit.training.setup import param_shapes
from dcvit.training.trained import TrainedModel, check_tokenizer, open_trained
from dcvit.weights.families import open_weights
from dcvit.weights.loading import holds_weights
from dcvit.weights.placement import check_finite, place_params
from dcvit.weights.tensors import tokenizer_of
from input_pipeline.files import read_regular
from input_pipeline.text.tokenizer import Tokenizer, open_tokenizer

# An image: the path of a file, a picture of Pillow, or uint8 numbers "height width 3" or "height width".
ImageInput: TypeAlias = str | Path | Image.Image | np.ndarray
# One or several images, or one or several preprocessed ones: float32 numbers "[B] height width channels".
Images: TypeAlias = ImageInput | Sequence[ImageInput]
Tokens: TypeAlias = str | Sequence[int] | np.ndarray  # a text, or tokens "[B] T"
Result = TypeVar("Result")
PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # of pictures that become a PNG as they are
SHARDINGS = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor"}  # the mesh axis of all devices, by strategy


def _open_tokenizer(path: str | None, default: str | None = None, outputs: int | None = None) -> Tokenizer:
    """Open the tokenizer at `path`, or else `default`, for a model with a number of outputs."""
    if (file := path or default) is None:
        raise ConfigError("the weights have no tokenizer.json beside them")
    tokenizer = open_tokenizer(file, None)
    if outputs is not None:
        check_tokenizer(tokenizer, outputs)
    return tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters, and what turns files and text into its inputs. `load` returns it.

    Fields:
      module: the flax module.
      params: its parameters.
      config: the config of its run.
      pp: the preprocessing of an encoded image, see `input_pipeline.Preprocess`.
      class_names: a name for each class.
      multilabel: the probabilities of classes are independent of each other.
      open_tokenizer: returns the tokenizer at a path, or that of the training data for None.
      end_tokens: tokens that end a text, besides the tokenizer's or the model's.
      mesh: the mesh that the parameters are sharded over.
    """

    module: ViT | LM
    params: Params
    config: Mapping[str, Any]
    pp: str = ""
    class_names: Sequence[str] = ()
    multilabel: bool = False
    open_tokenizer: Callable[[str | None], Tokenizer] = _open_tokenizer
    end_tokens: Sequence[int] = ()
    mesh: Mesh | None = None

    def predict(self, images: Images, topk: int = 5) -> list[list[Prediction]]:
        """Return the `topk` most probable classes of each image, the most probable first.

        Raises:
          ConfigError: the model is a language model, or has no head or no preprocessing of images.
          InputError: an image cannot be read, or does not have the shape of the others.
        """
        return [row for batch in self.classify(_image_batches(images, self.pp), topk) for row in batch]

    def classify(
        self, batches: Iterable[tuple[Sequence[str], Float32[np.ndarray, "_ height width channels"]]], topk: int
    ) -> Iterator[list[list[Prediction]]]:
        """Yield the predictions for each batch of preprocessed images and their names."""
        if not isinstance(self.module, ViT):
            raise ConfigError("a language model does not classify images: use generate")
        if not self.module.num_classes:
            raise ConfigError("a model without a head has no classes: use features")
        if topk < 1:
            raise ConfigError(f"topk={topk} should be 1 or more")
        with _devices(self.mesh, self.params):
            yield from classifier.classify(
                self.module, self.params, map(self.checked, batches), class_names=self.class_names, topk=topk,
                multilabel=self.multilabel,
            )  # fmt: skip

    def features(self, inputs: Images | Tokens, name: str = "pre_logits") -> np.ndarray:
        """Return a named intermediate of the model, such as "logits" or "encoder/block00/sa", as B ….

        Raises:
          ConfigError: the model has no intermediate of this name; the message has the nearest one.
          InputError: see `predict`.
        """
        arrays = [self._run(batch, name) for batch in self._inputs(inputs)]
        if not arrays:
            raise InputError("no image is given")
        return np.concatenate(arrays)

    def generate(
        self,
        prompt: str,
        tokens: int | None = None,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> str:
        """Return a continuation of a text; see `dcvit.inference.texts.continue_texts` and `Sampling`.

        Raises:
          ConfigError: the model is no language model or has no tokenizer, or an argument does not fit it.
        """
        sampling = Sampling(temperature, top_k, top_p)
        return self.continue_texts([prompt], tokens, sampling=sampling, seed=seed, stop=stop).texts[0].text

    def continue_texts(
        self,
        prompts: Sequence[str],
        tokens: int | None = None,
        *,
        sampling: Sampling,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        show: Callable[[str], None] = lambda _: None,
        tokenizer: Tokenizer | None = None,
    ) -> Continuations:
        """Continue texts as one batch; see `dcvit.inference.texts.continue_texts`."""
        if not isinstance(self.module, LM):
            raise ConfigError("an image model does not generate text: use predict")
        with _devices(self.mesh, self.params):
            return continue_texts(
                self.module, self.params, tokenizer or self.tokenizer, prompts, max_tokens=tokens, sampling=sampling,
                seed=seed, stop=[stop] if isinstance(stop, str) else stop, show=show, end_tokens=self.end_tokens,
            )  # fmt: skip

    def attention(self, inputs: Images | Tokens, layers: Sequence[int] | None = None) -> dict[int, AttentionMatrices]:
        """Return the attention matrices B H T S of the given layers, by default of all, by their numbers from 0.

        Raises:
          ConfigError: there is no layer of a number, or the inputs are too many for one batch.
          InputError: see `predict`.
        """
        return jax.device_get(_on_one_batch(self, inputs, functools.partial(attention_maps, layers=layers)))

    def run_with_cache(
        self, inputs: Images | Tokens, hooks: Mapping[str, Hook] | None = None, names: Sequence[str] = ("*",)
    ) -> Activations:
        """Return the output and the named arrays of a forward pass; see `dcvit.interpret.activations.run_with_cache`.

        Raises:
          ConfigError: the model has no array of a name, a hook returns another shape, or the inputs are too many for
            one batch.
          InputError: see `predict`.
        """
        return _on_one_batch(self, inputs, functools.partial(run_with_cache, hooks=hooks, names=names))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data. Raises ConfigError if the model has none."""
        return self.open_tokenizer(None)

    def _inputs(self, inputs: Images | Tokens) -> Iterable[np.ndarray]:
        """Return batches of model inputs."""
        if isinstance(self.module, ViT):
            return (images for _, images in map(self.checked, _image_batches(inputs, self.pp)))
        return [_rows(self.module, self.tokenizer.encode(inputs) if isinstance(inputs, str) else inputs)]

    def checked(self, batch: tuple[Sequence[str], np.ndarray]) -> tuple[Sequence[str], np.ndarray]:
        """Return a batch of images. Raise CheckpointError if the parameters are not for images of its shape."""
        expected = _param_shapes(self.module, (1, *batch[1].shape[1:]))
        check_tree(shapes_of(self.params), expected, "images from config.pp_predict")
        return batch

    def _run(self, batch: np.ndarray, name: str) -> np.ndarray:
        with _devices(self.mesh, self.params):
            outputs: Any = classifier.apply(self.module, self.params, jnp.asarray(batch))[1]
        for part in name.split("/"):
            if not isinstance(outputs, Mapping) or part not in outputs:
                known = shapes_of(outputs) if isinstance(outputs, Mapping) else {}
                raise ConfigError(f"the model has no intermediate {name!r}; {nearest(part, known)}")
            outputs = outputs[part]
        return np.asarray(outputs)


def _on_one_batch(
    model: LoadedModel, inputs: Images | Tokens, function: Callable[[ViT | LM, Params, jax.Array], Result]
) -> Result:
    """Return the result of a function of module, parameters and one batch of inputs."""
    batches = list(model._inputs(inputs))
    if len(batches) != 1:
        raise ConfigError(f"expected 1 … {classifier.BATCH} images at once")
    with _devices(model.mesh, model.params):
        try:
            return function(model.module, model.params, jnp.asarray(batches[0]))
        except ValueError as e:
            raise ConfigError(str(e)) from None


def _rows(module: LM, given: Tokens | Images) -> np.ndarray:
    """Return tokens as rows. Raise InputError if they are not inputs of the model."""
    tokens = np.asarray(given)
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or not tokens.size:
        raise InputError(f"expected a text, or tokens of shape T or B T, found {tokens.dtype} of {tokens.shape}")
    if not 0 <= tokens.min() <= tokens.max() < module.vocab_size:
        raise InputError(f"tokens should be in 0 … {module.vocab_size - 1}")
    if module.position == "learned" and tokens.shape[-1] > module.context:
        raise InputError(f"{tokens.shape[-1]} tokens are more than the model's context of {module.context}")
    return np.atleast_2d(tokens).astype(np.int32)


def _devices(mesh: Mesh | None, params: Params) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a model runs on the mesh of its parameters; kernels need one."""
    if mesh is not None:
        return jax.set_mesh(mesh)
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    devices = {device for x in arrays for device in x.devices()} or {jax.local_devices()[0]}
    return jax.set_mesh(Mesh([*devices], ("own",))) if len(devices) == 1 else contextlib.nullcontext()


def load(source: str | Path, *, config: str | None = None, sharding: str | None = None) -> LoadedModel:
    """Load a trained model.

    Args:
      source: a workdir, one of its checkpoints, or weights of another library; see `dcvit.weights.families.FAMILIES`.
      config: "NAME[:key=value,…]", the config of a checkpoint that is in no workdir.
      sharding: splits the parameters over all devices as `config.sharding_strategy`: "fsdp", "tensor" or "ddp" (the
        whole model on each device). By default the model is on the first device.

    Raises:
      CheckpointError: the source is missing, damaged, of an unknown format, or does not fit its config.
      ConfigError: an argument or the config is invalid.
    """
    if sharding is not None and sharding not in SHARDINGS:
        raise ConfigError(f"sharding={sharding!r}; {nearest(sharding, SHARDINGS)}")
    try:
        path = folder(str(source))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    workdir = workdirs.find(path) if config is None else None
    if config is None and workdir is None:
        if not isinstance(path, Path):
            raise CheckpointError(
                f"{source} is no run; copy weights of other libraries to a local folder, to read them"
            )
        return _load_weights(path, sharding)
    return load_trained(open_trained(workdir, config, path), workdir, sharding)


def open_model(
    workdir: Folder | None, config: str | None, checkpoint: Folder | None, overrides: Sequence[str] = ()
) -> LoadedModel:
    """Load the model that the options `--workdir`, `--config` and `--checkpoint` name together.

    Args:
      workdir: a training run; or, without other options, anything else that `load` opens.
      config, checkpoint, overrides: see `open_trained`.

    Raises:
      CheckpointError, ConfigError: see `load` and `open_trained`.
    """
    alone = config is None and checkpoint is None and not overrides
    if workdir is not None and alone and (workdirs.find(workdir) not in (None, workdir) or holds_weights(workdir)):
        return load(str(workdir))
    return load_trained(open_trained(workdir, config, checkpoint, overrides), workdir)


def load_trained(trained: TrainedModel, workdir: Folder | None, sharding: str | None = None) -> LoadedModel:
    """Load the parameters of a model that a command has opened; see `load`."""
    module = trained.model
    assert isinstance(module, ViT | LM)
    names = [] if isinstance(module, LM) else classifier.read_class_names(workdir, trained.num_outputs)
    mesh = _mesh(sharding, module)
    params = trained.params(mesh=mesh, strategy=sharding or "ddp")
    check_finite(params, str(trained.checkpoint))
    return LoadedModel(
        module, params, trained.record(), trained.pp_predict, names, trained.is_multilabel, trained.tokenizer, mesh=mesh
    )


def _load_weights(path: Path, sharding: str | None) -> LoadedModel:
    """Load weights of another library."""
    weights = open_weights(path)
    described = weights.description
    tensors = weights.parameters()
    with errors_name_file(path):
        module = build(described)
        shapes = param_shapes(module, example(described, tensors))
    mesh = _mesh(sharding, module)
    params = place_params(tensors, with_shardings(shapes, mesh, sharding or "ddp"), str(weights.path))
    names = described.class_names or [str(i) for i in range(described.num_outputs or 0)]
    file = tokenizer_of(weights.path)
    tokenizer = functools.partial(_open_tokenizer, default=str(file) if file else None, outputs=described.num_outputs)
    config = {"model_name": described.model_name, "model": dict(described.fields), "pp_predict": described.pp}
    return LoadedModel(
        module, params, config, described.pp, names, False, tokenizer, end_tokens=described.end_tokens, mesh=mesh
    )


def _mesh(sharding: str | None, module: ViT | LM) -> Mesh | None:
    """Return the mesh of all devices for a sharding strategy. Raise ConfigError if it does not fit the model."""
    if sharding is None:
        return None
    mesh = make_mesh([(SHARDINGS[sharding], -1)])
    check_model(mesh, module)
    return mesh


@functools.lru_cache
def _param_shapes(module: ViT, images: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return shapes_of(param_shapes(module, jax.ShapeDtypeStruct(images, np.float32)))


def _image_batches(images: Images | Tokens, pp: str) -> Iterable[tuple[list[str], np.ndarray]]:
    """Return batches of preprocessed images with their names."""
    if isinstance(images, np.ndarray) and images.dtype == np.float32 and images.ndim in (3, 4):
        batch = images[None] if images.ndim == 3 else images
        starts = range(0, len(batch), classifier.BATCH)
        chunks = [batch[start : start + classifier.BATCH] for start in starts]
        return [([str(i) for i in range(n, n + len(c))], c) for n, c in zip(starts, chunks, strict=True)]
    single = isinstance(images, str | Path | Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4)
    several: Sequence[Any] = [images] if single else images  # type: ignore[assignment]
    encoded = [_encoded(i, image) for i, image in enumerate(several)]
    return classifier.preprocess_images(encoded, pp, _raise)


def _encoded(number: int, image: object) -> tuple[str, Callable[[], bytes]]:
    """Return the name of an image and a function that returns its encoded bytes; a picture becomes a PNG."""
    if isinstance(image, str | Path):
        return str(image), functools.partial(read_regular, image)
    if isinstance(image, np.ndarray):
        found = f"{image.dtype} of {image.shape}"
        try:
            image = Image.fromarray(image) if image.dtype == np.uint8 and image.size else None
        except TypeError:
            image = None
        if image is None:
            raise InputError(f"image {number}: expected uint8 of (height, width, 3), found {found}")
    if not isinstance(image, Image.Image):
        raise InputError(f"image {number}: expected a path, a picture or an array, got {type_name(type(image))}")
    if image.mode in ("I", "F"):  # a PNG would lose bits
        raise InputError(f"image {number}: the picture has 32 bits a channel; expected 8 or 16")
    if image.mode not in PNG_MODES:  # such as CMYK
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return str(number), file.getvalue


def _raise(message: str) -> NoReturn:
    raise InputError(message)
