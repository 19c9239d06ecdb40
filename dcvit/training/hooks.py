"""Hooks of the training loop: metrics and evaluations, checkpoints, and the profiler.

The trainer calls `start` of each hook once, and `before_step` and `after_step` at every step, in the order of the list.
Hooks do not know each other; they share one `Progress`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

import input_pipeline
from dcvit.errors import first_line
from dcvit.parallel import multihost, topologies
from dcvit.runs.files import replace
from dcvit.runs.workdir import write_overview
from dcvit.training.resume import Run
from dcvit.training.step import Metrics, TrainState, non_finite_arrays, step_flops

LOG = logging.getLogger(__name__)
WRITE_SECONDS = 60  # how long processes wait for the first one to write the examples of a step
Row: TypeAlias = Mapping[str, Any]  # of the metrics


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
    """Progress of a run, shared by its hooks.

    It measures the mean wall time of a step, without the pauses for evaluation and saving.

    Attributes:
      steps: those that were started since the measurement began.
      guard: stops the run after too many steps that are not finite.
      best: the best step so far by `config.ckpt_best`.
      early: the reason to stop by `config.early_stop`, if there is one.
      row: the last row of metrics.
      row_step: the step of that row; -1 before the first.
    """

    def __init__(self, run: Run):
        config = run.setup.config
        self.guard = NonFiniteGuard(run)
        self.best, self.early = BestStep(config.ckpt_best), EarlyStop(config.early_stop)
        self.row: dict[str, Any] = {}
        self.row_step = -1
        self.start_clock()

    def start_clock(self) -> None:
        """Start a new measurement of the mean time of a step."""
        self.since, self.steps = time.perf_counter(), 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the body of the `with` statement from the mean time of a step."""
        paused_at = time.perf_counter()
        yield
        self.since += time.perf_counter() - paused_at

    def lap(self) -> float:
        """Return the mean seconds per step since the last call or `start_clock`, and start a new measurement."""
        seconds = (time.perf_counter() - self.since) / max(1, self.steps)
        self.start_clock()
        return seconds


class NonFiniteGuard:
    """Raises FloatingPointError when more than `config.nonfinite_skip` steps had a non-finite loss or gradient."""

    def __init__(self, run: Run):
        self.run, self.limit = run, run.setup.config.nonfinite_skip
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


class Hook:
    """Work that the trainer does between the steps; a subclass overrides the methods that it needs."""

    def __init__(self, run: Run, progress: Progress):
        self.run, self.progress = run, progress
        self.setup, self.every = run.setup, run.setup.plan.intervals

    def start(self, state: TrainState) -> None:
        """Run once before the first step, with the state that training starts from."""

    def before_step(self, step: int) -> None:
        """Run before the data of a step is read."""

    def after_step(self, result: StepResult) -> None:
        """Run after a step was started on the devices, when the previous step has been checked."""

    def close(self, *, failed: bool) -> None:
        """Run once after the last step, or after an error."""

    def is_due(self, interval: int | None, step: int) -> bool:
        """Return True at each multiple of an interval and at the last step; False if the interval is 0 or None."""
        return bool(interval) and (step % (interval or 1) == 0 or step == self.setup.plan.total_steps)


