"""Data sources of a config, checked against its preprocessing and its model before training starts."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.durations import Options
from dcvit.config.keys import OWN_TOKENIZER
from dcvit.config.load import INPUT_KEYS, replaced
from dcvit.errors import ConfigError, check_call, first_line, nearest
from dcvit.parallel.mesh import BATCH
from dcvit.parallel.sharding import batch_shards
from dcvit.runs.files import Folder
from dcvit.runs.progress import stage
from dcvit.runs.steps import saved_steps
from input_pipeline import CorruptPolicy, InputError, MissingDataError, Source, TokenSource
from input_pipeline.files import expand
from input_pipeline.text.train_tokenizer import train_tokenizer

LOG = logging.getLogger(__name__)
T = TypeVar("T")
TOKENIZER = "tokenizer.json"  # file in the workdir of a run that trained its tokenizer


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The training stream: an endless sequence of batches, a function of the seed and the step."""

    source: Source
    pp: str
    batch_size: int
    seed: int
    corrupt: CorruptPolicy

    def batches(
        self, start_step: int, rows: Sequence[int] | None = None
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield the batches from a step on; `rows` selects the rows of each batch that this process prepares."""
        return input_pipeline.train_batches(
            self.source, self.pp, self.batch_size, self.seed, start_step, rows=rows, corrupt=self.corrupt
        )


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
    return batch_size, CorruptPolicy(options["corrupt"], options["corrupt_max"], corrupt_hint("config.input"))


def corrupt_hint(what: str) -> str:
    """Return the end of the message about a damaged example of an input, such as "config.input"."""
    return f"; --{what}.corrupt=skip skips damaged examples, and `dcvit check-data` lists them"


def all_inputs(config: ConfigDict) -> Iterator[tuple[str, dict[str, object], str, bool]]:
    """Yield (name, data, preprocessing, optional) of the training data and of each evaluation's data.

    Raises:
      ConfigError: data of no kind.
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


def open_source(data: Options, what: str) -> Source:
    """Open a config's `data`; `what` is its name in error messages."""
    check_data(data, what)
    with with_hints(data):
        return input_pipeline.open_source(**dict(data))


@contextlib.contextmanager
def with_hints(data: Options) -> Iterator[None]:
    """Add to an InputError of opening `data` which arguments of the shipped configs may resolve it."""
    folder = data.get("data_dir") if data["kind"] == "folder" else None
    if isinstance(folder, str) and folder and not expand(folder).is_dir():
        raise MissingDataError(f"no folder {folder}{'; only local folders are read' * ('://' in folder)}")
    try:
        yield
    except InputError as e:
        hint = ""
        if isinstance(folder, str) and isinstance(e, MissingDataError) and data.get("val_fraction") is None:
            hint = "; if it holds the class folders themselves, give the config val_fraction=0.1"
        elif data["kind"] == "megatron" and data.get("rows") is not None:
            hint = (
                "; lm_pile.py takes validation=ROWS, the number of rows to hold out, and context=TOKENS, their length"
            )
        elif data["kind"] in ("text", "input_ids") and Path(str(data.get("path"))).name in ("train", "validation"):
            hint = "; lm_pile.py reads the folders train and validation, and lm_text.py splits one folder"
        if not hint:
            raise
        raise type(e)(f"{e}{hint}") from e


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


def check_data(data: object, what: str) -> None:
    """Raise ConfigError if `data` names no kind, or if an option common to all kinds has the wrong type."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")
    common = {key: data[key] for key in ("kind", "part", "limit", "cache") if key in data}
    check_call(input_pipeline.open_source, common, what)


def trains_tokenizer(config: ConfigDict) -> bool:
    """Return True if the data names `OWN_TOKENIZER`."""
    data = config.input.get("data")
    return isinstance(data, Mapping | ConfigDict) and data.get("tokenizer") == OWN_TOKENIZER


def own_tokenizer(config: ConfigDict, workdir: Folder | None) -> str | None:
    """Return the tokenizer.json of a run whose data names `OWN_TOKENIZER`; None for other data.

    The tokenizer is that in the workdir if the run has a checkpoint, or else one of `config.vocab_size` tokens that is
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


def stored_tokenizer(workdir: Folder) -> str:
    """Return the tokenizer.json that a run has trained and stored in its workdir.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    try:
        return (workdir / TOKENIZER).read_bytes().decode()
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {workdir / TOKENIZER}, the run's tokenizer: {first_line(e)}") from None


@contextlib.contextmanager
def with_tokenizer(config: ConfigDict, tokenizer: str | None) -> Iterator[ConfigDict]:
    """Yield the config with the path of a temporary file that holds `tokenizer` in place of `OWN_TOKENIZER`."""
    if tokenizer is None:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TOKENIZER
        file.write_text(tokenizer, encoding="utf-8")
        values = {"input": config.input.to_dict(), "evals": config.evals.to_dict()}
        for holder in (values["input"], *values["evals"].values()):
            data = holder.get("data") if isinstance(holder, dict) else None
            if isinstance(data, dict) and data.get("tokenizer") == OWN_TOKENIZER:
                holder["data"] = {**data, "tokenizer": str(file)}
        yield replaced(config, **{key: ConfigDict(value) for key, value in values.items()})


def require(value: T | None, key: str) -> T:
    """Return a value of the config that may also come from the data or from a workdir.

    Raises:
      ConfigError: the value is None.
    """
    if value is None:
        raise ConfigError(f"config.{key} is not known: set it, or give the data or the --workdir that determines it")
    return value


def text_example(source: Source, config: ConfigDict, what: str) -> jax.ShapeDtypeStruct:
    """Return the shape of one row of tokens as a model input, (1, T) int32.

    Raises:
      ConfigError: the source holds no text, or more tokens than the model's vocabulary.
    """
    text = as_text(source, config, what)
    if text.vocab_size is None:
        raise ConfigError(f"{what} does not state its vocabulary size: give {what}.vocab_size")
    if config.vocab_size is not None and text.vocab_size > config.vocab_size:
        raise ConfigError(f"{what} has {text.vocab_size} tokens, config.vocab_size={config.vocab_size}")
    return jax.ShapeDtypeStruct((1, text.context), np.int32)


def as_text(source: Source, config: ConfigDict, what: str) -> TokenSource:
    """Return the source. Raise ConfigError if it holds no text."""
    if not isinstance(source, TokenSource):
        raise ConfigError(f"{what} holds no text, which config.model_name={config.model_name!r} reads")
    return source


def image_example(
    source: Source,
    pp: str,
    config: ConfigDict,
    what: str,
    corrupt: CorruptPolicy,
    target: tuple[str, int] = ("labels", 1),
) -> jax.ShapeDtypeStruct:
    """Return the shape of one preprocessed image as a model input, (1, height, width, channels) float32.

    Args:
      source: the images; the first readable one is preprocessed.
      pp: the preprocessing string.
      config: the config, for its number of classes.
      what: the name of `pp` in error messages.
      corrupt: the policy for damaged examples.
      target: name and rank of the label: ("labels", 1) for a vector over the classes, ("label", 0) for an index.

    Raises:
      ConfigError: `pp` does not yield a float32 image and the target.
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
    classes = len(example["labels"]) if target[1] else config.num_classes
    if classes != config.num_classes:
        raise ConfigError(f"{what} yields {classes} classes, config.num_classes={config.num_classes}")
    if target[1] and len(source.class_names or ()) > classes:
        raise ConfigError(f"{what}: the data has {len(source.class_names or ())} classes, config.num_classes={classes}")
    return jax.ShapeDtypeStruct((1, *example["image"].shape), np.float32)


def check_predict(pp: str, source: Source, shape: tuple[int, ...], corrupt: CorruptPolicy) -> None:
    """Raise ConfigError if `config.pp_predict` does not turn an encoded training image into a model input."""
    preprocess = input_pipeline.Preprocess(pp)
    if not pp or corrupt.action == "skip" or not isinstance(image := source[0].get("image"), bytes):
        return  # the images are not encoded, or have another name
    found = preprocess({"image": image}, np.random.default_rng(0))["image"]
    if found.shape != shape or found.dtype != np.float32:
        expected = f"config.input.pp float32 of {shape}"
        raise ConfigError(f"config.pp_predict yields {found.dtype} of {found.shape}, {expected}")
