"""Knowledge distillation: a model, the student, also learns from the outputs of a trained one, its teacher.

The loss of an example is

    (1 - weight) · L(student, labels) + weight · L(student, teacher),

where L(student, teacher) is `kl` (Hinton et al., 2015, arXiv 1503.02531) or `hard` (Touvron et al., 2021, arXiv
2012.12877). Both models get the same images, after all augmentation (Beyer et al., 2022, arXiv 2106.05237), each in its
own normalization of pixels.

A student with `pool_type="tok+reg"` is that of DeiT: the class token learns from the labels, the first register, which
is the distillation token, from the teacher, and inference averages the logits of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit.config import values
from dcvit.config.keys import is_rate
from dcvit.dcmha.shapes import Array, Float
from dcvit.errors import CheckpointError, ConfigError, check_call, nearest
from dcvit.hub.open import Opened, at_image_size, open_model
from dcvit.models import Outputs, Params
from dcvit.models.trees import param_shapes
from dcvit.models.vit import ViT
from dcvit.parallel import multihost
from dcvit.parallel.sharding import Strategy, check_model
from dcvit.weights import preprocessing
from dcvit.weights.placement import layer_checksums
from input_pipeline import Source, patch_sizes
from input_pipeline.preprocess.builder import decoded_as, parsed

LOG = logging.getLogger(__name__)
WHAT = "config.distill"
TEACHER = "teacher"  # key of the teacher's logits, B C, in a batch


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `config.distill`."""

    teacher: str  # anything that `dcvit.load` opens
    loss: str = "kl"
    temperature: float = 1.0  # divides the logits of both models in `kl`
    weight: float = 0.5  # of the teacher's loss; the rest is that of the labels


def kl(student: Float[Array, "B C"], teacher: Float[Array, "B C"], temperature: float = 1.0) -> Float[Array, " B"]:
    """Return T² · KL(softmax(teacher / T) ‖ softmax(student / T)) of each example, in nats, for a temperature T.

    The factor T² keeps the size of the gradient (Hinton et al., 2015, Section 2).
    """
    ours, theirs = (jax.nn.log_softmax(logits / temperature) for logits in (student, teacher))
    return temperature**2 * optax.losses.kl_divergence_with_log_targets(ours, theirs)


def hard(student: Float[Array, "B C"], teacher: Float[Array, "B C"]) -> Float[Array, " B"]:
    """Return the cross-entropy to the teacher's class of the highest logit (DeiT, Equation 3), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(student, jnp.argmax(teacher, axis=-1))


LOSSES = ("kl", "hard")


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The teacher of a run and its loss; `make_distillation` builds it.

    Fields:
      options: `config.distill`.
      teacher: the teacher's model, and the source of its parameters.
      inputs: shape and dtype of its input of one image, those of the student's.
      to_teacher: function from the student's images to the teacher's, of another normalization of pixels.
      shapes: the shapes of its parameters.
    """

    options: Options
    teacher: Opened
    inputs: jax.ShapeDtypeStruct
    to_teacher: Callable[[Array], Array]
    shapes: Params

    def logits(self, params: Params, images: Float[Array, "B h w c"]) -> Float[Array, "B C"]:
        """Return the teacher's logits, which have no gradient, for images in the student's normalization."""
        logits: Array = self.teacher.module.apply({"params": params}, self.to_teacher(images), train=False)[0]
        return jax.lax.stop_gradient(logits)

    def loss(
        self, of_labels: Callable[[Array], Array], heads: tuple[Float[Array, "B C"], Float[Array, "B C"]],
        teacher: Float[Array, "B C"],
    ) -> Float[Array, " B"]:  # fmt: skip
        """Return the loss of each example, for the function logits → loss of the labels and the logits `heads_of`."""
        weight, temperature = self.options.weight, self.options.temperature
        found = hard(heads[1], teacher) if self.options.loss == "hard" else kl(heads[1], teacher, temperature)
        return found if weight == 1 else (1 - weight) * of_labels(heads[0]) + weight * found

    def load(self, mesh: Mesh, strategy: Strategy) -> Params:
        """Load the teacher's parameters, sharded as `strategy` says.

        Raises:
          CheckpointError: they are damaged, or do not fit the teacher's model or the size of the student's images.
        """
        with _named(self.options.teacher):
            return self.teacher.load_params(mesh, strategy, self.inputs)

    def identity(self) -> dict[str, int]:
        """Return CRC-32 checksums of the teacher: of each parameter by name, and of `model` and `pp_predict`."""
        with _named(self.options.teacher):
            found = layer_checksums(self.teacher.params)
        record = json.loads(self.teacher.config.to_json())
        texts = {key: json.dumps(record[key], sort_keys=True) for key in ("model", "pp_predict")}
        return found | {key: zlib.crc32(text.encode()) for key, text in texts.items()}

    def check_student(self, student: nn.Module, mesh: Mesh) -> None:
        """Raise ConfigError if the student has no two heads to average, or the mesh cannot split the teacher."""
        with _named(self.options.teacher):
            check_model(mesh, self.teacher.module)
        if getattr(student, "pool_type", "") != "tok+reg":
            return
        if getattr(student, "rep_size", False):
            raise ConfigError(
                f"{WHAT}: with pool_type='tok+reg', each token has its own classifier: set config.model.rep_size=False"
            )
        if self.options.weight == 1:
            raise ConfigError(
                f"{WHAT}.weight=1: with pool_type='tok+reg', the class token learns from the labels: set a weight "
                "below 1, or another pool_type"
            )


