"""Data sources of a config, checked against its preprocessing and its model before training starts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.keys import INPUT_KEYS, OWN_TOKENIZER
from dcvit.config.values import Options, with_classes
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.hub.open import TOKENIZER, stored_tokenizer, trains_tokenizer
from dcvit.models import losses
from dcvit.models.packed_images import PLACES, image_shape
from dcvit.parallel.mesh import BATCH
from dcvit.parallel.sharding import batch_shards
from dcvit.runs.files import Folder
from dcvit.runs.progress import stage
from dcvit.runs.steps import saved_steps
from input_pipeline import CorruptPolicy, Source, TokenSource
from input_pipeline.preprocess.packing import Packing, place
from input_pipeline.text.files import train_tokenizer

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The training data: an endless sequence of batches; each is a function of the seed and the step."""

    source: Source
    pp: str
    batch_size: int
    seed: int
    corrupt: CorruptPolicy
    packing: Packing | None = None  # of the images into rows

    def batches(
        self, start_step: int, rows: Sequence[int] | None = None
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield the batches of the steps after `start_step`; `rows` are the rows that this process prepares of each.

        With `packing`, `rows` are complete groups of images, and the array `PLACES` has the places of the images.
        """
        batches = input_pipeline.train_batches(
            self.source, self.pp, self.batch_size, self.seed, start_step, rows=rows, corrupt=self.corrupt
        )
        with contextlib.closing(batches):
            yield from map(self._placed, batches)

    def repeated(self) -> dict[str, np.ndarray]:
        """Return a batch, over all processes, that holds the first example in all rows; rows share their memory."""
        (row,) = itertools.islice(input_pipeline.train_batches(self.source, self.pp, 1, 0, threads=0), 1)
        return self._placed(
            {key: np.broadcast_to(value, (self.batch_size, *value.shape[1:])) for key, value in row.items()}
        )

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the batch; with `packing`, also with the places of its images in rows."""
        if self.packing is None:
            return batch
        return batch | {PLACES: place(np.prod(batch["grid"], axis=1).tolist(), self.packing)}


def packing_of(config: ConfigDict) -> Packing | None:
    """Return the rows of `config.input.pack`; None if it is empty.

    Raises:
      ConfigError: a key is unknown or missing, a number is of another type, too small or too large, the images are not
        cut into patches, or patches are mixed or erased.
    """
    sizes = input_pipeline.patch_sizes(config.input.get("pp", ""))
    mixing = [key for key in ("mixup", "cutmix", "reprob") if config[key]]
    if sizes and mixing:
        raise ConfigError(f"config.{mixing[0]} is for images of one size, not for the op patches: set it to 0")
    options = dict(config.input.get("pack") or {})
    if not options:
        return None
    check_call(Packing, options, "config.input.pack")
    packing = Packing(**options)
    if not 1 <= packing.rows <= packing.images <= packing.rows * packing.tokens or packing.tokens >= 1 << 31:
        raise ConfigError(f"config.input.pack={options}: expected 1 ≤ rows ≤ images ≤ rows · tokens, tokens below 2³¹")
    if sizes is None:
        raise ConfigError("config.input.pack packs the patches of images: add the op patches to config.input.pp")
    if packing.tokens < sizes[1]:
        raise ConfigError(
            f"config.input.pack.tokens={packing.tokens} is less than max_tokens={sizes[1]} of the op patches"
        )
    return packing


def check_input(config: ConfigDict) -> CorruptPolicy:
    """Check the keys of `config.input` and their types, and return the policy for damaged examples."""
    if unknown := [key for key in config.input if key not in INPUT_KEYS]:
        raise ConfigError(f"config.input has no key {unknown[0]!r}; {nearest(unknown[0], INPUT_KEYS)}")
    _values(config, INPUT_KEYS)
    return corrupt_policy(config)


def _values(config: ConfigDict, names: Iterable[str]) -> list[Any]:
    """Return values of `config.input`, or their defaults. Raises ConfigError if one is of a wrong type."""
    given = config.input.to_dict()
    found = [given.get(name, INPUT_KEYS[name].default) for name in names]
    for name, value in zip(names, found, strict=True):
        if not isinstance(value, INPUT_KEYS[name].type) or isinstance(value, bool):
            raise ConfigError(f"config.input.{name}={value!r} should be of type {INPUT_KEYS[name].type.__name__}")
    return found


def corrupt_policy(config: ConfigDict) -> CorruptPolicy:
    """Return a policy for damaged examples, that of `config.input`; training and each evaluator count their own."""
    hint = "; --config.input.corrupt=skip skips damaged examples, and `dcvit check-data` lists them"
    action, most = _values(config, ("corrupt", "corrupt_max"))
    return CorruptPolicy(action, most, hint)


def check_batch(config: ConfigDict, source: Source, mesh: Mesh, packing: Packing | None) -> None:
    """Raise ConfigError if the mesh or the rows do not divide a batch, or the training data does not fill one."""
    batch_size, parts = config.input.batch_size, config.grad_accum * batch_shards(mesh)
    images = packing.images if packing else 1
    if batch_size < 1 or batch_size % (images * parts):
        axes = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in BATCH)
        packed = f"pack.images {images} × " if packing else ""
        raise ConfigError(
            f"config.input.batch_size={batch_size} is not a positive multiple of {packed}grad_accum "
            f"{config.grad_accum} × {axes} devices of config.mesh"
        )
    if len(source) < batch_size:
        of, shorter = "", ""
        if isinstance(source, TokenSource):
            of, shorter = f" of {source.context} tokens", ", or give a shorter context= or hold out less"
        raise ConfigError(
            f"config.input: {len(source)} examples{of} do not fill one batch of {batch_size}: set "
            f"--config.input.batch_size to {len(source)} or less{shorter}"
        )


