"""Training: `python -m dcvit.train --config CONFIG[:argument=value,…] --workdir DIR [--config.KEY=VALUE …]`.

What a step does is a function of (config, step): batch, augmentation, mixup and dropout all draw from
generators keyed by the seed and the step. A run that was stopped, in whatever way, goes on from its newest checkpoint
when the same command is given again, to the same bits.

Exit status: 0 done; 2 an error that the one line on stderr explains; 75 stopped by SIGTERM, all saved; 124 the watchdog
ended it; 130 Ctrl-C; 143 a second SIGTERM; 1 a bug, or another process of the run failed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from dcvit import cli
from dcvit import config as configs
from dcvit.checkpoint.checkpointer import Checkpointer, saved_steps
from dcvit.checkpoint.files import Folder
from dcvit.errors import ConfigError, check_call, nearest
from dcvit.models.flops import training_flops
from dcvit.parallel import multihost, topologies
from dcvit.runs import metrics
from dcvit.runs import workdir as folders
from dcvit.runs.lock import WorkdirLock
from dcvit.runs.preemption import Preemption
from dcvit.runs.watchdog import Watchdog
from dcvit.training import setup
from dcvit.training.step import TrainState, initial_state, jit_update, state_shapes
from dcvit.training.tasks import TrainingData
from dcvit.training.trainer import Loop


def train(
    config: ConfigDict, workdir: Folder, accept: Sequence[str] = (), preemption: Preemption | None = None
) -> dict[str, Any]:
    """Runs a config to its end, or goes on where its newest checkpoint left off; returns the last row of metrics,
    empty where all steps were done already.

    Writes to `workdir`: config.json, data.json, metrics.jsonl, timing.jsonl, checkpoints/.

    Args:
      config: of `dcvit.config.load`.
      workdir: the run's folder.
      accept: keys of the config, or "data", that may differ from those of the run that the workdir holds.
      preemption: what listens to signals, if anything does.

    Raises:
      ConfigError, InputError, CheckpointError: what a user can mend, before anything compiles.
      CheckpointError, MetricsError: what could not be saved.
      FloatingPointError: the run diverged.
    """
    folders.check_accepted(accept)
    mesh = setup.mesh(config)
    setup.model(config)  # a misspelt variant is said before the data is read
    data = TrainingData(config, mesh)
    config = data.config
    net = setup.model(config)
    shapes = setup.param_shapes(net, data.task.example)
    tx, schedule = setup.optimiser(config, shapes, data)
    evaluators = setup.evaluators(config, setup.predictor(net), mesh, data)
    _check_best(config, evaluators)
    for example in {evaluator.example for evaluator in evaluators.values()} - {data.task.example}:
        setup.param_shapes(net, example)  # rows may be longer than those of training, or too long
    every = _durations(config, data, evaluators)
    keep_every = data.duration(config, "keep_ckpt", "config", default=None)
    _check_profile(config, workdir, data.total_steps)
    known = folders.data_identity(data.source)
    saved = saved_steps(workdir)
    sizes = {"data": known, "steps": data.total_steps, "evaluations": list(evaluators)}
    multihost.agree({**json.loads(config.to_json()), **sizes, "saved steps": saved})
    given = _given_params(config, shapes, resumes=bool(saved))
    with contextlib.ExitStack() as stack:
        held = folders.existing(workdir) if folders.has_started(workdir, saved) else {}
        changed = folders.check_same_run(workdir, held, config, known, accept)
        if multihost.is_first():
            stack.enter_context(WorkdirLock(workdir))
        multihost.wait_for_all("the workdir is ours")
        checkpoints = Checkpointer(workdir, keep=config.ckpt_keep, keep_every=keep_every)
        start = checkpoints.latest(config.on_corrupt) or 0
        if start > data.total_steps:
            raise ConfigError(f"{workdir} is at step {start}, beyond the {data.total_steps} steps of this config")
        resumed = checkpoints.about(start) if start else {}
        lost = {key: value for key, value in resumed.items() if key in ("config", "data") and key not in held}
        changed += folders.check_same_run(workdir, lost, config, known, accept)
        placed = state_shapes(config, net, tx, data.task.example, mesh)
        if start:
            checkpoints.check_compatible(start, placed.items())
        for name in metrics.FILES:
            metrics.read(workdir / name)  # what is damaged is said before anything is written
        about = {
            "config": json.loads(config.to_json()),
            "data": known,
            "software": folders.software(),
            "devices": folders.devices(),
        }
        for line in [*(f"accepted: {line}" for line in changed), *folders.resume_warnings(resumed, about)]:
            if multihost.is_first():
                print(line, file=sys.stderr)
        if multihost.is_first():
            folders.record(workdir, config, known)
        multihost.wait_for_all("the workdir is claimed")
        folders.check_shared(workdir)
        update = jit_update(net, data.task, tx, schedule, placed, mesh)
        writer = None
        if multihost.is_first():
            writer = metrics.MetricWriter(workdir, resume_step=start or None, tensorboard=config.tensorboard)
            stack.callback(writer.close)
        evaluate = {name: evaluator.run for name, evaluator in evaluators.items()}
        watchdog = Watchdog(workdir, config.watchdog_seconds, exit_on_stall=config.watchdog_exit)
        stack.callback(watchdog.close)
        peak = peak_examples(net, data.task.example, jax.devices())
        loop = Loop(config, workdir, data, mesh, writer, checkpoints, evaluate, every, watchdog, about, peak)
        preemption = preemption or Preemption()  # one that listens to nothing
        with jax.set_mesh(mesh), preemption.saving(checkpoints.finish):
            try:
                with preemption.saving(loop.stop, loop.end):
                    state = _start_state(config, net, tx, given, placed, data.task.example, checkpoints, start)
                    row = loop.run(lambda *args: update.lower(*args).compile(), state, start, resumed)
            finally:
                if sys.exception() is None or multihost.is_single_process():  # others may not come to finish a save
                    watchdog("finishing the last checkpoint")
                    checkpoints.close()
        multihost.gather("ended", True)
    return row


def _durations(config: ConfigDict, data: TrainingData, evaluators: Any) -> dict[str, int | None]:
    """The steps between "log", "ckpt" and each "evals.NAME"."""
    every = {
        "log": data.duration(config, "log", "config", default=50),
        "ckpt": data.duration(config, "ckpt", "config", default=data.total_steps),
    }
    for name in evaluators:
        what = f"config.evals.{name}"
        every[f"evals.{name}"] = data.duration(config.evals[name], "log", what, default=data.total_steps)
    return every


def _check_best(config: ConfigDict, evaluators: Any) -> None:
    """Raises ConfigError where `config.ckpt_best` names a metric that no evaluation yields."""
    known = [f"{name}/{metric}" for name, evaluator in evaluators.items() for metric in evaluator.metrics]
    if config.ckpt_best and (metric := config.ckpt_best[0]) not in known:
        raise ConfigError(f"config.ckpt_best: no evaluation yields {metric!r}; {nearest(metric, known)}")


def _check_profile(config: ConfigDict, workdir: Folder, total_steps: int) -> None:
    """Raises ConfigError where a run is to trace steps that it has not, or to write a trace to a store."""
    if config.profile and config.profile[0] > total_steps:
        raise ConfigError(f"config.profile={tuple(config.profile)}: the run has {total_steps} steps")
    if not isinstance(workdir, Path) and config.profile:
        raise ConfigError(f"config.profile: a trace needs a folder of a disk, and --workdir is {workdir}")


def peak_examples(net: Any, example: jax.ShapeDtypeStruct, devices: Sequence[Any]) -> float | None:
    """Examples a second if the devices did nothing but the model's products at their peak: what model FLOPs utilisation
    is measured against. None on devices that are not in `dcvit.parallel.topologies`."""
    chip, flops = topologies.chip(devices[0].device_kind), training_flops(net, example)
    return chip.peak * len(devices) / flops if chip and flops else None


def _given_params(config: ConfigDict, shapes: Any, *, resumes: bool) -> Any:
    """The parameters of `config.model_init` in a tree like `shapes`, with None where none is to be loaded."""
    if resumes or not config.model_init:
        return jax.tree.map(lambda _: None, shapes)
    load = setup.model_module(config).load
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
    checkpoints: Checkpointer,
    start: int,
) -> TrainState:
    """The state that the checkpoint of step `start` holds, or a fresh one with the arrays of `given` among its
    parameters; `placed` are its shapes and shardings."""

    def fresh(given: Any) -> TrainState:
        params = net.init(jax.random.key(config.seed), jnp.zeros(example.shape, example.dtype))["params"]
        params = jax.tree.map(lambda g, p: p if g is None else g, given, params, is_leaf=lambda leaf: leaf is None)
        return initial_state(config, params, tx)

    if not start:
        places = jax.tree.map(lambda s: s.sharding, placed)
        given = jax.tree.map(
            lambda g, place: None if g is None else jax.device_put(np.asarray(g), place),
            given, places.params, is_leaf=lambda leaf: leaf is None,
        )  # fmt: skip
        state: TrainState = jax.jit(fresh, out_shardings=places)(given)
        return state
    items = checkpoints.restore(start, placed.items())
    return TrainState(params=items["params"], ema=items.get("ema"), **items["rest"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = cli.Parser(prog="dcvit train", description="Train a model as a config says.")
    parser.add_argument("--config", required=True, help="config file or bare name, with :argument=value,…")
    parser.add_argument(
        "--workdir", required=True, type=cli.folder, help="folder, or gs:// URL, for all that the run writes"
    )
    parser.add_argument(
        "--accept", metavar="KEY", action="append", default=[],
        help="go on with a run of the workdir although this key of the config, or `data`, differs; may be repeated",
    )  # fmt: skip
    multihost.add_options(parser)
    args, overrides = parser.parse(argv)
    config = configs.load(args.config, overrides)
    multihost.initialize(args)
    with Preemption() as preemption:
        print(
            f"dcvit train: {args.config} on {jax.device_count()} {jax.default_backend()} device(s), to {args.workdir}"
        )
        train(config, args.workdir, args.accept, preemption)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
