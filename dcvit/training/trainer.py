"""The steps of a run, and what happens between them: logging, evaluation, checkpoints, profiling, being stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import input_pipeline
from dcvit.checkpoint.checkpointer import Checkpointer
from dcvit.checkpoint.files import Folder, replace
from dcvit.errors import first_line
from dcvit.parallel import multihost
from dcvit.parallel.sharding import local_rows, prefetch
from dcvit.runs.metrics import MetricWriter
from dcvit.runs.progress import RunProgress
from dcvit.runs.watchdog import Watchdog
from dcvit.training.step import TrainState, not_finite
from dcvit.training.tasks import TrainingData


class StepClock:
    """Wall time of a training step, without the pauses for evaluation and saving."""

    def __init__(self) -> None:
        self.since, self.steps = time.perf_counter(), 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        started = time.perf_counter()
        yield
        self.since += time.perf_counter() - started

    def lap(self) -> float:
        """Seconds a step since the last lap; begins a new one."""
        seconds = (time.perf_counter() - self.since) / max(1, self.steps)
        self.since, self.steps = time.perf_counter(), 0
        return seconds


@dataclasses.dataclass
class Done:
    """What the last step left: the state, and the step's metrics, still on the devices."""

    step: int
    state: TrainState
    metrics: Mapping[str, jax.Array]

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The metrics, once they are computed."""
        return {name: value.item() for name, value in jax.device_get(dict(self.metrics)).items()}


@dataclasses.dataclass
class Loop:
    """The steps of one run."""

    config: ConfigDict
    workdir: Folder
    data: TrainingData
    mesh: Mesh
    writer: MetricWriter | None  # of the first process
    checkpoints: Checkpointer
    evaluate: dict[str, Callable[[Any], dict[str, float]]]
    every: dict[str, int | None]  # steps between "log", "ckpt" and each "evals.NAME"
    watchdog: Watchdog
    about: Mapping[str, Any]  # what every checkpoint says of the run
    peak_examples: float | None = None  # that the devices' peak would learn from in a second, where it is known

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.turn = threading.Condition()  # held while a step changes the state
        self.begun = 0  # the newest step that was begun
        self.limit: int | None = None  # the step after which a stopped run stands still
        self.ended = False  # the main thread does no further step
        self.done: Done | None = None
        self.saving = threading.Lock()
        self.telling = threading.Lock()
        self.told: dict[int, str] = {}  # what was said of steps that were not finite
        self.clock = StepClock()
        self.best: tuple[float | None, int | None] = (None, None)  # of `config.ckpt_best`: its value, and the step

    def run(
        self,
        compile_update: Callable[[TrainState, Any], Any],
        state: TrainState,
        start: int,
        resumed: Mapping[str, Any],
    ) -> dict[str, Any]:
        """All steps after `start`; returns the last row of metrics, empty where none was left.

        Args:
          compile_update: from a state and a batch to the compiled training step.
          state: of step `start`, placed on the devices.
          start: how many steps are done.
          resumed: what the checkpoint of `start` says about the run; empty at step 0.
        """
        total, size, row = self.data.total_steps, self.data.batch_size, {}
        self.started -= resumed.get("seconds", 0)
        with self.turn:
            self.begun, self.done = start, Done(start, state, {})
            self.turn.notify_all()
        self.checkpoints.saved = start or None
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(RunProgress(self.workdir.name, total, start, self.data.task.rate))
            self.progress = progress
            self._recall_best(start)
            if start:
                progress.line(f"going on from the checkpoint of step {start} of {total}")
                row = self._catch_up(start, state, resumed["row"])
            else:
                row = self._first_row(state)
            batches = stack.enter_context(contextlib.closing(self.data.batches(start, local_rows(self.mesh, size))))
            on_devices = prefetch(itertools.islice(batches, total - start), self.mesh, size)
            for step in range(start + 1, total + 1):
                self._profile(step, state, start)
                self.watchdog(f"waiting for the data of step {step}")
                batch = next(on_devices)
                if step == start + 1:
                    progress.line("compiling the training step")
                    self.watchdog("compiling the training step")
                    update = compile_update(state, batch)
                    self.clock = StepClock()
                self.watchdog(f"at step {step}")
                before, state = self.done, self._advance(update, step, state, batch)
                self._check(before)  # one step late: the devices are at the next one already
                self.checkpoints.check_for_errors()
                self.clock.steps += 1
                progress.advance(step)
                row = self._between(step, state) or row
            if self.config.profile and start < total and self.config.profile[0] <= total <= self.config.profile[1]:
                self._stop_trace(state)
        return row

    def stop(self) -> str:
        """Saves the last step that was done, whatever the main thread is at, which does no other one; says so.

        Of several processes all save the same step: the latest that any of them has begun.
        """
        self.watchdog.close()  # the main thread may stand still now
        with self.turn:
            self.limit = self.begun
        agreed = max(multihost.gather("stop", self.limit))
        with self.turn:
            self.limit = agreed
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.ended or (self.done.step if self.done else 0) >= agreed)
            done = self.done
        if done and done.step < agreed and jax.tree.leaves(done.state)[0].is_deleted():
            self.checkpoints.wait()
            return f"step {agreed} failed; the newest checkpoint is of step {self.checkpoints.saved or 0}"
        if not multihost.is_single_process() and (not done or done.step < agreed):
            raise RuntimeError(f"step {agreed} failed")
        self.checkpoints.wait()
        if not done or not done.metrics:
            return "no step was done since the last checkpoint"
        self._save(done)
        self.checkpoints.wait()
        return f"step {done.step} is saved"

    def end(self) -> None:
        """The main thread does no further step; `stop` does not wait for one."""
        with self.turn:
            self.ended = True
            self.turn.notify_all()

    def _advance(self, update: Any, step: int, state: TrainState, batch: Any) -> TrainState:
        """One step, unless the run is to stand still before it."""
        with self.turn:
            self.turn.wait_for(lambda: self.limit is None or step <= self.limit)
            self.begun = step
        state, metrics = update(state, batch)  # may wait for other processes
        with self.turn:
            self.done = Done(step, state, metrics)
            self.turn.notify_all()
        return state

    def _between(self, step: int, state: TrainState) -> dict[str, Any]:
        """Logging, evaluations and checkpoints that are due after a step; returns the row of metrics, if any."""
        assert self.done
        row: dict[str, Any] = {}
        evals = [name for name in self.evaluate if self._due(f"evals.{name}", step)]
        if evals or self._due("log", step):
            self._check(self.done)
            timing = {}
            if self._due("log", step):
                seconds = self.clock.lap()
                timing = {"step_seconds": seconds, "examples_per_second": self.data.batch_size / seconds}
                if self.peak_examples:
                    timing["mfu"] = timing["examples_per_second"] / self.peak_examples
                timing["seconds"] = time.perf_counter() - self.started
            with self.clock.paused():
                row = self._row(step, state, self.done.numbers, evals, timing)
        if self._due("ckpt", step) or (row and self.best[1] == step):
            self._check(self.done)  # waits for the steps under way, which are not part of the pause
            with self.clock.paused():
                self.watchdog(f"saving step {step}")
                self._save(self.done)
        return row

    def _due(self, name: str, step: int) -> bool:
        """Whether a step logs, saves or evaluates; the last one always evaluates."""
        every, last = self.every[name], step == self.data.total_steps
        if not every:
            return last and name.startswith("evals.")
        return last or step % every == 0

    def _save(self, done: Done) -> None:
        """Begins to save a step, once.

        Raises:
          FloatingPointError: the state holds a NaN or Inf.
          CheckpointError: saving failed, this time or the last.
        """
        with self.saving:
            if self.checkpoints.saved == done.step:
                return
            self._check(done)
            found = multihost.gather(f"finite/{done.step}", not_finite(done.state.items()))
            if names := sorted({name for names in found for name in names}):
                more = f" and {len(names) - 1} more arrays are" if len(names) > 1 else " is"
                raise FloatingPointError(
                    f"step {done.step}: {names[0]}{more} not finite; not saved, earlier checkpoints are kept"
                )
            position = {"seed": self.data.seed, "next example": done.step * self.data.batch_size}
            timing = {"seconds": time.perf_counter() - self.started}
            about = {**self.about, "position": position, "row": done.numbers, **timing}
            if self.writer:
                self.writer.flush()
            self.checkpoints.save(done.step, done.state.items(), about, best=self.best[1])

    def _check(self, done: Done) -> None:
        """Raises FloatingPointError where more steps than `config.nonfinite_skip` were not finite up to this one."""
        numbers, most = done.numbers, self.config.nonfinite_skip
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(numbers.get(name, 0))]
        count = numbers.get("nonfinite", 0)
        with self.telling:
            if bad and done.step not in self.told:
                self.told[done.step] = f"step {done.step}: the {bad[0]} is {numbers[bad[0]]}"
                where = self._dump(done.step, bad)
                if count <= most and multihost.is_first():
                    text = f"{self.told[done.step]}; skipped, {count} of at most {most}, {where}"
                    print(text, file=sys.stderr)
                self.told[done.step] += f"; stopped{f' after {most} that were skipped' if most else ''}, {where}"
        if count > most:
            what = self.told.get(done.step, f"step {done.step}: {count} steps so far were not finite; stopped")
            raise FloatingPointError(f"{what}, earlier checkpoints are kept")

    def _dump(self, step: int, bad: Sequence[str]) -> str:
        """Writes which examples a step was made of, in the first process; says where, or why not."""
        path, said = self.workdir / f"nonfinite-{step}.json", "its examples are in"
        if multihost.is_first():
            try:
                ids = input_pipeline.batch_ids(self.data.source, self.data.batch_size, self.data.seed, step - 1)
                replace(path, json.dumps({"step": step, "not finite": bad, "examples": ids}, indent=1) + "\n")
            except (OSError, ValueError) as e:
                said = f"its examples could not be written ({first_line(e)}) to"
        with contextlib.suppress(Exception):  # the others would end the first one before it has written
            multihost.gather(f"told/{step}", True, multihost.EXIT_SECONDS)
        return f"{said} {path}"

    def _row(
        self, step: int, state: TrainState, numbers: Mapping[str, Any], evals: Sequence[str], timing: dict[str, float]
    ) -> dict[str, Any]:
        """Records and shows a step's metrics and the evaluations due."""
        row = {name: value for name, value in numbers.items() if name != "nonfinite" or self.config.nonfinite_skip}
        row |= self._evaluations(step, state, evals)
        self._note_best(step, row)
        if self.writer:
            self.writer.write(step, row, timing)
        self.progress.report(step, row, timing)
        return row

    def _evaluations(self, step: int, state: TrainState, names: Iterable[str]) -> dict[str, float]:
        row: dict[str, float] = {}
        for name in names:
            self.watchdog(f"evaluating {name} after step {step}")
            row |= {f"{name}/{k}": v for k, v in self.evaluate[name](state.best).items()}
        return row

    def _first_row(self, state: TrainState) -> dict[str, Any]:
        """Parameter count and every evaluation before the first step."""
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        self.progress.line(_overview(state.params) + f"{count:,} parameters, {self.data.total_steps} steps")
        row = {"num_params": count, **self._evaluations(0, state, self.evaluate)}
        if self.writer:
            self.writer.write(0, row)
        self.progress.report(0, row, {})
        return row

    def _catch_up(self, start: int, state: TrainState, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the row of the step that is gone on from, where the run was stopped before it could."""
        last = multihost.gather("rows", self.writer.last_step if self.writer else 0)[0]
        evals = [name for name in self.evaluate if self._due(f"evals.{name}", start)]
        if last >= start or not (evals or self._due("log", start)):
            return {}
        return self._row(start, state, numbers, evals, {})

    def _recall_best(self, start: int) -> None:
        """Which step up to `start` was the best by `config.ckpt_best`."""
        for row in multihost.gather(
            "history", self.writer.metrics.rows if self.writer and self.config.ckpt_best else []
        )[0]:
            if row["step"] <= start:
                self._note_best(row["step"], row)

    def _note_best(self, step: int, row: Mapping[str, Any]) -> None:
        """Has the checkpoint of this step kept where it is the best so far."""
        if not self.config.ckpt_best or not step:
            return
        metric, mode = self.config.ckpt_best
        value, sign = row.get(metric), 1 if mode == "max" else -1
        if value is not None and math.isfinite(value) and (self.best[0] is None or sign * (value - self.best[0]) > 0):
            self.best = value, step

    def _profile(self, step: int, state: TrainState, start: int) -> None:
        """Records a JAX profiler trace of the steps of `config.profile` in `<workdir>/profile`."""
        if not self.config.profile:
            return
        first, last = self.config.profile
        if step == max(first, start + 1) and step <= last:
            jax.profiler.start_trace(str(self.workdir / "profile"))
        elif step == last + 1 and last > start:
            self._stop_trace(state)

    def _stop_trace(self, state: TrainState) -> None:
        jax.block_until_ready(state)
        jax.profiler.stop_trace()


def _overview(params: Any) -> str:
    """clu's table of parameters, where clu is installed."""
    if importlib.util.find_spec("clu") is None:
        return ""
    from clu import parameter_overview

    table: str = parameter_overview.get_parameter_overview(params, include_stats=False)
    return table + "\n"