def heads_of(
    student: nn.Module, params: Params, logits: Float[Array, "B C"], out: Outputs
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Return the student's logits that learn from the labels, and those that learn from the teacher.

    Both are `logits`, except with `pool_type="tok+reg"`. There, `head/kernel` is [W₁; W₂] and the two are 2·W₁·(class
    token) + b and 2·W₂·(first register) + b, whose mean is `logits`. `out` has the named intermediates.
    """
    if getattr(student, "pool_type", "") != "tok+reg":
        return logits, logits
    head = params["head"]
    kernels, tokens = jnp.split(head["kernel"], 2), jnp.split(out["pre_logits"], 2, axis=-1)
    first, second = (2 * token @ kernel + head["bias"][None] for token, kernel in zip(tokens, kernels, strict=True))
    return first, second


def make_distillation(
    config: ConfigDict, source: Source, pp: str, example: jax.ShapeDtypeStruct
) -> Distillation | None:
    """Open the teacher of `config.distill`; return None without one. `example` is one image of `source` after `pp`.

    Raises:
      ConfigError: an option is invalid or has no effect, or the teacher has other classes or does not fit the images.
      CheckpointError: the teacher is missing, damaged or of an unknown format.
    """
    if not config.distill:
        return None
    check_call(Options, config.distill.to_dict(), WHAT)
    options = Options(**config.distill.to_dict())
    _check_options(options, config)
    with _named(options.teacher):
        height, width = example.shape[1:3]
        teacher = open_model(options.teacher, usual_pp=True)
        teacher = dataclasses.replace(teacher, config=values.replaced(teacher.config, evals=ConfigDict()))
        teacher = at_image_size(teacher, (height, width))
        model = teacher.module
        if not isinstance(model, ViT) or not teacher.num_outputs or model.pool_type == "none":
            raise ConfigError("it is no classifier of images")
        if teacher.is_multilabel:
            raise ConfigError("it was trained with loss='sigmoid_xent', and the student learns from a softmax")
        if teacher.num_outputs != config.num_classes:
            raise ConfigError(f"it has {teacher.num_outputs} classes, the training data {config.num_classes}")
        _check_names(teacher.classes, source.class_names or ())
        to_teacher = normalizer(pp, teacher.preprocessing, example.shape[3])
        shapes = param_shapes(model, example)
    return Distillation(options, teacher, example, to_teacher, shapes)


def _check_options(options: Options, config: ConfigDict) -> None:
    """Raise ConfigError for an option that is out of range, or that has no effect with the others."""
    if not options.teacher:
        raise ConfigError(f"{WHAT}.teacher is empty: name a run, a checkpoint, a model of the package or weights")
    if options.loss not in LOSSES:
        raise ConfigError(f"{WHAT}.loss={options.loss!r}; {nearest(options.loss, LOSSES)}")
    if not is_rate(options.temperature) or not options.temperature:
        raise ConfigError(f"{WHAT}.temperature={options.temperature!r} should be finite and above 0")
    if options.loss == "hard" and options.temperature != 1:
        raise ConfigError(f"{WHAT}.temperature={options.temperature!r} has no effect with loss='hard'")
    if not 0 < options.weight <= 1:
        raise ConfigError(f"{WHAT}.weight={options.weight!r} should be above 0 and at most 1")
    unused = next((key for key in ("label_smoothing", "class_weights") if config[key]), None)
    if options.weight == 1 and unused:
        raise ConfigError(f"config.{unused}={config[unused]} has no effect: {WHAT}.weight=1 omits labels")
    if config.loss != "softmax_xent":
        raise ConfigError(f"{WHAT} needs config.loss='softmax_xent', found {config.loss!r}")
    if patch_sizes(config.input.get("pp", "")):
        raise ConfigError(f"{WHAT} is for images of one size, not for the op patches")


def _check_names(theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Raise ConfigError if both models name their classes, and some are the same but not all; warn if none is.

    Names that are partly the same, or in another order, indicate another numbering. Names that are all different may
    be of another language, or WordNet's numbers instead of words. Unnamed classes have their numbers.
    """
    if list(theirs) == [str(i) for i in range(len(theirs))]:
        return
    pairs = enumerate(zip(theirs, ours, strict=False))  # the data may name fewer classes than there are
    at = next((i for i, (one, other) in pairs if one != other), None)
    if at is None:
        return
    text = f"class {at} is {theirs[at]!r} there and {ours[at]!r} in the training data"
    if set(theirs) & set(ours):
        raise ConfigError(f"it has other classes: {text}")
    if multihost.is_first():
        LOG.warning("%s.teacher names its classes otherwise: %s", WHAT, text)


def normalizer(ours: str, theirs: str, channels: int) -> Callable[[Array], Array]:
    """Return the function from images of one preprocessing string to those of another's normalization of pixels.

    With means m and standard deviations s of pixels in [0, 1], it is x·(s / s') + (m - m') / s'.

    Raises:
      ConfigError: a string is empty, or has not exactly one `value_range` or `vgg_value_range`.
    """
    if not theirs:
        raise ConfigError("it states no preprocessing (pp_predict), which has the range of its pixels")
    if decoded_as(ours) == decoded_as(theirs) and len(_ranges(ours)) == 1 and _ranges(ours) == _ranges(theirs):
        return lambda images: images
    try:
        (mean, std), (their_mean, their_std) = (
            np.asarray(preprocessing.mean_and_std(pp))[:, :channels] for pp in (ours, theirs)
        )
    except CheckpointError as e:
        raise ConfigError(str(e)) from None
    scale, shift = std / their_std, (mean - their_mean) / their_std
    if np.all(scale == 1) and np.all(shift == 0):
        return lambda images: images
    if len(scale) != channels:
        raise ConfigError(f"its pixels have another range, and images of {channels} channels cannot be converted")
    factor, offset = (values.astype(np.float32)[None, None, None] for values in (scale, shift))
    return lambda images: images * factor + offset


def _ranges(pp: str) -> list[str]:
    """Return the ops of a preprocessing string that convert pixels to floats."""
    return [step.text for step in parsed(pp) if step.op in ("value_range", "vgg_value_range")]


@contextlib.contextmanager
def _named(teacher: str) -> Iterator[None]:
    """Context manager that puts the name of the teacher in front of a ConfigError or CheckpointError."""
    try:
        yield
    except (ConfigError, CheckpointError) as e:
        kind = ConfigError if isinstance(e, ConfigError) else CheckpointError
        raise kind(f"{WHAT}.teacher={teacher}: {str(e).removeprefix('config.model: ')}") from None
