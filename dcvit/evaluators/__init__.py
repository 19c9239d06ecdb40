"""Evaluators; the `type` of one in a config is the name of a file here.

Each has a class `Evaluator(predict, mesh, **options)` with

  source       the data that it reads
  example      a model input of one example, a jax.ShapeDtypeStruct
  run(params)  a dict of numbers, a function of parameters and data alone
  metrics      the names of such numbers
  rows(name, numbers, net)   what a table of results says of these numbers and of the last run's speed
  columns      the keys of such rows, in order, after those that `dcvit.evaluate` gives every row

This file holds what they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit.models.flops import forward_flops
from dcvit.parallel.sharding import batch_shards, local_rows, put_batch, replicated

IMAGE_COLUMNS = ("gflops", "image_size", "top1", "top5", "loss", "n", "images_per_second")


def batches(
    source: input_pipeline.Source,
    pp: str,
    batch_size: int,
    mesh: Mesh,
    corrupt: input_pipeline.CorruptPolicy | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of `input_pipeline.eval_batches`, whose size is `rounded`."""
    size = rounded(batch_size, mesh)
    return input_pipeline.eval_batches(source, pp, size, rows=local_rows(mesh, size), corrupt=corrupt)


def rounded(batch_size: int, mesh: Mesh) -> int:
    """The batch size, up to a multiple of the mesh's parts of a batch."""
    return -(-batch_size // batch_shards(mesh)) * batch_shards(mesh)


class Timed:
    """A function (params, batch, …) of batches of one shape, compiled at the first, and its speed since.

    `seconds` run from the end of compilation, or else from `restart`, to the last result, so that reading all batches
    but the first counts; `examples` are the real ones, of all processes.
    """

    def __init__(self, function: Callable[..., Any], mesh: Mesh, batch_size: int, keep: Sequence[str] = ()):
        """`keep` are the parts of a batch that come back beside the result, so that every process has all rows."""

        def call(params: Any, batch: dict[str, jax.Array], *rest: Any) -> Any:
            return function(params, batch, *rest), {key: batch[key] for key in (*keep, "_mask")}

        self.function = jax.jit(call, out_shardings=replicated(mesh))
        self.mesh, self.batch_size = mesh, rounded(batch_size, mesh)
        self.compiled: Callable[..., Any] | None = None
        self.restart()

    def restart(self) -> None:
        """Begins to measure anew."""
        self.examples, self.seconds, self.started = 0, 0.0, time.perf_counter()

    def __call__(self, params: Any, batch: Mapping[str, np.ndarray], *rest: Any) -> tuple[Any, dict[str, np.ndarray]]:
        """The result and what is kept of the batch, of all processes, on the host; `batch` is one of `batches`."""
        sent = put_batch(batch, self.mesh, self.batch_size)
        if self.compiled is None:
            with jax.set_mesh(self.mesh):
                self.compiled = self.function.lower(params, sent, *rest).compile()
            self.started = time.perf_counter()
        result, kept = jax.device_get(self.compiled(params, sent, *rest))
        self.examples += int(kept["_mask"].sum())
        self.seconds = time.perf_counter() - self.started
        return result, kept


def about_images(net: Any, example: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """`gflops` of one image's forward pass, None where there is no formula for the model, and `image_size`."""
    flops = forward_flops(net, example)
    return {"gflops": flops and round(flops / 1e9, 3), "image_size": f"{example.shape[1]}x{example.shape[2]}"}
