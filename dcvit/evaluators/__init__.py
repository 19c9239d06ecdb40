"""Evaluators; the `type` of one in a config is the name of a file here.

Each has a class `Evaluator(predict, mesh, **options)` with

  source       the data that it reads
  example      a model input of one example, a jax.ShapeDtypeStruct
  run(params)  a dict of numbers, a function of parameters and data alone
  rows(name, numbers, net)   what a table of results says of these numbers and of the last run's speed
  columns      the keys of such rows, in order, after those that `dcvit.evaluate` gives every row

This file holds what they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit.flops import vit_flops
from dcvit.models.vit import ViT
from dcvit.sharding import put_batch

IMAGE_COLUMNS = ("gflops", "image_size", "top1", "top5", "loss", "n", "images_per_second")


def batches(
    source: input_pipeline.Source, pp: str, batch_size: int, mesh: Mesh, corrupt: input_pipeline.Corrupt | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """`input_pipeline.eval_batches`, their size rounded up to a multiple of the device count."""
    return input_pipeline.eval_batches(source, pp, -(-batch_size // mesh.size) * mesh.size, corrupt=corrupt)


class Timed:
    """A jitted function (params, batch, …) for batches of one shape, compiled at the first, and its speed since.

    `seconds` run from the end of compilation to the last result, so that reading all batches but the first counts;
    `examples` are the real ones.
    """

    def __init__(self, function: Any, mesh: Mesh):
        self.function, self.mesh = function, mesh
        self.compiled: Callable[..., Any] | None = None
        self.examples, self.seconds = 0, 0.0

    def __call__(self, params: Any, batch: Mapping[str, np.ndarray], *rest: Any) -> Any:
        """The result on the host; `batch` is one of `batches`, with `_mask`."""
        sent = put_batch(batch, self.mesh)
        if self.compiled is None:
            self.compiled = self.function.lower(params, sent, *rest).compile()
            self.started = time.perf_counter()
        result = jax.device_get(self.compiled(params, sent, *rest))
        self.examples += int(batch["_mask"].sum())
        self.seconds = time.perf_counter() - self.started
        return result


def about_images(net: Any, example: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """`gflops` of one image's forward pass, None where there is no formula for the model, and `image_size`."""
    height, width, channels = example.shape[1:]
    gflops = round(vit_flops(net, (height, width, channels)) / 1e9, 3) if isinstance(net, ViT) else None
    return {"gflops": gflops, "image_size": f"{height}x{width}"}
