"""Training: `python -m dcvit.train --config CONFIG[:argument=value,…] --workdir DIR [--config.KEY=VALUE …]`.

What a step does is a function of (config, step): batch, augmentation, mixup and dropout all draw from
generators keyed by the seed and the step. A run that was stopped goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dcvit import build, chips, cli, distributed
from dcvit import config as configs
from dcvit.checkpoint import Checkpoints, saved_steps
from dcvit.config import ConfigError, check_call
from dcvit.flops import training_flops
from dcvit.metrics import MetricWriter
from dcvit.progress import RunProgress
from dcvit.sharding import local_rows, prefetch
from dcvit.step import TrainState, initial_state, jit_update, state_shapes
from dcvit.tasks import TrainingData
from input_pipeline import Source

SHARED_SECONDS = 20  # until what one process wrote is seen by all
# What may change between the stretches of one run: it does not touch what a step computes.
FREE_KEYS = ("mesh", "sharding_strategy", "evals", "pp_predict", "ckpt_keep", "tensorboard", "profile")


def claim_workdir(workdir: Path, config: ConfigDict, source: Source) -> None:
    """Makes the workdir and writes `config.json` and `data.json` there: number of examples and class names.

    Raises:
      ConfigError: the workdir holds a run of another config, the keys that differ are listed, or of other data.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to workdir {workdir}")
    path = workdir / "config.json"
    mine = json.loads(config.to_json())
    if path.is_file():
        theirs = configs.read_json(path).to_dict()
        differing = [
            f"{key} (there {theirs.get(key)!r}, here {mine.get(key)!r})"
            for key in sorted(theirs.keys() | mine.keys())
            if key not in FREE_KEYS and not key.startswith(("log_", "ckpt_")) and theirs.get(key) != mine.get(key)
        ]
        if differing:
            raise ConfigError(f"{workdir} holds a run of another config: {'; '.join(differing)}")
    data = {"examples": len(source), "class_names": source.class_names and list(source.class_names)}
    path = workdir / "data.json"
    if path.is_file() and (was := path.read_text()) != json.dumps(data) + "\n":
        here = json.dumps(data)[:60]
        raise ConfigError(f"{workdir} holds a run on other data: there {was[:60].strip()}…, here {here}…")
    for name, content in (("data.json", json.dumps(data)), ("config.json", json.dumps(mine, indent=2))):
        fresh = workdir / f"{name}.new"  # renamed into place: a kill leaves the old file or the new one
        fresh.write_text(content + "\n")
        fresh.replace(workdir / name)


def _check_shared(workdir: Path) -> None:
    """Raises ConfigError where this process does not see what the first one has written to the workdir."""
    for _ in range(SHARED_SECONDS):  # file systems of a network may remember for a while that there was nothing
        if (workdir / "config.json").is_file():
            return
        time.sleep(1)
    raise ConfigError(f"workdir {workdir} is not on a file system that all processes share")