def all_inputs(config: ConfigDict) -> Iterator[tuple[str, dict[str, object], str, bool]]:
    """Yield (config key, arguments of the source, preprocessing, may be missing) of training and evaluation data.

    Raises:
      ConfigError: data without a `kind`.
    """
    if config.num_classes is not None:
        config = with_classes(config, config.num_classes)
    holders = {"config.input": config.input, **{f"config.evals.{name}": held for name, held in config.evals.items()}}
    for name, holder in holders.items():
        if not isinstance(holder, ConfigDict):
            raise ConfigError(f"{name}={holder!r} should be a dict with type, data and pp")
        pp = holder.get("pp") or ""
        if not isinstance(pp, str):
            raise ConfigError(f"{name}.pp={pp!r} should be of type str")
        for key in ("data", "test_data") if "test_data" in holder else ("data",):
            check_data(holder.get(key), f"{name}.{key}")
            data = dict(holder[key])
            if data.get("tokenizer") == OWN_TOKENIZER:
                del data["tokenizer"]  # bytes show whether text can be read
            yield f"{name}.{key}", data, pp, bool(holder.get("optional"))


def own_tokenizer(config: ConfigDict, workdir: Folder | None) -> str | None:
    """Return the text of tokenizer.json for a run whose data names `OWN_TOKENIZER`; None for other data.

    It is the file in the workdir if the run has a checkpoint; otherwise a tokenizer of `config.vocab_size` tokens is
    trained on the text.

    Raises:
      ConfigError: the config has no `vocab_size`.
      InputError: the text is missing, invalid or too large.
    """
    if not trains_tokenizer(config):
        return None
    data = config.input.data
    check_data(data, "config.input.data")
    if data["kind"] != "text" or config.vocab_size is None:
        raise ConfigError("config.input.data.tokenizer: a tokenizer to train needs kind='text' and config.vocab_size")
    if workdir and saved_steps(workdir) and (workdir / TOKENIZER).is_file():
        return stored_tokenizer(workdir)
    with stage(f"training a tokenizer of {config.vocab_size} tokens", LOG.info):
        return train_tokenizer(str(data.get("path")), config.vocab_size, data.get("key", "text"))


