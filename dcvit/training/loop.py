"""Training: the loop over steps, which stops at a step boundary after a signal.

The result of a step is a function of the config and the step: batches, augmentation, mixup and dropout use random
generators keyed by the seed and the step. Re-run the same command to resume from the latest checkpoint; the result is
bitwise identical.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from dcvit.dcmha.plan import selecting
from dcvit.parallel import multihost
from dcvit.parallel.sharding import local_rows, prefetch
from dcvit.runs.files import Folder
from dcvit.runs.progress import stage
from dcvit.runs.stop import StopSignals
from dcvit.training import memory
from dcvit.training.hooks import CheckpointHook, Hook, MetricsHook, ProfilerHook, Progress, Row, StepResult
from dcvit.training.resume import Run, open_run, start_state
from dcvit.training.setup import Setup
from dcvit.training.step import TrainState, Update, jit_update

OnRow: TypeAlias = Callable[[int, Row], object]  # a function of a step and its row


def train(
    setup: Setup,
    workdir: Folder,
    accept: Sequence[str] = (),
    signals: StopSignals | None = None,
    on_row: OnRow | None = None,
) -> None:
    """Train to the last step, or until `config.early_stop` ends the run, from the latest checkpoint of the workdir.

    Writes config.json, data.json, metrics.jsonl, timing.jsonl and checkpoints/ to the workdir.

    Args:
      setup: the run.
      workdir: the run's folder.
      accept: config keys, or "data", that may differ from those of the run that the workdir holds.
      signals: the stop signals; by default signals are not handled.
      on_row: called with the step and the metrics of each row, in every process; its exceptions end the run.

    Raises:
      ConfigError, InputError, CheckpointError: invalid input, before anything compiles.
      CheckpointError, MetricsError: saving failed.
      FloatingPointError: the run diverged.
      SystemExit: a signal stopped the run, which is saved; the status is that of `dcvit.runs.stop`.
    """
    with open_run(setup, workdir, accept) as run:
        trainer = Trainer(run, signals, on_row)
        with jax.set_mesh(setup.model.mesh), selecting(run.selection):
            failed = True
            try:
                trainer.run_steps(start_state(run))
                failed = False
            finally:
                try:
                    if not failed or multihost.is_single_process():  # others may not finish a common save
                        run.watchdog.progress()
                        with trainer.until_signal():  # it is completed
                            run.checkpointer.close()
                finally:
                    run.watchdog.progress()
                    trainer.close(failed=failed or bool(trainer.stopped))
        multihost.gather("ended", True)
    if signals and trainer.stopped:
        signals.end(trainer.stopped)


class Trainer:
    """The loop over the steps of a run.

    Attributes:
      stopped: what is saved, as a phrase, after a signal has stopped the run.
    """

    def __init__(self, run: Run, signals: StopSignals | None = None, on_row: OnRow | None = None):
        self.run, self.setup = run, run.setup
        self.signals, self.progress = signals, Progress(run)
        self.stopped: str | None = None
        self.on_row, self.sent = on_row, -1  # the step of the last row that `on_row` got
        self.checkpoints = CheckpointHook(run, self.progress)
        self.hooks: list[Hook] = [MetricsHook(run, self.progress), self.checkpoints]
        if self.setup.config.profile:
            self.hooks.append(ProfilerHook(run, self.progress))

    def until_signal(self) -> contextlib.AbstractContextManager[None]:
        """Context of work after which the trainer reads whether a signal has arrived."""
        return self.signals.training() if self.signals else contextlib.nullcontext()

    def run_steps(self, state: TrainState) -> None:
        """Execute the steps after `run.start`, from its `state`, to the last one, early stopping or a signal."""
        run, start, total = self.run, self.run.start.step, self.setup.plan.total_steps
        run.checkpointer.saved = start or None
        if start:
            run.display.line(f"resuming from the checkpoint of step {start} of {total}")
        for hook in self.hooks:
            hook.start(state)
        if start == total or self.progress.early.reason:
            done = self.progress.early.reason or f"all {total} steps are done"
            run.display.line(f"the run is complete: {done}")
            return
        self._send_row()
        mesh, data = self.setup.model.mesh, self.setup.data
        result = StepResult(start, state, {})
        update: Update | None = None
        batches = data.batches(start, local_rows(mesh, data.batch_size))
        with self.until_signal(), contextlib.closing(batches):
            on_devices = prefetch(itertools.islice(batches, total - start), mesh, data.batch_size)
            for step in range(start + 1, total + 1):
                if self.signals and self.signals.is_set():
                    self._stop(result)
                    return
                for hook in self.hooks:
                    hook.before_step(step)
                run.watchdog.progress()
                batch = next(on_devices)
                if update is None:
                    update = self._compile(result.state, batch)
                    if start:  # a new run is claimed when it is opened
                        run.claim()
                previous, result = result, StepResult(step, *update(result.state, batch))
                if reason := self._after_step(previous, result):
                    run.display.line(reason)
                    return

    def _stop(self, result: StepResult) -> None:
        """Start to save the newest step, and set `stopped`."""
        self.stopped = "no step was completed since the last checkpoint"
        if result.metrics:
            self.run.watchdog.progress()
            self.checkpoints.save(result)
            self.stopped = f"step {result.step} is saved"

    def close(self, *, failed: bool) -> None:
        """Close all hooks in their order, even if one of them raises an error; `failed`: the run ended by an error."""
        with contextlib.ExitStack() as closing:
            for hook in reversed(self.hooks):
                closing.callback(hook.close, failed=failed)

    def _compile(self, state: TrainState, batch: dict[str, jax.Array]) -> Update:
        """Return the training step, compiled for a state and a batch."""
        self.run.watchdog.progress()
        with stage("compiling the training step", self.run.display.line):
            update = jit_update(self.setup, self.run.start.shapes).lower(state, batch).compile()
        if self.setup.config.check_memory:
            memory.check_step(self.setup.model.mesh, update)
        self.progress.start_clock()
        compiled: Update = update
        return compiled

    def _after_step(self, previous: StepResult, result: StepResult) -> str | None:
        """Check the previous step (the devices are still executing this one), and call the hooks.

        Returns:
          The reason why `config.early_stop` stops the run; None if it continues.
        """
        self.progress.guard.check(previous)
        self.run.checkpointer.check_for_errors()
        self.progress.steps += 1
        self.run.display.advance(result.step)
        for hook in self.hooks:
            hook.after_step(result)
        self._send_row()
        return self.progress.early.reason

    def _send_row(self) -> None:
        """Pass the last row of metrics to `on_row`, once."""
        if self.on_row and self.progress.row_step > self.sent:
            self.sent = self.progress.row_step
            self.on_row(self.sent, self.progress.row)