def train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs a config to its end, or goes on where its newest checkpoint left off; returns the last row of metrics,
    empty where all steps were done already.

    Writes to `workdir`: config.json, data.json, metrics.jsonl, timing.jsonl, checkpoints/.

    Raises:
      ConfigError, InputError, CheckpointError: what a user can mend, before anything compiles.
    """
    mesh = build.mesh(config)
    build.model(config)  # a misspelt variant is said before the data is read
    data = TrainingData(config, mesh)
    config = data.config
    net = build.model(config)
    shapes = build.param_shapes(net, data.task.example)
    tx, schedule = build.optimiser(config, shapes, data)
    evaluators = build.evaluators(config, build.predictor(net), mesh, data)
    for example in {evaluator.example for evaluator in evaluators.values()} - {data.task.example}:
        build.param_shapes(net, example)  # rows may be longer than those of training, or too long
    every = {
        "log": data.duration(config, "log", "config", default=50),
        "ckpt": data.duration(config, "ckpt", "config", default=data.total_steps),
    }
    for name in evaluators:
        what = f"config.evals.{name}"
        every[f"evals.{name}"] = data.duration(config.evals[name], "log", what, default=data.total_steps)
    saved = saved_steps(workdir)
    sizes = {"examples": len(data.source), "steps": data.total_steps, "evaluations": list(evaluators)}
    distributed.agree({**json.loads(config.to_json()), **sizes, "saved steps": saved})
    given = _given_params(config, shapes, resumes=bool(saved))
    if distributed.is_first():
        claim_workdir(workdir, config, data.source)
    distributed.wait_for_all("the workdir is claimed")
    _check_shared(workdir)

    checkpoints = Checkpoints(workdir, keep=config.ckpt_keep)
    start = checkpoints.latest() or 0
    placed = state_shapes(config, net, tx, data.task.example, mesh)
    update = jit_update(net, data.task, tx, schedule, placed, mesh)
    writer = None
    if distributed.is_first():
        writer = MetricWriter(workdir, resume_step=start or None, tensorboard=config.tensorboard)
    evaluate = {name: evaluator.run for name, evaluator in evaluators.items()}
    peak = peak_examples(net, data.task.example, jax.devices())
    loop = Loop(config, workdir, data, mesh, writer, checkpoints, evaluate, every, peak)
    try:
        with jax.set_mesh(mesh):
            return loop.run(update, _start_state(config, net, tx, given, placed, data.task.example, checkpoints), start)
    finally:
        if sys.exception() is None or distributed.alone():  # other processes may not come to finish what is being saved
            checkpoints.close()
        if writer:
            writer.close()


def peak_examples(net: Any, example: jax.ShapeDtypeStruct, devices: Sequence[Any]) -> float | None:
    """Examples a second if the devices did nothing but the model's products at their peak: what model FLOPs utilisation
    is measured against. None on devices that are not in `dcvit.chips`."""
    chip, flops = chips.chip(devices[0].device_kind), training_flops(net, example)
    return chip.peak * len(devices) / flops if chip and flops else None


def _given_params(config: ConfigDict, shapes: Any, *, resumes: bool) -> Any:
    """The parameters of `config.model_init` in a tree like `shapes`, with None where none is to be loaded."""
    if resumes or not config.model_init:
        return jax.tree.map(lambda _: None, shapes)
    load = build.model_module(config).load
    options = config.model_load.to_dict()
    check_call(load, options, "config.model_load", args=(shapes, config.model_init, {}))
    loaded = load(shapes, config.model_init, config.model.to_dict(), **options)
    return jax.tree.map(lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, loaded)


def _start_state(
    config: ConfigDict,
    net: Any,
    tx: Any,
    given: Any,
    placed: TrainState,
    example: jax.ShapeDtypeStruct,
    checkpoints: Checkpoints,
) -> TrainState:
    """The newest checkpoint's state, or a fresh one with the arrays of `given` among its parameters; `placed` are its
    shapes and shardings."""

    def fresh(given: Any) -> TrainState:
        params = net.init(jax.random.key(config.seed), jnp.zeros(example.shape, example.dtype))["params"]
        params = jax.tree.map(lambda g, p: p if g is None else g, given, params, is_leaf=lambda leaf: leaf is None)
        return initial_state(config, params, tx)

    latest = checkpoints.latest()
    if latest is None:
        places = jax.tree.map(lambda s: s.sharding, placed)
        given = jax.tree.map(
            lambda g, place: None if g is None else jax.device_put(np.asarray(g), place),
            given, places.params, is_leaf=lambda leaf: leaf is None,
        )  # fmt: skip
        state: TrainState = jax.jit(fresh, out_shardings=places)(given)
        return state
    items = checkpoints.restore(latest, placed.items())
    return TrainState(params=items["params"], ema=items.get("ema"), **items["rest"])


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
class Loop:
    """The steps of one run, with what happens between them: logging, evaluation, checkpoints, profiling."""

    config: ConfigDict
    workdir: Path
    data: TrainingData
    mesh: Mesh
    writer: MetricWriter | None  # of the first process
    checkpoints: Checkpoints
    evaluate: dict[str, Callable[[Any], dict[str, float]]]
    every: dict[str, int | None]  # steps between "log", "ckpt" and each "evals.NAME"
    peak_examples: float | None = None  # that the devices' peak would learn from in a second, where it is known

    def run(self, update: Any, state: TrainState, start: int) -> dict[str, Any]:
        """All steps after `start`; returns the last row of metrics, empty where none was left."""
        total, row = self.data.total_steps, {}
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(RunProgress(self.workdir.name, total, start, self.data.task.rate))
            if start:
                progress.line(f"going on from the checkpoint of step {start} of {total}")
            else:
                row = self._first_row(state, progress)
            size = self.data.batch_size
            batches = stack.enter_context(contextlib.closing(self.data.batches(start, local_rows(self.mesh, size))))
            on_devices = prefetch(itertools.islice(batches, total - start), self.mesh, size)
            for step in range(start + 1, total + 1):
                self._profile(step, state, start)
                batch = next(on_devices)
                if step == start + 1:
                    progress.line("compiling the training step")
                    update = update.lower(state, batch).compile()
                    clock = StepClock()
                state, metrics = update(state, batch)
                clock.steps += 1
                progress.advance(step)
                evals = [name for name in self.evaluate if self._due(f"evals.{name}", step)]
                if evals or self._due("log", step):
                    row = self._row(step, state, metrics, evals, clock, progress)
                if self._due("ckpt", step):
                    jax.block_until_ready(state)  # the steps still under way are not part of the pause
                    with clock.paused():
                        self.checkpoints.save(step, state.items())
            if self.config.profile and start < total and self.config.profile[0] <= total <= self.config.profile[1]:
                self._stop_trace(state)
        return row

    def _due(self, name: str, step: int) -> bool:
        """Whether a step logs, saves or evaluates; the last one always evaluates."""
        every, last = self.every[name], step == self.data.total_steps
        if not every:
            return last and name.startswith("evals.")
        return last or step % every == 0

    def _row(
        self,
        step: int,
        state: TrainState,
        metrics: dict[str, jax.Array],
        evals: Sequence[str],
        clock: StepClock,
        progress: RunProgress,
    ) -> dict[str, Any]:
        """Records and shows a step's metrics, the evaluations due, and, where logging is due, the timing."""
        row: dict[str, Any] = {name: value.item() for name, value in metrics.items()}
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"step {step}: the loss is {row['loss']}; stopped, earlier checkpoints are kept")
        timing = {}
        if self._due("log", step):
            seconds = clock.lap()
            timing = {"step_seconds": seconds, "examples_per_second": self.data.batch_size / seconds}
            if self.peak_examples:
                timing["mfu"] = timing["examples_per_second"] / self.peak_examples
        with clock.paused():
            row |= self._evaluations(state, evals)
            if self.writer:
                self.writer.write(step, row, timing)
            progress.report(step, row, timing)
        return row

    def _evaluations(self, state: TrainState, names: Iterable[str]) -> dict[str, float]:
        return {f"{name}/{k}": v for name in names for k, v in self.evaluate[name](state.best).items()}

    def _first_row(self, state: TrainState, progress: RunProgress) -> dict[str, Any]:
        """Parameter count and every evaluation before the first step."""
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        progress.line(_overview(state.params) + f"{count:,} parameters, {self.data.total_steps} steps")
        row = {"num_params": count, **self._evaluations(state, self.evaluate)}
        if self.writer:
            self.writer.write(0, row)
        progress.report(0, row, {})
        return row

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


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit train", description="Train a model as a config says.")
    parser.add_argument("--config", required=True, help="config file or bare name, with :argument=value,…")
    parser.add_argument("--workdir", required=True, type=cli.path, help="folder for all that the run writes")
    distributed.add_options(parser)
    args, overrides = parser.parse(argv)
    config = configs.load(args.config, overrides)
    distributed.initialize(args)
    print(f"dcvit train: {args.config} on {jax.device_count()} {jax.default_backend()} device(s), to {args.workdir}")
    train(config, args.workdir)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
