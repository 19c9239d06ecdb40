"""Models of images: classification of files, pictures and arrays."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError, InputError, type_name
from dcvit.hub.open import Opened, thresholds_of
from dcvit.inference.model import BATCH, ImageInput, Images, LoadedModel, Tokens
from dcvit.models import Params
from dcvit.models.packed_images import PackedImages, image_shape, one_per_row
from dcvit.models.vit import ViT
from input_pipeline import Preprocess
from input_pipeline.files import expand
from input_pipeline.optional import Late, require

if TYPE_CHECKING:
    from PIL import Image
    from scipy import special
else:
    Image, special = Late("PIL.Image"), Late("scipy.special")

TOPK = 5  # classes that are predicted by default
PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # of pictures that become a PNG as they are


class Prediction(NamedTuple):
    """One predicted class of an image.

    Fields:
      file: the path of the image.
      rank: 1 for the class with the highest score; 0 for an image of which no class reaches its threshold.
      label: the name of the class; empty for rank 0.
      probability: its probability; for rank 0 the highest.
    """

    file: str
    rank: int
    label: str
    probability: float


@dataclasses.dataclass(frozen=True, repr=False)
class ImageModel(LoadedModel):
    """A model of images, with the preprocessing that turns files into its inputs.

    Fields, besides those of `LoadedModel`:
      pp: the preprocessing of an encoded image, see `input_pipeline.Preprocess`.
      class_names: a name for each class.
      multilabel: the probabilities of classes are independent of each other.
      thresholds: the probability from which a class is predicted, one number or one for each class, of a model that
        predicts any number of classes; None for the most probable classes.
    """

    module: ViT
    pp: str = ""
    class_names: Sequence[str] = ()
    multilabel: bool = False
    thresholds: float | Sequence[float] | None = None

    kind = "a model of images, not a language model: use `dcvit predict`"

    @classmethod
    def _facts(cls, opened: Opened) -> dict[str, Any]:
        return {
            "pp": opened.preprocessing, "class_names": opened.classes, "multilabel": opened.is_multilabel,
            "thresholds": thresholds_of(opened),
        }  # fmt: skip

    def predict(self, images: Images, topk: int | None = None) -> list[list[Prediction]]:
        """Return the `topk` most probable classes of each image, the most probable first.

        By default, these are 5, and for a model with `thresholds` all classes that reach theirs, which may be none.

        Raises:
          CheckpointError: the logits of an image are not finite.
          ConfigError: the model has no head or no preprocessing of images.
          InputError: an image cannot be read, does not have the shape of the others, or is not finite.
        """
        found = (row for batch in self.classify(_image_batches(images, self.pp), topk) for row in batch)
        return [[prediction for prediction in row if prediction.rank] for row in found]

    def classify(
        self,
        batches: Iterable[tuple[Sequence[str], Float32[np.ndarray, "_ height width channels"] | PackedImages]],
        topk: int | None = None,
    ) -> Iterator[list[list[Prediction]]]:
        """Yield the predictions for each batch of up to `BATCH` preprocessed images with their names.

        Args:
          batches: as from `read_images`.
          topk: the number of predictions per image, of which the first is the most probable; see `predict`. An image of
            which no class reaches its threshold has one prediction, of rank 0.

        Raises:
          CheckpointError: the logits of an image are not finite.
          ConfigError: the model has no head, or `topk` is below 1.
        """
        if not self.module.num_classes:
            raise ConfigError("a model without a head has no classes: use features")
        if topk is not None and topk < 1:
            raise ConfigError(f"topk={topk} should be 1 or more")
        least = 0.0 if topk is not None or self.thresholds is None else self.thresholds
        count = topk or (TOPK if self.thresholds is None else len(self.class_names))
        lowest = special.logit(least) if np.any(least) else -np.inf
        with self.on_devices():
            for names, images in map(self.checked, batches):
                size = min(BATCH, 1 << (len(names) - 1).bit_length())  # few sizes, each of which is compiled
                rows = np.minimum(np.arange(size), len(names) - 1)  # the last image fills the batch
                padded = jax.tree.map(lambda x, at=rows: jnp.asarray(x[at]), images)
                logits, scores = jax.device_get(_scores(self.module, self.params, padded, self.multilabel))
                finite = np.isfinite(logits).all(axis=-1)[: len(names)]
                if not finite.all():
                    raise CheckpointError(f"{names[int(finite.argmin())]}: the model's logits are {NOT_FINITE}")
                reached = np.asarray(logits, np.float64) >= lowest
                yield [
                    _best(name, row, self.class_names, count, where)
                    for name, row, where in zip(names, scores, reached, strict=False)
                ]

    def checked(
        self, batch: tuple[Sequence[str], np.ndarray | PackedImages]
    ) -> tuple[Sequence[str], np.ndarray | PackedImages]:
        """Return a batch (names, images) unchanged.

        Raises:
          CheckpointError: the parameters do not fit the shape of the images.
          InputError: the images have another number of channels.
        """
        images = batch[1]
        if isinstance(images, PackedImages):
            shape = image_shape({"image": np.asarray(images.patches[0, 0]), "grid": np.asarray(images.grids)})
        else:
            shape = images.shape[1:]
        kernel = self.params.get("embedding", {}).get("kernel")
        if kernel is not None and kernel.ndim == 4 and shape[-1] != kernel.shape[2]:
            raise InputError(f"{batch[0][0]}: {shape[-1]} channels, and the model has images of {kernel.shape[2]}")
        self.check_inputs(jax.ShapeDtypeStruct((1, *shape), np.float32), "images from config.pp_predict")
        return batch

    def _batches(self, inputs: Images | Tokens) -> Iterable[np.ndarray | PackedImages]:
        return (images for _, images in map(self.checked, _image_batches(inputs, self.pp)))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _scores(
    module: ViT, params: Params, images: Float[Array, "_ height width channels"] | PackedImages, multilabel: bool
) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
    """Return the logits of images and the probabilities of classes; one program, which has no other results."""
    logits = module.apply({"params": params}, images, train=False)[0]
    return logits, (jax.nn.sigmoid if multilabel else jax.nn.softmax)(logits)


def _best(
    file: str,
    scores: Float32[np.ndarray, " C"],
    class_names: Sequence[str],
    topk: int,
    reached: Bool[np.ndarray, " C"],
) -> list[Prediction]:
    """Return predictions of the `topk` classes with the highest scores for the image `file`, the highest first.

    Only classes that are True in `reached` are predicted. If there are none, the result is one prediction of rank 0.
    """
    best = [i for i in np.argsort(-scores, kind="stable")[:topk] if reached[i]]
    if not best:
        return [Prediction(file, 0, "", round(float(scores.max()), 6))]
    return [Prediction(file, rank, class_names[i], round(float(scores[i]), 6)) for rank, i in enumerate(best, start=1)]


def read_images(
    images: Iterable[ImageInput], pp: str, on_error: Callable[[str], None]
) -> Iterator[tuple[list[str], Float32[np.ndarray, "_ height width channels"] | PackedImages]]:
    """Yield batches of the names of up to `BATCH` images with the preprocessed images.

    With the op `patches`, each image is a packed row of its own.

    Args:
      images: paths of files, bytes of files, pictures or arrays.
      pp: the preprocessing of an encoded image, see `input_pipeline.Preprocess`.
      on_error: called with one line for each image that cannot be read or has another shape than the first.

    Raises:
      ConfigError: `pp` is empty or does not return float images.
      InputError: an array or a picture is not one of an image.
    """
    if not pp:
        raise ConfigError("config.pp_predict is empty: give the preprocessing of an image file")
    preprocess = Preprocess(pp)
    require("PIL.Image")  # not once for each image
    names: list[str] = []
    batch: list[np.ndarray] = []
    grids: list[np.ndarray] = []  # with the op `patches`
    shape: tuple[int, ...] | None = None
    for name, read in (_encoded(i, image) for i, image in enumerate(images)):
        try:
            example = preprocess({"image": read()}, np.random.default_rng(0))
            image = example["image"]
        except (InputError, OSError) as e:
            on_error(f"{name}: {e.strerror if isinstance(e, OSError) else e}")
            continue
        if image.ndim != 3 or image.dtype != np.float32:
            raise ConfigError(f"config.pp_predict yields {image.dtype} of {image.shape}; expected decode … value_range")
        shape = shape or image.shape
        if image.shape != shape:
            on_error(f"{name}: {image.shape} after preprocessing, others {shape}; add resize to config.pp_predict")
            continue
        names.append(name)
        batch.append(image)
        grids += [example["grid"]] if "grid" in example else []
        if len(names) == BATCH:
            yield names, _stacked(batch, grids)
            names, batch, grids = [], [], []
    if names:
        yield names, _stacked(batch, grids)


def _stacked(images: Sequence[np.ndarray], grids: Sequence[np.ndarray]) -> np.ndarray | PackedImages:
    """Return images as one array or, with the grids of their patches, as packed rows of one image each."""
    if not grids:
        return np.stack(images)
    rows: PackedImages = jax.device_get(one_per_row(jnp.asarray(np.stack(images)), jnp.asarray(np.stack(grids))))
    return rows


def _image_batches(images: Images | Tokens, pp: str) -> Iterable[tuple[list[str], np.ndarray | PackedImages]]:
    """Return batches (names, preprocessed images) of given images; float32 arrays are preprocessed already."""
    if isinstance(images, np.ndarray) and images.dtype == np.float32 and images.ndim in (3, 4):
        batch = images[None] if images.ndim == 3 else images
        if not np.isfinite(batch).all():
            raise InputError("the preprocessed images have numbers that are not finite")
        starts = range(0, len(batch), BATCH)
        chunks = [batch[start : start + BATCH] for start in starts]
        return [([str(i) for i in range(n, n + len(c))], c) for n, c in zip(starts, chunks, strict=True)]
    pixels = isinstance(images, np.ndarray) and images.ndim < 4
    single = pixels or isinstance(images, str | bytes | Path | Image.Image)
    several: Iterable[ImageInput] = [images] if single else images  # type: ignore[assignment,list-item]
    return read_images(several, pp, _raise)


def _encoded(number: int, image: object) -> tuple[str, Callable[[], bytes]]:
    """Return the name of an image and a function that returns its encoded bytes; a picture becomes a PNG."""
    if isinstance(image, str | Path):
        return str(image), expand(image).read_bytes
    if isinstance(image, bytes):
        return str(number), io.BytesIO(image).getvalue
    if isinstance(image, np.ndarray):
        if image.dtype not in (np.uint8, np.uint16, np.int16) or image.ndim not in (2, 3) or not image.size:
            expected = "uint8, uint16 or int16 of (height, width, channels)"
            raise InputError(f"image {number}: expected {expected}, found {image.dtype} of {image.shape}")
        if image.dtype != np.uint8 or image.shape[2:] not in ((), (2,), (3,), (4,)):  # those that a PNG holds
            array = io.BytesIO()
            np.save(array, image)
            return str(number), array.getvalue
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        expected = "a path, the bytes of a file, a picture or an array"
        raise InputError(f"image {number}: expected {expected}, got {type_name(type(image))}")
    if image.mode in ("I", "F"):  # a PNG would lose bits
        raise InputError(f"image {number}: the picture has 32 bits a channel; expected 8 or 16")
    if image.mode not in PNG_MODES:  # such as CMYK
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return str(number), file.getvalue


def _raise(message: str) -> NoReturn:
    raise InputError(message)
