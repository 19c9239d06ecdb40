"""Training: the loop over steps, and stopping it from another thread after a signal.

The result of a step is a function of the config and the step: batches, augmentation, mixup and dropout use random
generators keyed by the seed and the step. Re-run the same command to resume from the latest checkpoint; the result is
bitwise identical.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax

from dcvit.dcmha.selection import selecting
from dcvit.parallel import multihost
from dcvit.parallel.sharding import local_rows, prefetch
from dcvit.runs.files import Folder
from dcvit.runs.preemption import Preemption
from dcvit.runs.progress import stage
from dcvit.training import memory
from dcvit.training.hooks import CheckpointHook, Hook, MetricsHook, ProfilerHook, RowHook
from dcvit.training.progress import OnRow, Progress, StepResult
from dcvit.training.resume import Run, open_run, start_state
from dcvit.training.setup import Setup
from dcvit.training.step import TrainState, Update, jit_update


def train(
    setup: Setup,
    workdir: Folder,
    accept: Sequence[str] = (),
    preemption: Preemption | None = None,
    on_row: OnRow | None = None,
) -> dict[str, Any]:
    """Train to the last step, or until `config.early_stop` ends the run, from the latest checkpoint of the workdir.

    Writes config.json, data.json, metrics.jsonl, timing.jsonl and checkpoints/ to the workdir.

    Args:
      setup: the run.
      workdir: the run's folder.
      accept: config keys, or "data", that may differ from those of the run that the workdir holds.
      preemption: the listener for stop signals; by default signals are not handled.
      on_row: called with the step and the metrics of each row, in every process; its exceptions end the run. Metrics
        that are not finite are NaN or infinite.

    Returns:
      The last row of metrics; empty if no step was left.

    Raises:
      ConfigError, InputError, CheckpointError: invalid input, before anything compiles.
      CheckpointError, MetricsError: saving failed.
      FloatingPointError: the run diverged.
    """
    preemption = preemption or Preemption()
    with open_run(setup, workdir, accept) as run:
        trainer = Trainer(run, on_row)
        with jax.set_mesh(setup.model.mesh), selecting(run.selection), preemption.saving(trainer.finish):
            failed = True
            try:
                with preemption.saving(trainer.stop, trainer.gate.end):
                    trainer.run_steps(start_state(run))
                failed = False
            finally:
                try:
                    if not failed or multihost.is_single_process():  # others may not finish a common save
                        run.watchdog("finishing the last checkpoint", saves=True)
                        run.checkpointer.close()
                finally:
                    run.watchdog("ending")
                    trainer.close(failed=failed)
        multihost.gather("ended", True)
    return trainer.progress.row


class StopGate:
    """Agreement of two threads on the last step: the main thread, which executes steps, and one that stops the run."""

    def __init__(self) -> None:
        self.turn = threading.Condition()  # guards the following
        self.started = 0  # the newest step that was started
        self.limit: int | None = None  # the step after which a stopped run starts no other
        self.ended = False  # the main thread starts no further step
        self.result: StepResult | None = None  # of the newest completed step

    def begin(self, result: StepResult) -> None:
        """Set the step and the state that the main thread starts from."""
        with self.turn:
            self.started, self.result = result.step, result
            self.turn.notify_all()

    def enter(self, step: int) -> None:
        """Mark a step as started, in the main thread; block forever if the run was stopped before it."""
        with self.turn:
            self.turn.wait_for(lambda: self.limit is None or step <= self.limit)
            self.started = step

    def complete(self, result: StepResult) -> None:
        """Record, in the main thread, the result of the step that it started."""
        with self.turn:
            self.result = result
            self.turn.notify_all()

    def end(self) -> None:
        """Record, in the main thread, that it will complete no further step."""
        with self.turn:
            self.ended = True
            self.turn.notify_all()

    def close(self) -> int:
        """Keep the main thread from starting another step; return the number of the last one that it has started."""
        with self.turn:
            self.limit = self.started
            return self.limit

    def wait_for(self, step: int) -> StepResult | None:
        """Let the main thread execute the steps up to `step`; return the result of the last completed step.

        That is an earlier step if the main thread ends before, and None if no step was completed.
        """
        with self.turn:
            self.limit = step
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.ended or (self.result.step if self.result else 0) >= step)
            return self.result


class Trainer:
    """The loop over the steps of a run.

    The main thread calls `run_steps`. `stop`, called by another thread, saves the run at a step boundary, also if the
    main thread does not return from a step, a compilation or an evaluation.
    """

    def __init__(self, run: Run, on_row: OnRow | None = None):
        self.run, self.setup, options = run, run.setup, run.setup.options
        self.gate, self.progress = StopGate(), Progress(run)
        self.checkpoints = CheckpointHook(run, self.progress)
        self.hooks: list[Hook] = [MetricsHook(run, self.progress), self.checkpoints]
        if options.profile:
            self.hooks.append(ProfilerHook(run, self.progress))
        if on_row:
            self.hooks.append(RowHook(self.progress, on_row))

    def run_steps(self, state: TrainState) -> None:
        """Execute the steps after `run.start`, from its `state`, to the last one or until early stopping."""
        run, start, total = self.run, self.run.start.step, self.setup.plan.total_steps
        self.gate.begin(StepResult(start, state, {}))
        run.checkpointer.saved = start or None
        if start:
            run.display.line(f"resuming from the checkpoint of step {start} of {total}")
        for hook in self.hooks:
            hook.start(state)
        if start == total or self.progress.early.reason:
            done = self.progress.early.reason or f"all {total} steps are done"
            run.display.line(f"the run is complete: {done}")
            return
        mesh, data = self.setup.model.mesh, self.setup.data
        with contextlib.closing(data.batches(start, local_rows(mesh, data.batch_size))) as batches:
            on_devices = prefetch(itertools.islice(batches, total - start), mesh, data.batch_size)
            update: Update | None = None
            for step in range(start + 1, total + 1):
                for hook in self.hooks:
                    hook.before_step(step)
                run.watchdog(f"waiting for the data of step {step}")
                batch = next(on_devices)
                if update is None:
                    update = self._compile(state, batch)
                run.watchdog(f"at step {step}")
                previous, result = self.gate.result, self._advance(update, step, state, batch)
                state = result.state
                if reason := self._after_step(previous, result):
                    run.display.line(reason)
                    break

    def stop(self) -> str:
        """Save the newest completed step, and let the main thread start no other; return a message for the user.

        All processes of a run save the same step: the latest that any of them has started.
        """
        run = self.run
        run.watchdog.close()  # the main thread may wait from now on
        agreed = max(multihost.gather("stop", self.gate.close()))
        result = self.gate.wait_for(agreed)
        failed = (result.step if result else 0) < agreed
        if failed and not multihost.is_single_process():
            raise RuntimeError(f"step {agreed} failed")
        run.checkpointer.wait()
        if failed and result and jax.tree.leaves(result.state)[0].is_deleted():  # donated to the step that failed
            return f"step {agreed} failed; the latest checkpoint is of step {run.checkpointer.saved or 0}"
        if not result or not result.metrics:
            return "no step was completed since the last checkpoint"
        self.checkpoints.save(result)
        run.checkpointer.wait()
        return f"step {result.step} is saved"

    def finish(self) -> str:
        """Wait for the last checkpoint of a run that is stopped after its last step; return a message for the user."""
        self.run.checkpointer.wait()
        return "the last checkpoint is complete"

    def close(self, *, failed: bool) -> None:
        """Close all hooks in their order, even if one of them raises an error; `failed`: the run ended by an error."""
        with contextlib.ExitStack() as closing:
            for hook in reversed(self.hooks):
                closing.callback(hook.close, failed=failed)

    def _compile(self, state: TrainState, batch: dict[str, jax.Array]) -> Update:
        """Return the training step, compiled for a state and a batch."""
        self.run.watchdog("compiling the training step")
        with stage("compiling the training step", self.run.display.line):
            update = jit_update(self.setup, self.run.start.shapes).lower(state, batch).compile()
        if self.setup.options.check_memory:
            memory.check_step(self.setup.model.mesh, update)
        self.progress.clock.start()
        compiled: Update = update
        return compiled

    def _advance(self, update: Update, step: int, state: TrainState, batch: dict[str, jax.Array]) -> StepResult:
        """Start one step on the devices, and return its result; block forever if the run was stopped before it."""
        self.gate.enter(step)
        state, metrics = update(state, batch)  # may wait for other processes
        result = StepResult(step, state, metrics)
        self.gate.complete(result)
        return result

    def _after_step(self, previous: StepResult | None, result: StepResult) -> str | None:
        """Check the previous step (the devices are still executing this one), and call the hooks.

        Returns:
          The reason why `config.early_stop` stops the run; None if it continues.
        """
        if previous:
            self.progress.guard.check(previous)
        self.run.checkpointer.check_for_errors()
        self.progress.clock.steps += 1
        self.run.display.advance(result.step)
        for hook in self.hooks:
            hook.after_step(result)
        return self.progress.early.reason
