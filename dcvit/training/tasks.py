"""What a model learns from a batch: to classify images, or to predict each next token.

A task checks that config and data fit, and tells training all that depends on what is learnt:
  config    the given one, with what follows from the data filled in
  example   the shape and dtype of a model input, for one example
  pp        the preprocessing that the host does
  rate      the unit of speed, and how many of it an example is
  prepare   from a batch of the input pipeline to what the loss takes
  loss      the objective: a mean over examples, so that a batch may be split into equal parts
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config import Options, duration, replaced, with_classes
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.models import lm, losses, pixels
from dcvit.parallel.mesh import BATCH
from dcvit.parallel.sharding import batch_shards

Arrays = dict[str, np.ndarray]
Batch = dict[str, jax.Array]
Loss = Callable[[Any, Batch, jax.Array], jax.Array]  # (parameters, prepared batch, dropout key) -> mean loss


class Images:
    """Classification: batches of `image` B H W C and of `labels` B C, smoothed and mixed as the config says."""

    rate = ("img/s", 1)

    def __init__(self, config: ConfigDict, source: input_pipeline.Source, corrupt: input_pipeline.CorruptPolicy):
        """Raises ConfigError where preprocessing, classes and loss do not fit."""
        self.config = config = with_classes(config, _num_classes(config, source.class_names))
        check_loss(config.loss, "config.loss")
        for key in ("z_loss", "loss_chunk", "document_mask"):
            if config[key]:
                raise ConfigError(f"config.{key}={config[key]!r} is for language models")
        pp = config.input.get("pp", "")
        self.example = image_example(source, pp, config, "config.input.pp", corrupt)
        self.pp, self.on_device = pixels.split(pp)  # what the host does, and what is done to its images after
        _check_predict(config.pp_predict, source, self.example.shape[1:], corrupt)

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """`image` float32 and `labels`."""
        images, labels = self.on_device(batch["image"]), batch["labels"]
        if self.config.label_smoothing:
            labels = losses.smooth(labels, self.config.label_smoothing)
        if self.config.mixup:
            images, labels = losses.mixup(key, images, labels, self.config.mixup)
        return {"image": images, "labels": labels}

    def loss(self, net: Any) -> Loss:
        """The mean of `config.loss`."""
        loss_fn = getattr(losses, self.config.loss)

        def loss_of(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
            logits, _ = net.apply({"params": params}, batch["image"], train=True, rngs={"dropout": key})
            return jnp.mean(loss_fn(logits, batch["labels"]))

        return loss_of


class Tokens:
    """Language modelling: rows `tokens` B T+1, and `is_target`, which of them the loss counts."""

    def __init__(self, config: ConfigDict, source: input_pipeline.Source, corrupt: input_pipeline.CorruptPolicy):
        """Raises ConfigError where vocabulary and context do not fit, or for what only images have."""
        for key in ("label_smoothing", "mixup"):
            if config[key]:
                raise ConfigError(f"config.{key}={config[key]!r} is for images")
        if config.loss != "softmax_xent":
            raise ConfigError(f"config.loss={config.loss!r}: language models train with 'softmax_xent'")
        rows: Any = source
        self.example = text_example(rows, config, "config.input.data")
        self.config = with_text(config, rows.vocab_size, rows.context, rows.end_of_text)
        context = self.config.model.context
        if context < rows.context:
            raise ConfigError(f"config.model.context={context} is less than the data's {rows.context}")
        self.pp = config.input.get("pp", "")
        self.rate = ("tok/s", rows.context)

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """`tokens`, and the weight of each target, such that their mean over the batch is 1."""
        counts = batch["is_target"][:, 1:].astype(jnp.float32)
        return {"tokens": batch["tokens"], "weights": counts / jnp.maximum(jnp.mean(counts), 1e-9)}

    def loss(self, net: Any) -> Loss:
        """The mean over all targets of the cross-entropy, in nats, and of the z-loss."""
        options = {"chunk": self.config.loss_chunk, "z_loss": self.config.z_loss}

        def loss_of(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
            tokens = batch["tokens"]
            _, out = net.apply({"params": params}, tokens[:, :-1], train=True)
            unembed = functools.partial(lm.unembed, kernel=lm.head_kernel(params))
            nats = losses.token_xent(unembed, out["pre_logits"], tokens[:, 1:], **options)
            return jnp.mean(nats * batch["weights"])

        return loss_of


def check_loss(name: Any, what: str) -> None:
    """Raises ConfigError where there is no such loss."""
    if name not in losses.NAMES:
        raise ConfigError(f"{what}={name!r}; {nearest(str(name), losses.NAMES)}")


Task = Images | Tokens
TASKS: dict[str, type[Task]] = {"vit": Images, "lm": Tokens}


class TrainingData:
    """The training source of a config, and what follows from it: the task and the total of steps."""

    def __init__(self, config: ConfigDict, mesh: Mesh, source: input_pipeline.Source | None = None):
        """`source` stands in for the config's own. Raises ConfigError or InputError where config, data and the mesh's
        parts of a batch do not fit."""
        known = {"data": dict, "batch_size": int, "pp": str, "corrupt": str, "corrupt_max": int}
        for key in config.input:
            if key not in known:
                raise ConfigError(f"config.input has no key {key!r}; {nearest(key, known)}")
        options = {"pp": "", "corrupt": "fail", "corrupt_max": 100, **config.input.to_dict()}
        for key, expected in known.items():
            value = options.get(key)
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ConfigError(f"config.input.{key}={value!r} should be of type {expected.__name__}")
        self.batch_size, self.seed = options["batch_size"], config.seed
        if self.batch_size < 1:
            raise ConfigError(f"config.input.batch_size={self.batch_size} should be 1 or more")
        if self.batch_size % (config.grad_accum * batch_shards(mesh)):
            raise ConfigError(
                f"config.input.batch_size={self.batch_size} is no multiple of grad_accum {config.grad_accum} × "
                f"{' × '.join(f'{axis} {mesh.shape[axis]}' for axis in BATCH)} devices of config.mesh"
            )
        self.corrupt = input_pipeline.CorruptPolicy(options["corrupt"], options["corrupt_max"])
        self.source = open_source(config.input.data, "config.input.data") if source is None else source
        if len(self.source) < self.batch_size:
            raise ConfigError(f"config.input: {len(self.source)} examples do not fill one batch of {self.batch_size}")
        if config.model_name not in TASKS:
            raise ConfigError(f"config.model_name={config.model_name!r}; {nearest(config.model_name, TASKS)}")
        self.task = TASKS[config.model_name](config, self.source, self.corrupt)
        self.config = self.task.config
        total = duration(config, "total", batch_size=self.batch_size, examples=len(self.source))
        if not total:
            raise ConfigError("config: give total_epochs, total_steps or total_examples, above 0")
        self.total_steps = total

    def duration(self, config: Options, name: str, what: str, default: int | None = None) -> int | None:
        """A duration of the config in steps; see `dcvit.config.duration`."""
        return duration(
            config, name, batch_size=self.batch_size, examples=len(self.source),
            total_steps=self.total_steps, default=default, what=what,
        )  # fmt: skip

    def batches(
        self, start_step: int, rows: Sequence[int] | None = None
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """The training stream from a step on; of each batch those `rows`."""
        return input_pipeline.train_batches(
            self.source, self.task.pp, self.batch_size, self.seed, start_step, rows=rows, corrupt=self.corrupt
        )


def _num_classes(config: ConfigDict, class_names: tuple[str, ...] | None) -> int:
    """`config.num_classes`, or where it is None as many as the data names."""
    if config.num_classes is None and not class_names:
        raise ConfigError("config.num_classes=None, but the training data does not name its classes: give the number")
    return len(class_names or ()) if config.num_classes is None else int(config.num_classes)


def with_text(config: ConfigDict, vocab_size: int | None, context: int | None, end_of_text: int | None) -> ConfigDict:
    """The config with what it leaves to the text: `vocab_size`, `model.context` and, where a document mask is asked
    for, `model.end_of_text`.

    Raises:
      ConfigError: one of them is needed and not known.
    """
    model = {"context": context, **config.model.to_dict()}
    if config.document_mask:
        model = {"end_of_text": end_of_text, **model}
    vocab_size = vocab_size if config.vocab_size is None else config.vocab_size
    known = {
        "vocab_size": vocab_size,
        "model.context": model["context"],
        "model.end_of_text": model.get("end_of_text", 0),
    }
    for key, value in known.items():
        if value is None:
            raise ConfigError(f"config.{key} is not known: give it, or what it follows from: the data, or --workdir")
    return replaced(config, vocab_size=vocab_size, model=model)


def text_example(source: Any, config: ConfigDict, what: str) -> jax.ShapeDtypeStruct:
    """A model input of one row of tokens; checks that the data is text, in the model's vocabulary."""
    if not hasattr(source, "context"):
        raise ConfigError(f"{what} holds no text, which config.model_name={config.model_name!r} reads")
    if source.vocab_size is None:
        raise ConfigError(f"{what} does not say how many different tokens it has: give {what}.vocab_size")
    if config.vocab_size is not None and source.vocab_size > config.vocab_size:
        raise ConfigError(f"{what} has {source.vocab_size} tokens, config.vocab_size={config.vocab_size}")
    return jax.ShapeDtypeStruct((1, source.context), np.int32)


