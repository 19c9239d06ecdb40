"""Data sources of a config, checked against its preprocessing and its model before training starts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Generator, Iterator, Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.keys import INPUT_KEYS, OWN_TOKENIZER
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.hub.open import TOKENIZER, stored_tokenizer, trains_tokenizer
from dcvit.models.packed_images import PLACES, image_shape
from dcvit.parallel.mesh import BATCH
from dcvit.parallel.sharding import batch_shards
from dcvit.runs.files import Folder
from dcvit.runs.progress import stage
from dcvit.runs.steps import saved_steps
from dcvit.training.evaluation import check_data, corrupt_hint
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
            for batch in batches:
                if self.packing is not None:
                    batch[PLACES] = place(np.prod(batch["grid"], axis=1).tolist(), self.packing)
                yield batch

    def repeated(self) -> dict[str, np.ndarray]:
        """Return a batch, over all processes, that holds the first example in all rows; rows share their memory."""
        (row,) = itertools.islice(input_pipeline.train_batches(self.source, self.pp, 1, 0, threads=0), 1)
        batch = {key: np.broadcast_to(value, (self.batch_size, *value.shape[1:])) for key, value in row.items()}
        if self.packing is not None:
            batch[PLACES] = place(np.prod(batch["grid"], axis=1).tolist(), self.packing)
        return batch


def packing_of(config: ConfigDict) -> Packing | None:
    """Return the rows of `config.input.pack`; None if it is empty.

    Raises:
      ConfigError: a key is unknown or missing, or a number is of another type, too small or too large.
    """
    options = dict(config.input.get("pack") or {})
    if not options:
        return None
    check_call(Packing, options, "config.input.pack")
    packing = Packing(**options)
    if min(packing) < 1 or packing.tokens * packing.rows < packing.images:
        raise ConfigError(f"config.input.pack={options}: expected 1 or more of each, and a token for each image")
    if packing.rows > packing.images or packing.tokens >= 1 << 31:
        raise ConfigError(
            f"config.input.pack={options}: expected at most as many rows as images, of less than 2³¹ tokens"
        )
    return packing


def check_packing(config: ConfigDict) -> None:
    """Raise ConfigError if `config.input` packs images that are not cut into patches, or rows are too short for one."""
    packing, sizes = packing_of(config), input_pipeline.patch_sizes(config.input.get("pp", ""))
    if packing and sizes is None:
        raise ConfigError("config.input.pack packs the patches of images: add the op patches to config.input.pp")
    if packing and sizes and packing.tokens < sizes[1]:
        raise ConfigError(
            f"config.input.pack.tokens={packing.tokens} is less than max_tokens={sizes[1]} of the op patches"
        )
    mixing = {key: config[key] for key in ("mixup", "cutmix", "reprob") if config[key]}
    if sizes and mixing:
        shown = ", ".join(f"config.{key}={value!r}" for key, value in mixing.items())
        raise ConfigError(f"{shown} is for images of one size, not for the op patches: set it to 0")


def read_input(config: ConfigDict, mesh: Mesh) -> tuple[int, CorruptPolicy]:
    """Return the batch size and the policy for damaged examples of `config.input`.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or a batch that the mesh does not divide.
    """
    for key in config.input:
        if key not in INPUT_KEYS:
            raise ConfigError(f"config.input has no key {key!r}; {nearest(key, INPUT_KEYS)}")
    options = {name: key.default for name, key in INPUT_KEYS.items()} | config.input.to_dict()
    for name, key in INPUT_KEYS.items():
        value = options[name]
        if not isinstance(value, key.type) or isinstance(value, bool):
            raise ConfigError(f"config.input.{name}={value!r} should be of type {key.type.__name__}")
    batch_size = options["batch_size"]
    if batch_size < 1:
        raise ConfigError(f"config.input.batch_size={batch_size} should be 1 or more")
    if batch_size % (config.grad_accum * batch_shards(mesh)):
        raise ConfigError(
            f"config.input.batch_size={batch_size} is not a multiple of grad_accum {config.grad_accum} × "
            f"{' × '.join(f'{axis} {mesh.shape[axis]}' for axis in BATCH)} devices of config.mesh"
        )
    packing = packing_of(config)
    if packing and batch_size % (packing.images * config.grad_accum * batch_shards(mesh)):
        raise ConfigError(
            f"config.input.batch_size={batch_size} is not a multiple of pack.images {packing.images} × grad_accum "
            f"{config.grad_accum} × {batch_shards(mesh)} parts of config.mesh: each part packs its own images"
        )
    return batch_size, CorruptPolicy(options["corrupt"], options["corrupt_max"], corrupt_hint("config.input"))


def all_inputs(config: ConfigDict) -> Iterator[tuple[str, dict[str, object], str, bool]]:
    """Yield (config key, arguments of the source, preprocessing, may be missing) of training and evaluation data.

    Raises:
      ConfigError: data without a `kind`.
    """
    holders = {"config.input": config.input, **{f"config.evals.{name}": held for name, held in config.evals.items()}}
    for name, holder in holders.items():
        if not isinstance(holder, ConfigDict):
            raise ConfigError(f"{name}={holder!r} should be a dict with type, data and pp")
        for key in ("data", "test_data") if "test_data" in holder else ("data",):
            check_data(holder.get(key), f"{name}.{key}")
            data = dict(holder[key])
            if data.get("tokenizer") == OWN_TOKENIZER:
                del data["tokenizer"]  # bytes show whether text can be read
            pp = holder.get("pp") or ""
            if not isinstance(pp, str):
                raise ConfigError(f"{name}.pp={pp!r} should be of type str")
            if config.num_classes is not None:
                pp = pp.replace("{num_classes}", str(config.num_classes))
            yield f"{name}.{key}", data, pp, bool(holder.get("optional"))


def check_batch(source: Source, batch_size: int) -> None:
    """Raise ConfigError if the training data has less than one batch of examples."""
    if len(source) < batch_size:
        of, shorter = "", ""
        if isinstance(source, TokenSource):
            of, shorter = f" of {source.context} tokens", ", or give a shorter context= or hold out less"
        raise ConfigError(
            f"config.input: {len(source)} examples{of} do not fill one batch of {batch_size}: set "
            f"--config.input.batch_size to {len(source)} or less{shorter}"
        )


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
