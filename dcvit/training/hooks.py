"""Hooks of the training loop: metrics and evaluations, checkpoints, and the profiler.

The trainer calls `start` of each hook once, and `before_step` and `after_step` at every step, in the order of the list.
Hooks do not know each other; they share one `dcvit.training.progress.Progress`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from dcvit.parallel import multihost, topologies
from dcvit.runs.workdir import write_overview
from dcvit.training.progress import OnRow, Progress, StepResult
from dcvit.training.resume import Run
from dcvit.training.step import TrainState, non_finite_arrays, step_flops
from input_pipeline import patch_sizes


class Hook:
    """Work that the trainer does between the steps; a subclass overrides the methods that it needs."""

    def start(self, state: TrainState) -> None:
        """Run once before the first step, with the state that training starts from."""

    def before_step(self, step: int) -> None:
        """Run before the data of a step is read."""

    def after_step(self, result: StepResult) -> None:
        """Run after a step was started on the devices, when the previous step has been checked."""

    def close(self, *, failed: bool) -> None:
        """Run once after the last step, or after an error."""


class MetricsHook(Hook):
    """Writes and shows metrics, and runs evaluators, at the steps that their intervals in the config determine."""

    def __init__(self, run: Run, progress: Progress):
        self.run, self.progress = run, progress
        self.intervals, self.total_steps = run.setup.plan.intervals, run.setup.plan.total_steps
        same_size = patch_sizes(run.setup.data.pp) is None  # else operations for examples differ
        self.peak = peak_examples_per_second(step_flops(run.setup), jax.devices()) if same_size else None

    def start(self, state: TrainState) -> None:
        """Write the row of step 0, with the parameter count and all evaluations, or a row that a resumed run lacks."""
        if self.run.start.step:
            self._catch_up(state)
            return
        if self.run.writer:
            write_overview(self.run.workdir, state.params)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        self.run.display.line(f"{count:,} parameters, {self.total_steps} steps")
        self._record(0, state, {"num_params": count}, self.run.setup.evaluators, {})

    def after_step(self, result: StepResult) -> None:
        """Write the row of metrics of a step after which metrics or evaluations are due."""
        evaluators, logs = self._due(result.step)
        if not evaluators and not logs:
            return
        self.progress.guard.check(result)
        timing = self._timing() if logs else {}
        with self.progress.clock.paused():
            self._record(result.step, result.state, result.numbers, evaluators, timing)

    def close(self, *, failed: bool) -> None:
        """End the runs of trackers."""
        if self.run.writer:
            self.run.writer.trackers.close(failed=failed)

    def _catch_up(self, state: TrainState) -> None:
        """Write the row of the checkpoint's step if it is missing, and read the earlier rows for best step and stop."""
        run, start = self.run, self.run.start
        recalled = run.writer and (self.progress.best.metric or self.progress.early.best.metric)
        history = run.writer.metrics.resumed if run.writer and recalled else []
        for row in multihost.gather("history", history)[0]:
            self.progress.best.update(row["step"], row)
            self.progress.early.update(row["step"], row)
        last = multihost.gather("rows", run.writer.metrics.last_step if run.writer else 0)[0]
        evaluators, logs = self._due(start.step)
        if last < start.step and (evaluators or logs):
            self._record(start.step, state, start.about["row"], evaluators, {})

    def _due(self, step: int) -> tuple[list[str], bool]:
        """Return the evaluators to run after a step, all after the last one, and True if `intervals.log` is due."""
        last = step == self.total_steps
        evaluators = [name for name, interval in self.intervals.evals.items() if last or is_due(interval, step)]
        return evaluators, bool(self.intervals.log) and (last or is_due(self.intervals.log, step))

    def _timing(self) -> dict[str, float]:
        seconds = self.progress.clock.elapsed_per_step()
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
        progress = self.progress
        row = {name: value for name, value in numbers.items() if name != "nonfinite" or progress.guard.limit}
        row |= self._evaluate(step, state, evaluators)
        progress.early.update(step, row)
        if progress.early.reason:  # this step is the last one, which evaluates everything
            row |= self._evaluate(step, state, [name for name in self.run.setup.evaluators if name not in evaluators])
        progress.best.update(step, row)
        if self.run.writer:
            self.run.writer.write(step, row, timing)
        self.run.display.report(step, row, timing)
        progress.row, progress.row_step = row, step

    def _evaluate(self, step: int, state: TrainState, evaluators: Iterable[str]) -> dict[str, float]:
        """Run the named evaluators, and return their metrics by the keys "EVALUATOR/METRIC" of a row."""
        found: dict[str, float] = {}
        for name in evaluators:
            self.run.watchdog.progress()
            found |= {f"{name}/{k}": v for k, v in self.run.setup.evaluators[name].run(state.best).items()}
        return found


