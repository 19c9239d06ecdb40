"""Evaluators. The `type` of an evaluator in a config is the name of a module here.

Such a module has a class `Evaluator`, which states the kind of models that it evaluates, its metrics, and which of them
are better if lower, and a dataclass `Options` with the other keys that a config gives it. The field `data` has the
arguments of `input_pipeline.open_source`. Options for models of images also have `pp`, and the class has `target`, the
key of the preprocessed labels and their rank. This module has their interface and the code that they share.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit.errors import ConfigError, nearest
from dcvit.models import Outputs, Params
from dcvit.models.flops import forward_flops
from dcvit.models.packed_images import PackedImages
from dcvit.parallel.sharding import batch_shards, compiler_options, local_rows, put_batch, replicated

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__))  # of the evaluators
IMAGE_COLUMNS = ("gflops", "image_size", "top1", "top5", "mean_recall", "loss", "n", "images_per_second")

Batch: TypeAlias = Mapping[str, np.ndarray]  # arrays with a first axis of examples; `_mask` is 0 for padding
DeviceBatch: TypeAlias = dict[str, jax.Array]
ModelInputs: TypeAlias = jax.Array | PackedImages
Predict: TypeAlias = Callable[[Params, ModelInputs], tuple[jax.Array, Outputs]]  # logits and named intermediates
Row: TypeAlias = dict[str, Any]  # a row of a table of results: strings, numbers and None


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """Opened data of an evaluator.

    Fields:
      source: the examples.
      mesh: the devices that share a batch.
      example: a model input of one example.
      corrupt: the policy for unreadable images.
    """

    source: input_pipeline.Source
    mesh: Mesh
    example: jax.ShapeDtypeStruct
    corrupt: input_pipeline.CorruptPolicy | None = None


class Evaluator(Protocol):
    """Interface of an evaluator. Its constructor is called as `Evaluator(predict, data, options)`.

    Args:
      predict: function from parameters and model inputs (images, or tokens B T) to logits and named intermediates.
      data: the data of `options.data`, opened.
      options: an instance of the module's `Options`.
    """

    model_name: ClassVar[str]  # the kind of models, `config.model_name`
    columns: ClassVar[tuple[str, ...]]  # keys of `rows`, in order, without those that `dcvit evaluate` adds
    lower_is_better: ClassVar[tuple[str, ...]]  # metrics whose lowest value is the best; of others it is the highest
    data: EvaluationData

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `run` may return."""

    def run(self, params: Params) -> dict[str, float]:
        """Return the metrics, which are a function of the parameters and the data only."""

    def rows(self, name: str, metrics: Mapping[str, float], net: nn.Module) -> list[Row]:
        """Return rows of a table of results for the evaluator called `name`, with the speed of the last run."""


def module_of(kind: object, what: str) -> ModuleType:
    """Import and return the module of an evaluator. Raise ConfigError, which names `what`, for an unknown `kind`."""
    if kind not in NAMES:
        raise ConfigError(f"{what}.type={kind!r}; {nearest(str(kind), NAMES)}")
    return importlib.import_module(f"{__name__}.{kind}")


def batches(data: EvaluationData, pp: str, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows that this process prepares of each evaluation batch, of `rounded_batch_size` rows in total."""
    size = rounded_batch_size(batch_size, data.mesh)
    return input_pipeline.eval_batches(data.source, pp, size, rows=local_rows(data.mesh, size), corrupt=data.corrupt)


def rounded_batch_size(batch_size: int, mesh: Mesh) -> int:
    """Return a batch size rounded up to a multiple of the number of parts into which the mesh splits a batch."""
    return -(-batch_size // batch_shards(mesh)) * batch_shards(mesh)


class TimedFunction:
    """A function (params, batch, …) that is compiled for the first batch, and a timer of its calls.

    Attributes:
      seconds: time from the end of compilation, or from `reset_timer`, to the last result. This includes the time of
        reading the batches.
      examples: number of examples in that time, without padding, over all processes.
    """

    def __init__(self, function: Callable[..., Any], mesh: Mesh, batch_size: int, keep: Sequence[str] = ()):
        """Wrap a function, which the first call compiles.

        Args:
          function: function of parameters, a batch on the devices, and further arrays.
          mesh: the devices that share a batch.
          batch_size: rounded up to a multiple of the device count.
          keep: keys of arrays of a batch that are returned with the result, gathered from all processes.
        """

        def call(params: Params, batch: DeviceBatch, *rest: jax.Array) -> Any:
            return function(params, batch, *rest), {key: batch[key] for key in (*keep, "_mask")}

        self.function = jax.jit(call, out_shardings=replicated(mesh), compiler_options=compiler_options(mesh))
        self.mesh, self.batch_size = mesh, rounded_batch_size(batch_size, mesh)
        self.compiled: Callable[..., Any] | None = None
        self.reset_timer()

    def reset_timer(self) -> None:
        """Set `seconds` and `examples` to 0, and measure the speed from now on."""
        self.examples, self.seconds, self.started = 0, 0.0, time.perf_counter()

    def __call__(
        self, params: Params, batch: Batch, *rest: np.ndarray | jax.Array
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Return the function's result, and the batch's arrays `keep`, for all processes' rows, as host arrays."""
        sent = put_batch(batch, self.mesh, self.batch_size)
        if self.compiled is None:
            with jax.set_mesh(self.mesh):
                self.compiled = self.function.lower(params, sent, *rest).compile()
            self.started = time.perf_counter()
        result, kept = jax.device_get(self.compiled(params, sent, *rest))
        self.examples += int(kept["_mask"].sum())
        self.seconds = time.perf_counter() - self.started
        return result, kept

    def rate(self) -> float:
        """Return the number of examples per second, without compilation, since `reset_timer`."""
        return self.examples / self.seconds


def image_row(evaluation: str, net: nn.Module, example: jax.ShapeDtypeStruct, timed: TimedFunction) -> Row:
    """Return a row of results without metrics: name, size and GFLOPs of an image (None if unknown), and speed."""
    flops = forward_flops(net, example)
    return {
        "evaluation": evaluation,
        "gflops": flops and float(f"{flops / 1e9:.4g}"),
        "image_size": f"{example.shape[1]}x{example.shape[2]}",
        "images_per_second": round(timed.rate(), 1),
    }
