"""Hooks of the training loop: the non-finite guard, metrics and evaluations, checkpoints, and the profiler.

The trainer calls `before_step` and `after_step` of each hook, in the order of the list, at every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

import input_pipeline
from dcvit.errors import first_line
from dcvit.models.flops import training_flops
from dcvit.parallel import multihost, topologies
from dcvit.runs.files import replace
from dcvit.runs.tracking import WandbRun
from dcvit.runs.workdir import write_overview
from dcvit.training.resume import Run
from dcvit.training.step import Metrics, TrainState, non_finite_arrays

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class StepResult:
    """The state after a step, and the step's metrics, which may still be being computed."""

    step: int
    state: TrainState
    metrics: Metrics

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The metrics as Python numbers; waits for the devices."""
        return {name: value.item() for name, value in jax.device_get(dict(self.metrics)).items()}


class Hook:
    """Work between the steps; a subclass overrides one method or both."""

    def before_step(self, step: int) -> None:
        """Run before the data of a step is read."""

    def after_step(self, result: StepResult) -> None:
        """Run after a step was started on the devices, and the step before it was checked."""

    def close(self, *, failed: bool) -> None:
        """Run once after the last step, or after an error."""


class StepClock:
    """Mean wall time of a step, without the pauses for evaluation and saving."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a new measurement."""
        self.since, self.steps = time.perf_counter(), 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the body."""
        paused_at = time.perf_counter()
        yield
        self.since += time.perf_counter() - paused_at

    def elapsed_per_step(self) -> float:
        """Return the seconds per step since the last call, and start a new measurement."""
        seconds = (time.perf_counter() - self.since) / max(1, self.steps)
        self.start()
        return seconds


class NonFiniteGuard:
    """Raises FloatingPointError once more than `config.nonfinite_skip` steps had a non-finite loss or gradient."""

    def __init__(self, run: Run):
        self.run, self.limit = run, run.setup.options.nonfinite_skip
        self.lock = threading.Lock()  # `check` is also called by the thread that saves a stopped run
        self.messages: dict[int, str] = {}  # by step

    def check(self, result: StepResult) -> None:
        """Report a step that was not finite, once. Raise FloatingPointError if there were too many up to this one."""
        numbers = result.numbers
        names = [name for name in ("loss", "grad_norm") if not math.isfinite(numbers.get(name, 0))]
        count = numbers.get("nonfinite", 0)
        with self.lock:
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
        """Write the examples of a step to a file, in the first process, and return a description of the result."""
        path, outcome = self.run.workdir / f"nonfinite-{step}.json", "its examples are in"
        data = self.run.setup.data
        if multihost.is_first():
            try:
                ids = input_pipeline.batch_ids(data.source, data.batch_size, data.seed, step - 1)
                replace(path, json.dumps({"step": step, "not finite": names, "examples": ids}, indent=1) + "\n")
            except (OSError, ValueError) as e:
                outcome = f"its examples could not be written ({first_line(e)}) to"
        with contextlib.suppress(Exception):  # other processes would end the first one before it has written
            multihost.gather(f"nonfinite/{step}", True, multihost.EXIT_SECONDS)
        return f"{outcome} {path}"


class BestCheckpoint:
    """The best step so far by the metric of `config.ckpt_best`."""

    def __init__(self, ckpt_best: Sequence[str]):
        self.metric: str | None = ckpt_best[0] if ckpt_best else None
        self.sign = -1 if ckpt_best and ckpt_best[1] == "min" else 1
        self.value: float | None = None
        self.step: int | None = None

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Remember the step of a row if its metric is the best so far."""
        value = row.get(self.metric) if self.metric and step else None
        if value is None or not math.isfinite(value):
            return
        if self.value is None or self.sign * (value - self.value) > 0:
            self.value, self.step = value, step


