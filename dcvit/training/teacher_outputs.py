"""Logits of a teacher for all training examples, computed once for a run and kept in its workdir.

The folder `teacher` of a workdir has `logits.npy`, N C float32 by the index of the example, `source.json`, which says
from what they were computed, and checksums. A folder that is incomplete, damaged or of another source is replaced.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

import input_pipeline
from dcvit.models import Params
from dcvit.parallel import multihost
from dcvit.parallel.sharding import local_rows, put_batch, replicated
from dcvit.runs import checksums
from dcvit.runs.files import remove, rename
from dcvit.runs.progress import stage
from dcvit.training.distillation import TEACHER
from dcvit.training.inputs import TrainingData
from dcvit.training.resume import Run

LOG = logging.getLogger(__name__)
LOGITS, SOURCE = "logits.npy", "source.json"
Batches = Iterator[dict[str, np.ndarray]]


def with_teacher(run: Run, batches: Batches) -> Batches:
    """Return the batches of a run's training data, with the teacher's logits if the run keeps them.

    Raises:
      CheckpointError: the teacher's parameters cannot be loaded.
      InputError: see `input_pipeline.eval_batches`.
    """
    if not run.setup.cached_teacher:
        return batches
    data = run.setup.data
    rows = local_rows(run.setup.model.mesh, data.batch_size)
    return with_logits(batches, _opened(run), data, rows, run.start.step)


def with_logits(
    batches: Batches, logits: Float[np.ndarray, "N C"], data: TrainingData, rows: Sequence[int], start: int
) -> Batches:
    """Yield batches of training data with the logits of their examples.

    Args:
      batches: the batches of `data.batches(start, rows)`.
      logits: the logits of all examples.
      data: the training data.
      rows: the rows of a batch.
      start: the step before the first batch.
    """
    for step, batch in enumerate(batches, start):
        planned = input_pipeline.batch_ids(data.source, data.batch_size, data.seed, step, rows)
        at = np.array([row["index"] for row in planned]) + batch["_skipped"]
        yield {**batch, TEACHER: logits[at % len(data.source)]}


def _opened(run: Run) -> Float[np.ndarray, "N C"]:
    """Return the logits in the workdir, after computing them if they are not there; the file is read on demand."""
    folder = Path(run.workdir, TEACHER)
    about = run.about
    source = {TEACHER: about[TEACHER], "data": about["data"], "pp": run.setup.record["input"]["pp"]}
    if not all(multihost.gather("teacher's logits", _is_complete(folder, source))):
        run.watchdog("computing the teacher's logits")
        with stage("computing the teacher's logits", run.display.line):
            _write(run, folder, source)
        multihost.wait_for_all("teacher's logits written")
    found: np.ndarray = np.load(folder / LOGITS, mmap_mode="r")
    return found


def _is_complete(folder: Path, source: Mapping[str, object]) -> bool:
    """Return True if a folder has intact logits that were computed from `source`."""
    if not folder.exists():
        return False
    problems = checksums.problems(folder)
    if problems:
        LOG.warning("%s is damaged, and is computed again: %s", folder, "; ".join(problems))
    return not problems and json.loads((folder / SOURCE).read_text()) == json.loads(json.dumps(source))


def _write(run: Run, folder: Path, source: Mapping[str, object]) -> None:
    """Compute the logits of all examples in all processes, and write the folder in the first one."""
    fresh = folder.with_name(f"{folder.name}.new")
    if multihost.is_first():
        remove(fresh)
        fresh.mkdir()
        shape = len(run.setup.data.source), run.setup.task.model_fields["num_classes"]
        array = np.lib.format.open_memmap(fresh / LOGITS, mode="w+", dtype=np.float32, shape=shape)
    start = 0
    for logits in _computed(run):
        if multihost.is_first():
            array[start : start + len(logits)] = logits[: len(array) - start]
        start += len(logits)
    if multihost.is_first():
        array.flush()
        (fresh / SOURCE).write_text(json.dumps(source))
        checksums.write(fresh)
        remove(folder)
        rename(fresh, folder)


def _computed(run: Run) -> Iterator[Float[np.ndarray, "B C"]]:
    """Yield the teacher's logits of the training examples in order, in batches of the size of training."""
    setup, data, distillation = run.setup, run.setup.data, run.setup.cached_teacher
    assert distillation is not None
    mesh, size = setup.model.mesh, data.batch_size
    params = distillation.load(mesh, setup.model.strategy)

    def logits(params: Params, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        return distillation.logits(params, setup.task.prepare(batch, key)["image"])

    compute = jax.jit(logits, out_shardings=replicated(mesh))
    for batch in input_pipeline.eval_batches(
        data.source, data.pp, size, rows=local_rows(mesh, size), corrupt=data.corrupt
    ):
        run.watchdog("computing the teacher's logits")
        yield np.asarray(jax.device_get(compute(params, put_batch(batch, mesh, size), jax.random.key(0))))