def open_source(data: Options, what: str) -> Source:
    """Return the source of a config's `data`, opened; `what` is the name of `data` in error messages."""
    check_data(data, what)
    return input_pipeline.open_source(**dict(data))


def check_data(data: object, what: str) -> None:
    """Raise ConfigError if `data` has no known `kind`, such as "text", or an option of all kinds has a wrong type."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")
    common = {key: data[key] for key in ("kind", "part", "limit", "cache") if key in data}
    check_call(input_pipeline.open_source, common, what)


def check_loss(name: object, what: str) -> None:
    """Raise ConfigError if `name` is not a loss of image models."""
    if name not in losses.NAMES:
        raise ConfigError(f"{what}={name!r}; {nearest(str(name), losses.NAMES)}")


def text_example(source: Source, config: ConfigDict, what: str) -> jax.ShapeDtypeStruct:
    """Return the shape of one row of tokens as a model input, (1, T) int32.

    Raises:
      ConfigError: the source `what` holds no text, or more tokens than the model's vocabulary.
    """
    if not isinstance(source, TokenSource):
        raise ConfigError(f"{what} holds no text, which config.model_name={config.model_name!r} reads")
    if source.vocab_size is None:
        raise ConfigError(f"{what} does not state its vocabulary size: give {what}.vocab_size")
    if config.vocab_size is not None and source.vocab_size > config.vocab_size:
        raise ConfigError(f"{what} has {source.vocab_size} tokens, config.vocab_size={config.vocab_size}")
    return jax.ShapeDtypeStruct((1, source.context), np.int32)


def image_example(
    source: Source, pp: str, config: ConfigDict, what: str, corrupt: CorruptPolicy,
    target: tuple[str, int] = ("labels", 1),
) -> jax.ShapeDtypeStruct:  # fmt: skip
    """Return the shape of one preprocessed image as a model input, (1, height, width, channels) float32.

    See `image_shape` for images of different sizes. The first readable image of the source is preprocessed by `pp`.

    Raises:
      ConfigError: `pp`, called `what`, does not yield a float32 image and the target: name and rank of the label,
        ("labels", 1) for a vector over the classes, ("label", 0) for an index.
    """
    batches = input_pipeline.eval_batches(source, pp, 1, corrupt=corrupt, threads=0)
    example = next(({k: v[0] for k, v in batch.items()} for batch in batches if batch["_mask"][0]), {})
    for key, ndim in (("image", 3), target):
        if key not in example or example[key].ndim != ndim:
            raise ConfigError(
                f"{what} yields {', '.join(k for k in example if k != '_mask')}; expected image (height, width, "
                f"channels) and {target[0]}"
            )
    if example["image"].dtype != np.float32:
        raise ConfigError(f"{what} yields {example['image'].dtype} images; add value_range(-1, 1)")
    if target[1]:
        classes = len(example["labels"])
        if classes != config.num_classes:
            raise ConfigError(f"{what} yields {classes} classes, config.num_classes={config.num_classes}")
        if (named := len(source.class_names or ())) > classes:
            raise ConfigError(f"{what}: the data has {named} classes, config.num_classes={classes}")
    return jax.ShapeDtypeStruct((1, *image_shape(example)), np.float32)


def check_predict(pp: str, source: Source, shape: tuple[int, ...], corrupt: CorruptPolicy) -> None:
    """Raise ConfigError if `config.pp_predict` does not turn encoded training images into float32 of `shape`."""
    preprocess = input_pipeline.Preprocess(pp)
    if not pp or corrupt.action == "skip" or not isinstance(image := source[0].get("image"), bytes):
        return  # the images are not encoded, or have another name
    example = preprocess({"image": image}, np.random.default_rng(0))
    found, dtype = image_shape(example), example["image"].dtype
    if found != shape or dtype != np.float32:
        expected = f"config.input.pp float32 of {shape}"
        raise ConfigError(f"config.pp_predict yields {dtype} of {found}, {expected}")