class RowHook(Hook):
    """Passes the rows of metrics to a function (step, row), each once; in a resumed run, from the checkpoint's step."""

    def __init__(self, progress: Progress, send: OnRow):
        self.progress, self.send, self.sent = progress, send, -1

    def before_step(self, step: int) -> None:
        """Send the row of step 0, or in a resumed run the row of its checkpoint's step."""
        self._send()

    def after_step(self, result: StepResult) -> None:
        """Send the row of metrics of a step, if it has one."""
        self._send()

    def _send(self) -> None:
        if self.progress.row_step > self.sent:
            self.sent = self.progress.row_step
            self.send(self.sent, self.progress.row)


class CheckpointHook(Hook):
    """Saves checkpoints at intervals, at the last step, and at the best step by `config.ckpt_best`."""

    def __init__(self, run: Run, progress: Progress):
        self.run, self.progress = run, progress
        self.plan = run.setup.plan

    def after_step(self, result: StepResult) -> None:
        """Save the state after a step at which a checkpoint is due, or which is the best so far."""
        every = self.plan.intervals
        last = result.step == self.plan.total_steps or self.progress.early.reason
        due = bool(every.ckpt) and (last or is_due(every.ckpt, result.step))
        if not due and not is_due(every.keep_ckpt, result.step) and self.progress.best.step != result.step:
            return
        self.progress.guard.check(result)  # waits for the steps under way, which are not part of the pause
        with self.progress.clock.paused():
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

    def __init__(self, run: Run, progress: Progress):
        self.folder, (self.first, last) = str(run.workdir / "profile"), run.setup.options.profile
        self.progress, self.last = progress, min(last, run.setup.plan.total_steps)
        self.recording = False

    def before_step(self, step: int) -> None:
        """Start the trace at the first of the steps of `config.profile`, or where a run resumes among them."""
        if not self.recording and self.first <= step <= self.last:
            jax.profiler.start_trace(self.folder)
            self.recording = True

    def after_step(self, result: StepResult) -> None:
        """End the trace after the last of the steps of `config.profile`."""
        if self.recording and (result.step == self.last or self.progress.early.reason):
            jax.block_until_ready(result.state)
            self.close(failed=False)

    def close(self, *, failed: bool) -> None:
        """End the trace of a run that ends before the last of the steps of `config.profile`."""
        if self.recording:
            self.recording = False
            jax.profiler.stop_trace()


def is_due(interval: int | None, step: int) -> bool:
    """Return True if `step` is a multiple of `interval`; False if the interval is 0 or None."""
    return bool(interval) and step % (interval or 1) == 0


def peak_examples_per_second(flops: int | None, devices: Sequence[jax.Device]) -> float | None:
    """Return the training examples per second if the devices ran matrix products at their peak rate.

    Model FLOPs utilization (MFU) is measured against it. None without `flops`, of `dcvit.training.step.step_flops`, or
    for devices that are not in `dcvit.parallel.topologies`.
    """
    chip = topologies.chip(devices[0].device_kind)
    return chip.peak * len(devices) / flops if chip and flops else None