def open_source(data: Options, what: str) -> input_pipeline.Source:
    """`input_pipeline.open_source` of a config's `data`."""
    check_data(data, what)
    return input_pipeline.open_source(**dict(data))


def check_data(data: Any, what: str) -> None:
    """Raises ConfigError where `data` does not name a kind, or what every kind takes is of another type."""
    if not isinstance(data, Mapping | ConfigDict) or not isinstance(data.get("kind"), str):
        raise ConfigError(f"{what}.kind names the kind of data; known: {', '.join(input_pipeline.KINDS)}")
    own = {key: data[key] for key in ("kind", "limit", "cache") if key in data}
    check_call(input_pipeline.open_source, own, what)


def image_example(
    source: input_pipeline.Source,
    pp: str,
    config: ConfigDict,
    what: str,
    corrupt: input_pipeline.CorruptPolicy,
    target: tuple[str, int] = ("labels", 1),
) -> jax.ShapeDtypeStruct:
    """A model input of one preprocessed image; checks that `pp` yields what the model and the loss take.

    `target` is the name and rank of what stands beside the image: "labels", a vector over the classes, or "label".
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


def _check_predict(
    pp: str, source: input_pipeline.Source, shape: tuple[int, ...], corrupt: input_pipeline.CorruptPolicy
) -> None:
    """Raises ConfigError where `pp_predict` does not make a stored image what the model was trained on."""
    preprocess = input_pipeline.Preprocess(pp)
    if not pp or corrupt.action == "skip" or not isinstance(image := source[0]["image"], bytes):
        return
    found = preprocess({"image": image}, np.random.default_rng(0))["image"]
    if found.shape != shape or found.dtype != np.float32:
        expected = f"config.input.pp float32 of {shape}"
        raise ConfigError(f"config.pp_predict yields {found.dtype} of {found.shape}, {expected}")
