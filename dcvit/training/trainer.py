"""Training: the loop over steps, and its end by a stop signal from another thread.

The result of a step is a function of the config and the step: batches, augmentation, mixup and dropout use random
generators keyed by the seed and the step. Re-run the same command to resume from the latest checkpoint; the result is
bitwise identical.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax

from dcvit.parallel import multihost
from dcvit.parallel.sharding import local_rows, prefetch
from dcvit.runs.files import Folder
from dcvit.runs.preemption import Preemption
from dcvit.training.hooks import (
    BestCheckpoint,
    CheckpointHook,
    EarlyStop,
    Hook,
    MetricsHook,
    NonFiniteGuard,
    ProfilerHook,
    StepClock,
    StepResult,
    WandbHook,
)
from dcvit.training.resume import Run, open_run
from dcvit.training.setup import Setup
from dcvit.training.step import TrainState, Update, jit_update


def train(
    setup: Setup, workdir: Folder, accept: Sequence[str] = (), preemption: Preemption | None = None
) -> dict[str, Any]:
    """Train to the last step, or until `config.early_stop` ends the run, from the latest checkpoint of the workdir.

    Writes config.json, data.json, metrics.jsonl, timing.jsonl and checkpoints/ to the workdir.

    Args:
      setup: the run.
      workdir: the run's folder.
      accept: config keys, or "data", that may differ from those of the run that the workdir holds.
      preemption: the listener for stop signals; by default signals are not handled.

    Returns:
      The last row of metrics; empty if no step was left.

    Raises:
      ConfigError, InputError, CheckpointError: invalid input, before anything compiles.
      CheckpointError, MetricsError: saving failed.
      FloatingPointError: the run diverged.
    """
    preemption = preemption or Preemption()
    with open_run(setup, workdir, accept) as run:
        trainer = Trainer(run)
        with jax.set_mesh(setup.model.mesh), preemption.saving(trainer.finish):
            try:
                with preemption.saving(trainer.stop, trainer.end):
                    trainer.run_steps(run.start_state())
            finally:
                failed = sys.exception() is not None
                try:
                    if not failed or multihost.is_single_process():  # others may not finish a common save
                        run.watchdog("finishing the last checkpoint", saves=True)
                        run.checkpointer.close()
                finally:
                    run.watchdog("ending")
                    trainer.close(failed=failed)
        multihost.gather("ended", True)
    return trainer.metrics.row


class Trainer:
    """The loop over the steps of a run.

    The main thread calls `run_steps`. `stop`, called by another thread, saves the run at a step boundary, also if the
    main thread does not return from a step, a compilation or an evaluation.
    """

    def __init__(self, run: Run):
        self.run, self.setup = run, run.setup
        self.turn = threading.Condition()  # guards the following four
        self.started = 0  # the newest step that was started
        self.limit: int | None = None  # the step after which a stopped run starts no other
        self.ended = False  # the main thread starts no further step
        self.result: StepResult | None = None  # of the newest completed step
        self.clock = StepClock()
        self.guard, best = NonFiniteGuard(run), BestCheckpoint(run.setup.options.ckpt_best)
        self.early = EarlyStop(run.setup.options.early_stop)
        self.metrics = MetricsHook(run, self.guard, best, self.early, self.clock)
        self.checkpoints = CheckpointHook(run, self.guard, best, self.early, self.clock)
        profiler = [ProfilerHook(run, self.early)] if run.setup.options.profile else []
        wandb = [WandbHook(run, self.metrics)] if run.setup.options.wandb and multihost.is_first() else []
        self.hooks: list[Hook] = [self.metrics, self.checkpoints, *profiler, *wandb]

    def run_steps(self, state: TrainState) -> None:
        """Execute all steps after `run.start`, whose state is given, or those up to the one that stops early."""
        run, start, total = self.run, self.run.start, self.setup.plan.total_steps
        with self.turn:
            self.started, self.result = start, StepResult(start, state, {})
            self.turn.notify_all()
        run.checkpointer.saved = start or None
        if start:
            run.progress.line(f"resuming from the checkpoint of step {start} of {total}")
            self.metrics.catch_up(state)
        else:
            self.metrics.first_row(state)
        if start == total or self.early.reason:
            run.progress.line(f"the run is complete: {self.early.reason or f'all {total} steps are done'}")
            return
        rows = local_rows(self.setup.model.mesh, self.setup.data.batch_size)
        with contextlib.closing(self.setup.data.batches(start, rows)) as batches:
            on_devices = prefetch(
                itertools.islice(batches, total - start), self.setup.model.mesh, self.setup.data.batch_size
            )
            update: Update | None = None
            for step in range(start + 1, total + 1):
                for hook in self.hooks:
                    hook.before_step(step)
                run.watchdog(f"waiting for the data of step {step}")
                batch = next(on_devices)
                if update is None:
                    update = self._compile(state, batch)
                run.watchdog(f"at step {step}")
                previous, result = self.result, self._advance(update, step, state, batch)
                state = result.state
                self.guard.check(previous)  # of the step before: the devices are executing this one
                run.checkpointer.check_for_errors()
                self.clock.steps += 1
                run.progress.advance(step)
                for hook in self.hooks:
                    hook.after_step(result)
                if self._ends_early():
                    break

    def stop(self) -> str:
        """Save the newest completed step, and let the main thread start no other; return a message for the user.

        All processes of a run save the same step: the latest that any of them has started.
        """
        self.run.watchdog.close()  # the main thread may wait from now on
        with self.turn:
            self.limit = self.started
        agreed = max(multihost.gather("stop", self.limit))
        with self.turn:
            self.limit = agreed
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.ended or (self.result.step if self.result else 0) >= agreed)
            result = self.result
        failed = (result.step if result else 0) < agreed
        if failed and not multihost.is_single_process():
            raise RuntimeError(f"step {agreed} failed")
        self.run.checkpointer.wait()
        if failed and result and jax.tree.leaves(result.state)[0].is_deleted():  # donated to the step that failed
            return f"step {agreed} failed; the latest checkpoint is of step {self.run.checkpointer.saved or 0}"
        if not result or not result.metrics:
            return "no step was completed since the last checkpoint"
        self.checkpoints.save(result)
        self.run.checkpointer.wait()
        return f"step {result.step} is saved"

    def finish(self) -> str:
        """Wait for the last checkpoint of a run that is stopped after its last step; return a message for the user."""
        self.run.checkpointer.wait()
        return "the last checkpoint is complete"

    def end(self) -> None:
        """Tell `stop` that the main thread completes no further step."""
        with self.turn:
            self.ended = True
            self.turn.notify_all()

    def close(self, *, failed: bool) -> None:
        """Close the hooks."""
        for hook in self.hooks:
            hook.close(failed=failed)

    def _compile(self, state: TrainState, batch: dict[str, jax.Array]) -> Update:
        """Compile the training step for a state and a batch."""
        self.run.progress.line("compiling the training step")
        self.run.watchdog("compiling the training step")
        update: Update = jit_update(self.setup, self.run.shapes).lower(state, batch).compile()
        self.clock.start()
        return update

    def _ends_early(self) -> bool:
        """Return True, and say why, if the step that was completed last is the last one by `config.early_stop`."""
        if self.early.reason:
            self.run.progress.line(self.early.reason)
        return self.early.reason is not None

    def _advance(self, update: Update, step: int, state: TrainState, batch: dict[str, jax.Array]) -> StepResult:
        """Execute one step; block forever if the run was stopped before it."""
        with self.turn:
            self.turn.wait_for(lambda: self.limit is None or step <= self.limit)
            self.started = step
        state, metrics = update(state, batch)  # may wait for other processes
        result = StepResult(step, state, metrics)
        with self.turn:
            self.result = result
            self.turn.notify_all()
        return result