class MetricsHook(Hook):
    """Writes and shows metrics, and runs evaluators, at the steps that their intervals in the config determine."""

    def start(self, state: TrainState) -> None:
        """Write the row of step 0, with the parameter count and all evaluations, or a row that a resumed run lacks."""
        self.peak = self._peak()
        if self.run.start.step:
            self._catch_up(state)
            return
        if self.run.writer:
            write_overview(self.run.workdir, state.params)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        module = self.setup.model.module
        known = [(k, getattr(module, k) if v == "auto" else v) for k, v in self.setup.config.model.items()]
        fields = " ".join(f"{name}={value}" for name, value in known)  # see `runlocal`
        model = f"model: {self.setup.config.model_name} {fields}"
        self.run.display.line(f"{model}: {count:,} parameters, {self.setup.plan.total_steps} steps")
        self._record(0, state, {"num_params": count}, self.setup.evaluators, {})

    def after_step(self, result: StepResult) -> None:
        """Write the row of metrics of a step after which metrics or evaluations are due."""
        evaluators, logs = self._due(result.step)
        if not evaluators and not logs:
            return
        self.progress.guard.check(result)
        timing = self._timing() if logs else {}
        with self.progress.paused():
            self._record(result.step, result.state, result.numbers, evaluators, timing)

    def close(self, *, failed: bool) -> None:
        """End the runs of trackers."""
        if self.run.writer:
            self.run.writer.trackers.close(failed=failed)

    def _catch_up(self, state: TrainState) -> None:
        """Write the row of the checkpoint's step if it is missing, and read the earlier rows for best step and stop."""
        writer, progress, start = self.run.writer, self.progress, self.run.start
        recalled = writer and (progress.best.metric or progress.early.best.metric)
        rows, last = multihost.gather(
            "rows", (writer.metrics.resumed if writer and recalled else [], writer.metrics.last_step if writer else 0)
        )[0]
        for row in rows:
            progress.best.update(row["step"], row)
            progress.early.update(row["step"], row)
        evaluators, logs = self._due(start.step)
        if last < start.step and (evaluators or logs):
            self._record(start.step, state, start.about["row"], evaluators, {})

    def _due(self, step: int) -> tuple[list[str], bool]:
        """Return the evaluators to run after a step, all after the last one, and True if `intervals.log` is due."""
        last = step == self.setup.plan.total_steps
        evaluators = [name for name, interval in self.every.evals.items() if last or self.is_due(interval, step)]
        return evaluators, self.is_due(self.every.log, step)

    def _peak(self) -> float | None:
        """Return the training examples per second if the devices ran matrix products at their peak rate.

        Model FLOPs utilization (MFU) is measured against it. None for images of different sizes, for a model without a
        formula, and for devices that are not in `dcvit.parallel.topologies`.
        """
        devices = jax.devices()
        flops, chip = step_flops(self.setup), topologies.chip(devices[0].device_kind)
        same_size = input_pipeline.patch_sizes(self.setup.data.pp) is None
        return chip.peak * len(devices) / flops if same_size and chip and flops else None

    def _timing(self) -> dict[str, float]:
        seconds = self.progress.lap()
        timing = {"step_seconds": seconds, "examples_per_second": self.setup.data.batch_size / seconds}
        if self.peak:
            timing["mfu"] = timing["examples_per_second"] / self.peak
        timing["seconds"] = self.run.seconds
        return timing

    def _record(
        self, step: int, state: TrainState, numbers: Row, evaluators: Iterable[str], timing: dict[str, float]
    ) -> None:
        progress = self.progress
        row = {name: value for name, value in numbers.items() if name != "nonfinite" or progress.guard.limit}
        row |= self._evaluate(state, evaluators)
        progress.early.update(step, row)
        if progress.early.reason:  # this step is the last one, which evaluates everything
            row |= self._evaluate(state, [name for name in self.setup.evaluators if name not in evaluators])
        progress.best.update(step, row)
        if self.run.writer:
            self.run.writer.write(step, row, timing)
        self.run.display.report(step, row, timing)
        progress.row, progress.row_step = row, step

    def _evaluate(self, state: TrainState, evaluators: Iterable[str]) -> dict[str, float]:
        """Run the named evaluators, and return their metrics by the keys "EVALUATOR/METRIC" of a row."""
        found: dict[str, float] = {}
        for name in evaluators:
            self.run.watchdog.progress()
            found |= {f"{name}/{k}": v for k, v in self.setup.evaluators[name].run(state.best).items()}
        return found


class CheckpointHook(Hook):
    """Saves checkpoints at intervals, at the last step, and at the best step by `config.ckpt_best`."""

    def after_step(self, result: StepResult) -> None:
        """Save the state after a step at which a checkpoint is due, or which is the best so far."""
        step, every, progress = result.step, self.every, self.progress
        due = self.is_due(every.ckpt, step) or bool(every.ckpt and progress.early.reason)
        kept = bool(every.keep_ckpt) and step % (every.keep_ckpt or 1) == 0
        if not due and not kept and progress.best.step != step:
            return
        progress.guard.check(result)  # waits for the steps under way, which are not part of the pause
        with progress.paused():
            self.run.watchdog.progress()
            self.save(result)

    def save(self, result: StepResult) -> None:
        """Start to save the state after a step, unless it is the newest one saved.

        Raises:
          FloatingPointError: the state contains NaN or Inf.
          CheckpointError: this save could not start, or the last one failed.
        """
        run = self.run
        if run.checkpointer.saved == result.step:
            return
        self.progress.guard.check(result)
        gathered = multihost.gather(f"finite/{result.step}", non_finite_arrays(result.state.items()))
        if names := sorted({name for found in gathered for name in found}):
            more = f" and {len(names) - 1} more arrays are" if len(names) > 1 else " is"
            raise FloatingPointError(
                f"step {result.step}: {names[0]}{more} not finite; not saved, earlier checkpoints are kept"
            )
        run.flush()
        about = {**run.about, "row": result.numbers, "seconds": run.seconds}
        run.checkpointer.save(result.step, result.state.items(), about, best=self.progress.best.step)


class ProfilerHook(Hook):
    """Records a JAX profiler trace of the steps of `config.profile` in `<workdir>/profile`."""

    recording = False

    def before_step(self, step: int) -> None:
        """Start the trace at the first of the steps of `config.profile`, or where a run resumes among them."""
        first, last = self.setup.config.profile
        if not self.recording and first <= step <= last:
            jax.profiler.start_trace(str(self.run.workdir / "profile"))
            self.recording = True

    def after_step(self, result: StepResult) -> None:
        """End the trace after the last of the steps of `config.profile`."""
        if self.recording and result.step == self.setup.config.profile[1]:
            jax.block_until_ready(result.state)
            self.close(failed=False)

    def close(self, *, failed: bool) -> None:
        """End the trace of a run that ends before the last of the steps of `config.profile`."""
        if self.recording:
            self.recording = False
            jax.profiler.stop_trace()