class EarlyStop:
    """The decision of `config.early_stop`, a function of the rows of metrics up to a step.

    Attributes:
      reason: one line that says why the run stops; None as long as it continues.
    """

    def __init__(self, early_stop: Sequence[Any]):
        self.best, self.patience = BestCheckpoint(early_stop[:2]), early_stop[2] if early_stop else 0
        self.waited = 0  # evaluations since the best one
        self.reason: str | None = None

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Decide after a row; rows of step 0 and without the metric do not count, and NaN is no improvement."""
        metric = self.best.metric
        if metric is None or not step or metric not in row:
            return
        self.best.update(step, row)
        self.reason = None  # of an earlier row, where the patience or the metric was changed
        self.waited = 0 if self.best.step == step else self.waited + 1
        if self.waited >= self.patience:
            best = f"is {self.best.value:.6g} at step {self.best.step}" if self.best.step else "was never finite"
            self.reason = f"stopped early at step {step}: the best {metric} {best}, {self.waited} evaluations ago"


class MetricsHook(Hook):
    """Records and shows metrics and evaluations when they are due."""

    def __init__(self, run: Run, guard: NonFiniteGuard, best: BestCheckpoint, early: EarlyStop, clock: StepClock):
        self.run, self.guard, self.best, self.early, self.clock = run, guard, best, early, clock
        self.intervals, self.total_steps = run.setup.plan.intervals, run.setup.plan.total_steps
        self.peak = peak_examples_per_second(run.setup.model.module, run.setup.task.example, jax.devices())
        self.row: dict[str, Any] = {}  # the last row of metrics, and its step
        self.row_step = -1

    def after_step(self, result: StepResult) -> None:
        """Write the row of a step that logs or evaluates."""
        evaluators, logs = self._due(result.step)
        if not evaluators and not logs:
            return
        self.guard.check(result)
        timing = self._timing() if logs else {}
        with self.clock.paused():
            self._record(result.step, result.state, result.numbers, evaluators, timing)

    def first_row(self, state: TrainState) -> None:
        """Record the parameters and every evaluation before the first step."""
        if self.run.writer:
            write_overview(self.run.workdir, state.params)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        self.run.progress.line(f"{count:,} parameters, {self.total_steps} steps")
        self._record(0, state, {"num_params": count}, self.run.setup.evaluators, {})

    def catch_up(self, state: TrainState) -> None:
        """Record the row of the checkpoint's step if the run stopped before it could; recall the earlier rows."""
        run, start = self.run, self.run.start
        recalled = run.writer and (self.best.metric or self.early.best.metric)
        history = [row.values for row in run.writer.metrics.resumed] if run.writer and recalled else []
        for row in multihost.gather("history", history)[0]:
            self.best.update(row["step"], row)
            self.early.update(row["step"], row)
        last = multihost.gather("rows", run.writer.last_step if run.writer else 0)[0]
        evaluators, logs = self._due(start)
        if last < start and (evaluators or logs):
            self._record(start, state, run.resumed["row"], evaluators, {})

    def _due(self, step: int) -> tuple[list[str], bool]:
        """Return the evaluators that are due after a step, and True if it logs. The last step evaluates everything."""
        last = step == self.total_steps
        evaluators = [name for name, interval in self.intervals.evals.items() if last or is_due(interval, step)]
        return evaluators, bool(self.intervals.log) and (last or is_due(self.intervals.log, step))

    def _timing(self) -> dict[str, float]:
        seconds = self.clock.elapsed_per_step()
        timing = {"step_seconds": seconds, "examples_per_second": self.run.setup.data.batch_size / seconds}
        if self.peak:
            timing["mfu"] = timing["examples_per_second"] / self.peak
        timing["seconds"] = self.run.seconds
        return timing

    def _record(
        self,
        step: int,
        state: TrainState,
        numbers: Mapping[str, Any],
        evaluators: Iterable[str],
        timing: dict[str, float],
    ) -> None:
        row = {name: value for name, value in numbers.items() if name != "nonfinite" or self.guard.limit}
        row |= self._evaluate(step, state, evaluators)
        self.early.update(step, row)
        if self.early.reason:  # this step is the last one, which evaluates everything
            row |= self._evaluate(step, state, [name for name in self.run.setup.evaluators if name not in evaluators])
        self.best.update(step, row)
        if self.run.writer:
            self.run.writer.write(step, row, timing)
        self.run.progress.report(step, row, timing)
        self.row, self.row_step = row, step

    def _evaluate(self, step: int, state: TrainState, evaluators: Iterable[str]) -> dict[str, float]:
        """Return the metrics of some evaluators, with the names of a row."""
        found: dict[str, float] = {}
        for name in evaluators:
            self.run.watchdog(f"evaluating {name} after step {step}")
            found |= {f"{name}/{k}": v for k, v in self.run.setup.evaluators[name].run(state.best).items()}
        return found


