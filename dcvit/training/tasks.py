"""Tasks: image classification and language modeling, with the parts of training that differ between them.

Each task class has

  create    checks a config against its data; returns the task and the config, complete: only here does it get the
            number of classes, or the vocabulary and the context, that it leaves to the data
  stand_in  a source in place of data that is not on this host, and the config for it

and each task

  example  shape and dtype of a model input for one example
  pp       preprocessing on the host
  rate     unit of speed, such as "tok/s", and how many of it an example is
  prepare  from a batch of the input pipeline to the arguments of the loss
  loss     the objective, a mean over examples: a batch may be split into equal parts
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int8, Int32
from ml_collections import ConfigDict

import input_pipeline
from dcvit.config.values import replaced, with_classes
from dcvit.errors import ConfigError
from dcvit.hub.kinds import kind_of, require, with_text
from dcvit.hub.tokenizers import tokenizer_of
from dcvit.models import Outputs, Params, lm, losses, pixels
from dcvit.models.packed_images import PackedImages, model_inputs
from dcvit.training.augment import Augmentation
from dcvit.training.distillation import TEACHER, Distillation, heads_of, make_distillation
from dcvit.training.inputs import check_loss, check_predict, image_example, packing_of, text_example
from input_pipeline import CorruptPolicy, Source, TokenSource
from input_pipeline.preprocess.builder import decoded_as
from input_pipeline.preprocess.packing import Packing

Batch = dict[str, Any]  # arrays, or trees of arrays
Loss = Callable[[Params, Batch, jax.Array], jax.Array]  # (parameters, prepared batch, dropout key) -> mean loss
STAND_IN_EXAMPLES = 1_000_000
BALANCED = "balanced"  # weights of classes that are counted from the labels


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """Classification: batches of `image` B H W C and `labels` B C, smoothed, erased and mixed as the config says.

    Labels below 0 are unknown, and do not count in the loss.
    """

    rate: ClassVar[tuple[str, int]] = ("img/s", 1)

    example: jax.ShapeDtypeStruct
    pp: str
    to_float: Callable[[jax.Array], jax.Array]  # the part of the preprocessing that runs on the device
    loss_name: str
    label_smoothing: float
    augmentation: Augmentation
    weights: Mapping[str, tuple[float, ...]]  # arguments of the loss: `class_weights` and `pos_weight`, if set
    packing: Packing | None = None  # of images of different sizes into rows
    distillation: Distillation | None = None

    @classmethod
    def create(cls, config: ConfigDict, source: Source, corrupt: CorruptPolicy) -> tuple[ImageTask, ConfigDict]:
        """Return the task and config with the number of classes; ConfigError if a key or the data do not fit."""
        classes, names = config.num_classes, source.class_names or ()
        if classes is None and not names:
            raise ConfigError("config.num_classes=None, but the training data does not name its classes: set a number")
        config = with_classes(config, len(names) if classes is None else classes)
        check_loss(config.loss, "config.loss")
        if config.num_classes == 1 and config.loss == "softmax_xent":
            only = ", ".join(map(repr, names))
            raise ConfigError(f"config.num_classes=1 (class of the training data: {only}): a softmax needs two or more")
        _refuse(config, ("z_loss", "loss_chunk", "document_mask"), "language models")
        if config.pos_weight and config.loss != "sigmoid_xent":
            raise ConfigError(f"config.pos_weight is for loss='sigmoid_xent', not {config.loss!r}")
        pp, packing = config.input.get("pp", ""), packing_of(config)
        example = image_example(source, pp, config, "config.input.pp", corrupt)
        check_predict(config.pp_predict, source, example.shape[1:], corrupt)
        host_pp, to_float = pixels.split(pp)
        augmentation = Augmentation(**{field.name: config[field.name] for field in dataclasses.fields(Augmentation)})
        augmentation.check()
        weights = {
            key: class_weights(key, config[key], source, config.num_classes)
            for key in ("class_weights", "pos_weight")
            if config[key] is not None and not isinstance(source, StandIn)  # which has no labels to count
        }
        distillation = make_distillation(config, source, pp, example)
        task = cls(
            example, host_pp, to_float, config.loss, config.label_smoothing, augmentation, weights, packing,
            distillation,
        )  # fmt: skip
        return task, config

    @staticmethod
    def stand_in(config: ConfigDict) -> tuple[Source, ConfigDict]:
        """Return a source of black images, and the config with the preprocessing that these need.

        Raises:
          ConfigError: the config leaves the number of classes or the size of images to the data.
        """
        config = with_classes(config, require(config.num_classes, "num_classes"))
        pp, size = input_pipeline.after_resizing(config.input.get("pp", ""))
        if size is None:
            raise ConfigError(f"config.input.pp={config.input.get('pp')!r} does not resize images to one size")
        _, dtype = decoded_as(config.input.get("pp", ""))
        row = {"image": np.zeros(size, dtype), "label": 0, "labels": np.zeros(1, np.int64)}
        return StandIn(row), replaced(config, input={**config.input.to_dict(), "pp": pp})

    def check_evaluator(self, evaluator: Any, source: Source, what: str) -> None:
        """Raise ConfigError if an evaluator's images or classes differ from those of the training `source`.

        Class names must be equal or entirely different: names that are partly the same indicate another numbering.
        """
        shape, expected = evaluator.data.example.shape[1:], self.example.shape[1:]
        if shape != expected:
            raise ConfigError(f"{what}.pp yields images of {shape}, training of {expected}")
        ours, theirs = source.class_names or (), evaluator.data.source.class_names or ()
        if evaluator.target[1] and ours != theirs and set(ours) & set(theirs):
            differing = sorted(set(ours) ^ set(theirs)) or ["their order"]
            raise ConfigError(f"{what}.data has other classes than the training data: {', '.join(differing[:6])}")

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Return the batch for the loss: `image` as float32, augmented, `labels`, mixed and smoothed, and `scale`.

        `scale` B is the factor of `losses.mean_scale` for the whole batch, which may then be split into parts. Images
        of different sizes are in packed rows; labels and `scale` then have a first axis of their groups.
        """
        images, labels = model_inputs(batch, self.to_float, self.packing, key), batch["labels"]
        if self.loss_name == "softmax_xent":
            labels = losses.unlabeled_as_unknown(labels)
        if not isinstance(images, PackedImages):
            images, labels = self.augmentation(key, images, labels)
        scale = losses.mean_scale(self.loss_name, labels, self._arguments().get("class_weights"))
        if self.label_smoothing:
            labels = losses.smooth(labels, self.label_smoothing)
        groups = images.slots.shape if isinstance(images, PackedImages) else labels.shape[:1]
        scales = jnp.broadcast_to(scale, len(labels)).reshape(groups)
        return {"image": images, "labels": labels.reshape(*groups, -1), "scale": scales}

    def _arguments(self) -> dict[str, jax.Array]:
        return {name: jnp.asarray(value, jnp.float32) for name, value in self.weights.items()}

    def loss(self, net: nn.Module) -> Loss:
        """Return the function (params, batch, key) -> mean of `config.loss`.

        With `distillation`, the batch also has the teacher's logits, and the loss is that of `Distillation.loss`.
        """
        loss_fn = functools.partial(getattr(losses, self.loss_name), **self._arguments())

        def loss_of(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
            outputs = net.apply({"params": params}, batch["image"], train=True, rngs={"dropout": key})
            logits, out = cast(tuple[jax.Array, Outputs], outputs)
            labels = batch["labels"].reshape(-1, batch["labels"].shape[-1])  # without the axis of groups
            scale = batch["scale"].reshape(-1)

            def of_labels(logits: jax.Array) -> jax.Array:
                return loss_fn(logits, labels) * scale

            if self.distillation is None:
                return jnp.mean(of_labels(logits))
            return jnp.mean(self.distillation.loss(of_labels, heads_of(net, params, logits, out), batch[TEACHER]))

        return loss_of


@dataclasses.dataclass(frozen=True)
class TokenTask:
    """Language modeling: rows `tokens` B T+1, and `is_target` B T+1, True for the tokens that the loss counts."""

    example: jax.ShapeDtypeStruct
    pp: str
    rate: tuple[str, int]
    packing: ClassVar[None] = None
    loss_chunk: int | None
    z_loss: float
    distillation: ClassVar[None] = None

    @classmethod
    def create(cls, config: ConfigDict, source: Source, corrupt: CorruptPolicy) -> tuple[TokenTask, ConfigDict]:
        """Return the task and config with vocabulary size and context; ConfigError if a key or the data do not fit."""
        _refuse(
            config, ("label_smoothing", "mixup", "cutmix", "reprob", "class_weights", "pos_weight", "distill"), "images"
        )
        if config.input.get("pack"):
            raise ConfigError("config.input.pack is for images: rows of text are packed always")
        if config.loss != "softmax_xent":
            raise ConfigError(f"config.loss={config.loss!r}: language models train with 'softmax_xent'")
        example = text_example(source, config, "config.input.data")
        text = cast(TokenSource, source)
        config = with_text(config, text.vocab_size, text.context, text.end_of_text)
        if config.model.context < text.context:
            raise ConfigError(f"config.model.context={config.model.context} is less than the data's {text.context}")
        pp, rate = config.input.get("pp", ""), ("tok/s", text.context)
        return cls(example, pp, rate, config.loss_chunk, config.z_loss), config

    @staticmethod
    def stand_in(config: ConfigDict) -> tuple[Source, ConfigDict]:
        """Return a source of rows of token 0, and the config.

        Raises:
          ConfigError: the config leaves the vocabulary or the context to the data.
        """
        vocab_size = config.vocab_size
        if vocab_size is None and config.input.data.get("kind") == "text":
            vocab_size = tokenizer_of(config).vocab_size
        context = require(config.model.get("context") or config.input.data.get("context"), "model.context")
        row = {"tokens": np.zeros(context + 1, np.int32), "is_target": np.ones(context + 1, bool)}
        return TextStandIn(row, context, require(vocab_size, "vocab_size")), config

    def check_evaluator(self, evaluator: Any, source: Source, what: str) -> None:
        """Raise ConfigError if the documents of an evaluator end with another token than those of training."""
        ends = cast(TokenSource, source).end_of_text, evaluator.data.source.end_of_text
        if None not in ends and ends[0] != ends[1]:
            raise ConfigError(f"{what}.data ends documents with token {ends[1]}, the training data with {ends[0]}")

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Return the batch for the loss: `tokens` B T+1, and `weights` of the targets B T, of mean 1."""
        counts = batch["is_target"][:, 1:].astype(jnp.float32)
        return {"tokens": batch["tokens"], "weights": counts / jnp.maximum(jnp.mean(counts), 1e-9)}

    def loss(self, net: nn.Module) -> Loss:
        """Return the function (params, batch, key) -> loss: mean nats per target, plus z-loss."""

        def loss_of(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
            tokens = batch["tokens"]
            _, out = net.apply({"params": params}, tokens[:, :-1], train=True)
            unembed = functools.partial(lm.unembed, kernel=lm.head_kernel(params))
            nats = losses.token_xent(
                unembed, out["pre_logits"], tokens[:, 1:], chunk=self.loss_chunk, z_loss=self.z_loss
            )
            return jnp.mean(nats * batch["weights"])

        return loss_of


def class_weights(key: str, value: str | Sequence[float], source: Source, classes: int) -> tuple[float, ...]:
    """Return the value of `config.class_weights` or `config.pos_weight`, which `key` names, as numbers.

    "balanced" class weights are n/(C·count_c), scikit-learn's rule, where count_c is the number of labels of class c,
    and n that of all labels. A "balanced" weight of the positive labels of class c is the number of its negative ones
    divided by that of its positive ones.

    Raises:
      ConfigError: there is not one number for each class, the source does not know its labels without reading images,
        or a class has no examples, so that its weight would not be finite.
    """
    if value != BALANCED:
        if len(value) != classes:
            raise ConfigError(f"config.{key} has {len(value)} number(s), but there are {classes} classes")
        return tuple(map(float, value))
    labels = source.labels
    if labels is None:
        raise ConfigError(
            f"config.{key}='balanced': this kind of data has to read its images to know their labels; give {classes} "
            "numbers"
        )
    positives, negatives = label_counts(labels, classes)
    missing = positives if not positives.all() else negatives
    empty = np.flatnonzero(missing == 0)
    if len(empty) and (missing is positives or key == "pos_weight"):
        names, kind = source.class_names or (), "positive" if missing is positives else "negative"
        name = repr(names[empty[0]]) if empty[0] < len(names) else f"number {empty[0]}"
        raise ConfigError(
            f"config.{key}='balanced': {len(empty)} of {classes} classes, such as {name}, have no {kind} label in the "
            f"training data, so that their weights are unknown; give {classes} numbers"
        )
    found = negatives / positives if key == "pos_weight" else positives.sum() / (classes * positives)
    return tuple(map(float, found))


def label_counts(
    labels: Int32[np.ndarray, " N"] | Int8[np.ndarray, "N C"], classes: int
) -> tuple[Float64[np.ndarray, " C"], Float64[np.ndarray, " C"]]:
    """Return the numbers of positive and negative labels of each class, of labels as `Source` describes them.

    Raises:
      ConfigError: a label is not one of the classes.
    """
    found = labels.shape[1] if labels.ndim > 1 else int(labels.max(initial=-1)) + 1
    if found > classes:
        raise ConfigError(f"the training data has labels of {found} classes, config.num_classes={classes}")
    if labels.ndim > 1:
        both = [(labels == value).sum(axis=0, dtype=np.float64) for value in (1, 0)]
        return tuple(np.pad(each, (0, classes - found)) for each in both)  # type: ignore[return-value]
    positives = np.bincount(labels[labels >= 0], minlength=classes).astype(np.float64)
    return positives, positives.sum() - positives


def _refuse(config: ConfigDict, keys: Iterable[str], models: str) -> None:
    """Raise ConfigError if the config sets one of the keys, which are for the other kind of models."""
    for key in keys:
        if config[key]:
            raise ConfigError(f"config.{key}={config[key]!r} is for {models}")


Task = ImageTask | TokenTask
TASKS: dict[str, type[Task]] = {"vit": ImageTask, "lm": TokenTask}


def task_class(config: ConfigDict) -> type[Task]:
    """Return the task class for `config.model_name`, "vit" or "lm". Raise ConfigError if there is no such model."""
    kind_of(config)
    return TASKS[config.model_name]


@dataclasses.dataclass(frozen=True)
class StandIn(Source):
    """A source whose examples are all the same, in place of data that is not on this host."""

    row: dict[str, Any]

    def __len__(self) -> int:
        return STAND_IN_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.row

    def describe(self, index: int) -> str:
        return f"stand-in {index}"

    def nbytes(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class TextStandIn(StandIn, TokenSource):
    """A source of rows of tokens that are all the same, in place of text that is not on this host."""

    context: int
    vocab_size: int | None
    end_of_text: int | None = 0
