"""Progress of a run, shared by its hooks: results of steps, their times, the best step, and the reason to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

import input_pipeline
from dcvit.errors import first_line
from dcvit.parallel import multihost
from dcvit.runs.files import replace
from dcvit.training.resume import Run
from dcvit.training.step import Metrics, TrainState

LOG = logging.getLogger(__name__)
WRITE_SECONDS = 60  # how long processes wait for the first one to write the examples of a step

Row: TypeAlias = Mapping[str, Any]  # of the metrics
OnRow: TypeAlias = Callable[[int, Row], object]  # a function of a step and its row


@dataclasses.dataclass
class StepResult:
    """The state after a step, and the step's metrics; the devices may still be computing both."""

    step: int
    state: TrainState
    metrics: Metrics

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The metrics as Python numbers; waits for the devices."""
        return {name: value.item() for name, value in jax.device_get(dict(self.metrics)).items()}


class Progress:
    """Progress of a run.

    Attributes:
      clock: measures the mean time of a step.
      guard: stops the run after too many steps that are not finite.
      best: the best step so far by `config.ckpt_best`.
      early: the reason to stop by `config.early_stop`, if there is one.
      row: the last row of metrics.
      row_step: the step of that row; -1 before the first.
    """

    def __init__(self, run: Run):
        options = run.setup.options
        self.clock, self.guard = StepClock(), NonFiniteGuard(run)
        self.best, self.early = BestStep(options.ckpt_best), EarlyStop(options.early_stop)
        self.row: dict[str, Any] = {}
        self.row_step = -1


class StepClock:
    """Measures the mean wall time of a step in seconds, without the pauses for evaluation and saving."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a new measurement of the mean time of a step."""
        self.since, self.steps = time.perf_counter(), 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the body of the `with` statement from the mean time of a step."""
        paused_at = time.perf_counter()
        yield
        self.since += time.perf_counter() - paused_at

    def elapsed_per_step(self) -> float:
        """Return the mean seconds per step since the last call or `start`, and start a new measurement."""
        seconds = (time.perf_counter() - self.since) / max(1, self.steps)
        self.start()
        return seconds


class NonFiniteGuard:
    """Raises FloatingPointError when more than `config.nonfinite_skip` steps had a non-finite loss or gradient."""

    def __init__(self, run: Run):
        self.run, self.limit = run, run.setup.options.nonfinite_skip
        self.messages: dict[int, str] = {}  # by step

    def check(self, result: StepResult) -> None:
        """Log a step with a non-finite loss or gradient, once. Raise FloatingPointError if too many were skipped."""
        numbers = result.numbers
        names = [name for name in ("loss", "grad_norm") if not math.isfinite(numbers.get(name, 0))]
        count = numbers.get("nonfinite", 0)
        if names and result.step not in self.messages:
            message = f"step {result.step}: the {names[0]} is {numbers[names[0]]}"
            where = self._write_examples(result.step, names)
            if count <= self.limit and multihost.is_first():
                LOG.warning("%s; skipped, %d of at most %d, %s", message, count, self.limit, where)
            after = f" after {self.limit} skipped steps" if self.limit else ""
            self.messages[result.step] = f"{message}; stopped{after}, {where}"
        if count > self.limit:
            text = self.messages.get(result.step, f"step {result.step}: non-finite steps so far: {count}; stopped")
            raise FloatingPointError(f"{text}, earlier checkpoints are kept")

    def _write_examples(self, step: int, names: Sequence[str]) -> str:
        """Write the locations of a step's examples to a file, in the first process; return a phrase that names it."""
        path, outcome = self.run.workdir / f"nonfinite-{step}.json", "its examples are in"
        data = self.run.setup.data
        if multihost.is_first():
            try:
                ids = input_pipeline.batch_ids(data.source, data.batch_size, data.seed, step - 1)
                replace(path, json.dumps({"step": step, "not finite": names, "examples": ids}, indent=1) + "\n")
            except (OSError, ValueError) as e:
                outcome = f"its examples could not be written ({first_line(e)}) to"
        with contextlib.suppress(Exception):  # other processes would end the first one before it has written
            multihost.gather(f"nonfinite/{step}", True, WRITE_SECONDS)
        return f"{outcome} {path}"


class BestStep:
    """The step with the best value so far of the metric that `config.ckpt_best` names, and that value."""

    def __init__(self, ckpt_best: Sequence[str]):
        self.metric: str | None = ckpt_best[0] if ckpt_best else None
        self.sign = -1 if ckpt_best and ckpt_best[1] == "min" else 1
        self.value: float | None = None
        self.step: int | None = None

    def update(self, step: int, row: Row) -> None:
        """Set `step` and `value` if the metric in `row`, the metrics after a step, is the best so far."""
        value = row.get(self.metric) if self.metric and step else None
        if value is None or not math.isfinite(value):
            return
        if self.value is None or self.sign * (value - self.value) > 0:
            self.value, self.step = value, step


class EarlyStop:
    """The decision of `config.early_stop` whether to stop training, from the rows of metrics up to a step.

    Attributes:
      reason: one line that says why the run stops; None as long as it continues.
    """

    def __init__(self, early_stop: Sequence[Any]):
        self.best, self.patience = BestStep(early_stop[:2]), early_stop[2] if early_stop else 0
        self.waited = 0  # evaluations since the best one
        self.reason: str | None = None

    def update(self, step: int, row: Row) -> None:
        """Set `reason` after a row of metrics; rows of step 0 or without the metric do not count, NaN is not better."""
        metric = self.best.metric
        if metric is None or not step or metric not in row:
            return
        self.best.update(step, row)
        self.reason = None  # of an earlier row, where the patience or the metric was changed
        self.waited = 0 if self.best.step == step else self.waited + 1
        if self.waited >= self.patience:
            best = f"is {self.best.value:.6g} at step {self.best.step}" if self.best.step else "was never finite"
            self.reason = f"stopped early at step {step}: the best {metric} {best}, {self.waited} evaluations ago"