class WandbHook(Hook):
    """Copies the rows of metrics to Weights & Biases, in the first process."""

    def __init__(self, run: Run, metrics: MetricsHook):
        self.metrics, self.sent = metrics, -1
        self.tracked = WandbRun(run.workdir, run.setup.options.wandb, run.setup.record, resumed=bool(run.start))

    def before_step(self, step: int) -> None:
        """Send the row of step 0, or the row that was lost before a resumed run."""
        self._send()

    def after_step(self, result: StepResult) -> None:
        """Send the row of a step that has one."""
        self._send()

    def close(self, *, failed: bool) -> None:
        """Send the last row and complete the W&B run."""
        self._send()
        self.tracked.close(failed=failed)

    def _send(self) -> None:
        if self.metrics.row_step > self.sent:
            self.sent = self.metrics.row_step
            self.tracked.write(self.sent, self.metrics.row)


class CheckpointHook(Hook):
    """Saves checkpoints when they are due, at the last step, and the best one."""

    def __init__(self, run: Run, guard: NonFiniteGuard, best: BestCheckpoint, early: EarlyStop, clock: StepClock):
        self.run, self.guard, self.best, self.early, self.clock = run, guard, best, early, clock
        self.interval, self.total_steps = run.setup.plan.intervals.ckpt, run.setup.plan.total_steps
        self.lock = threading.Lock()  # `save` is also called by the thread that saves a stopped run

    def after_step(self, result: StepResult) -> None:
        """Save a step that is due, or the best one so far."""
        last = result.step == self.total_steps or self.early.reason
        due = bool(self.interval) and (last or is_due(self.interval, result.step))
        if not due and self.best.step != result.step:
            return
        self.guard.check(result)  # waits for the steps under way, which are not part of the pause
        with self.clock.paused():
            self.run.watchdog(f"saving step {result.step}", saves=True)
            self.save(result)

    def save(self, result: StepResult) -> None:
        """Start to save a step, unless it is the newest one saved.

        Raises:
          FloatingPointError: the state contains NaN or Inf.
          CheckpointError: this save could not start, or the last one failed.
        """
        run = self.run
        with self.lock:
            if run.checkpointer.saved == result.step:
                return
            self.guard.check(result)
            gathered = multihost.gather(f"finite/{result.step}", non_finite_arrays(result.state.items()))
            if names := sorted({name for found in gathered for name in found}):
                more = f" and {len(names) - 1} more arrays are" if len(names) > 1 else " is"
                raise FloatingPointError(
                    f"step {result.step}: {names[0]}{more} not finite; not saved, earlier checkpoints are kept"
                )
            run.flush()
            rows = run.writer.metrics.position() if run.writer else {}
            about = {**run.about, "row": result.numbers, "seconds": run.seconds, **rows}
            run.checkpointer.save(result.step, result.state.items(), about, best=self.best.step)


class ProfilerHook(Hook):
    """Records a JAX profiler trace of the steps of `config.profile` in `<workdir>/profile`."""

    def __init__(self, run: Run, early: EarlyStop):
        self.folder, (self.first, self.last) = str(run.workdir / "profile"), run.setup.options.profile
        self.last, self.early = min(self.last, run.setup.plan.total_steps), early
        self.recording = False

    def before_step(self, step: int) -> None:
        """Start the trace at the first step of the window, or in the window if the run resumes there."""
        if not self.recording and self.first <= step <= self.last:
            jax.profiler.start_trace(self.folder)
            self.recording = True

    def after_step(self, result: StepResult) -> None:
        """End the trace after the last step of the window."""
        if self.recording and (result.step == self.last or self.early.reason):
            jax.block_until_ready(result.state)
            self.close(failed=False)

    def close(self, *, failed: bool) -> None:
        """End the trace of a run that ends inside the window."""
        if self.recording:
            self.recording = False
            jax.profiler.stop_trace()


def is_due(interval: int | None, step: int) -> bool:
    """Return True if a step ends an interval; an interval of 0 or None never ends."""
    return bool(interval) and step % (interval or 1) == 0


def peak_examples_per_second(
    model: nn.Module, example: jax.ShapeDtypeStruct, devices: Sequence[jax.Device]
) -> float | None:
    """Return the examples per second of devices that execute the model's matrix products at their peak rate.

    Model FLOPs utilization (MFU) is measured against it. None for devices that are not in `dcvit.parallel.topologies`.
    """
    chip, flops = topologies.chip(devices[0].device_kind), training_flops(model, example)
    return chip.peak * len(devices) / flops if chip and flops else None
