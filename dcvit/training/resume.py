"""Start of a run in its workdir: checks, locks and claims it, and finds the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dcvit.dcmha.plan import Selection
from dcvit.errors import CheckpointError, ConfigError
from dcvit.hub.open import TOKENIZER
from dcvit.hub.source import find
from dcvit.models import Params
from dcvit.parallel import multihost
from dcvit.runs import identity, metrics, restoring, steps, workdir
from dcvit.runs.checkpointer import Checkpointer
from dcvit.runs.files import Folder, check_name, replace
from dcvit.runs.progress import RunProgress, stage
from dcvit.runs.stop import Watchdog
from dcvit.runs.workdir import WorkdirLock
from dcvit.training import kernels
from dcvit.training.distillation import TEACHER
from dcvit.training.initialize import initialize
from dcvit.training.setup import Setup
from dcvit.training.step import TrainState, init_params, initial_state, state_shapes
from dcvit.weights.placement import place_params

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Start:
    """The step and the parameters that a run starts from.

    Fields:
      step: the step to resume from, 0 for a new run, also from a converted model.
      about: the description stored in the checkpoint to resume from; empty without a checkpoint.
      shapes: shapes and shardings of the state.
      loaded: the parameters that a new run has loaded; None for each parameter that is to be initialized. `start_state`
        donates their memory to the state.
      teacher: the parameters of the teacher that the training state holds; None without one.
    """

    step: int
    about: Mapping[str, Any]
    shapes: TrainState
    loaded: Params
    teacher: Params | None = None


@dataclasses.dataclass
class Run:
    """An opened training run: its setup, its workdir, its start, and the objects that the hooks write to."""

    setup: Setup
    workdir: Folder
    start: Start
    about: Mapping[str, Any]  # description of the run, part of every checkpoint
    selection: Selection
    checkpointer: Checkpointer
    watchdog: Watchdog
    display: RunProgress
    writer: metrics.MetricWriter | None  # None in all processes but the first
    lock: WorkdirLock | None  # the same, and None for a workdir in an object store
    claim: Callable[[], None]  # writes what identifies the run to the workdir
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.started -= self.start.about.get("seconds", 0)

    def flush(self) -> None:
        """Write all metrics to the disk or the object store, and return when they are there.

        Raises:
          ConfigError, MetricsError: the workdir or its files were removed or replaced during the run.
        """
        if self.lock:
            self.lock.check()
        if self.writer:
            self.writer.flush()

    @property
    def seconds(self) -> float:
        """Wall time of the run in seconds, including that before it was resumed."""
        return time.perf_counter() - self.started


@contextlib.contextmanager
def open_run(setup: Setup, folder: Folder, accept: Sequence[str] = ()) -> Iterator[Run]:
    """Yield the `Run` of a workdir, new or to resume; a local workdir is locked until the context ends.

    Everything that can be invalid is checked before the first file is written.

    Args:
      setup: the run.
      folder: the workdir.
      accept: config keys, or "data", that may differ from those of the run in the workdir.

    Raises:
      ConfigError: the workdir is in use, cannot be written, or holds another run.
      CheckpointError: the checkpoint to resume from is damaged or does not fit the model.
    """
    config, plan = setup.config, setup.plan
    identity.check_accepted(accept)
    check_name(folder)
    if config.profile and not isinstance(folder, Path):
        raise ConfigError(f"config.profile: a trace needs a local folder, and --workdir is {folder}")
    data = identity.data_identity(setup.data.source)
    files = ("config.json",) if setup.tokenizer is None else ("config.json", TOKENIZER)
    identified = all((folder / name).is_file() for name in files)
    about = {"config": setup.record, "data": data, "software": identity.software(), "devices": identity.devices()}
    start = _fresh_start(setup, folder, data)
    if setup.task.distillation:
        about[TEACHER] = setup.task.distillation.identity()
    accepted = _accepted_differences(folder, about, accept)
    with contextlib.ExitStack() as stack:
        lock = writer = None
        if multihost.is_first() and isinstance(folder, Path):
            lock = stack.enter_context(WorkdirLock(folder))
        multihost.wait_for_all("workdir locked")
        checkpointer = Checkpointer(folder, keep=config.ckpt_keep, keep_every=plan.intervals.keep_ckpt)
        start = _latest_start(setup, folder, start)
        names = sorted({*accept, *workdir.accepted(folder)})
        if start.about:
            name = checkpointer.folder / str(start.step)
            accepted += identity.check_same_run(name, start.about, setup.record, data, names)
        if start.step and not {"distill", "distill.teacher"} & {*accept}:
            _check_same_teacher(start.about.get(TEACHER, {}), about.get(TEACHER, {}))
        changes = [f"from step {start.step + 1}: {line}" for line in dict.fromkeys(accepted)]
        for line in [f"accepted {change}" for change in changes] + identity.resume_warnings(start.about, about):
            if multihost.is_first():
                LOG.warning(line)
        claim = functools.partial(_claim, setup, folder, data, names, changes)
        if not (start.step and identified):  # else the trainer claims it before a step: a complete run stays as it is
            claim()
        if multihost.is_first():
            trackers = setup.trackers
            writer = metrics.MetricWriter(folder, resumed=start.about, trackers=trackers, config=setup.record)
            stack.callback(writer.close)
        watchdog = Watchdog(config.watchdog_seconds)
        stack.callback(watchdog.close)
        display = stack.enter_context(RunProgress(plan.total_steps, start.step, setup.task.rate))
        selection = kernels.select(config.kernels, start.about)
        about |= {"kernels": kernels.record(selection)}
        yield Run(setup, folder, start, about, selection, checkpointer, watchdog, display, writer, lock, claim)


def start_state(run: Run) -> TrainState:
    """Return the state that a run starts from: restored from its checkpoint, or new with the loaded parameters.

    Raises:
      CheckpointError: the checkpoint cannot be restored, or is of another step.
    """
    start, setup = run.start, run.setup
    if start.step:
        return _restored(run).replace(teacher=start.teacher)

    def missing(seed_words: jax.Array) -> Params:
        return init_params(setup, jax.random.wrap_key_data(seed_words))

    shapes = start.shapes.replace(teacher=None)
    wanted = jax.tree.map(lambda s, x: s.sharding if x is None else None, shapes.params, start.loaded)
    # An argument: all seeds share the programs.
    words = np.asarray(jax.random.key_data(jax.random.key(setup.config.seed)))
    with stage("initializing the parameters", run.display.line):
        params = jax.tree.map(
            lambda x, p: p if x is None else x, start.loaded, initialize(missing, words, wanted),
            is_leaf=lambda x: x is None,
        )  # fmt: skip
        places = jax.tree.map(lambda s: s.sharding, shapes)
        first = jax.jit(functools.partial(initial_state, setup), donate_argnums=0, out_shardings=places)
        state: TrainState = first(params)
    return state.replace(teacher=start.teacher)


def _restored(run: Run) -> TrainState:
    """Return the state from the checkpoint that a run resumes from."""
    start = run.start
    checkpoint = run.checkpointer.folder / str(start.step)
    with stage(f"restoring {checkpoint}", run.display.line, announce=False):
        items = restoring.restore(checkpoint, start.shapes.items())
    if (step := int(items["rest"]["step"])) != start.step:
        raise CheckpointError(f"{checkpoint} holds the state of step {step}")
    return TrainState(params=items["params"], ema=items.get("ema"), **items["rest"])


def _fresh_start(setup: Setup, folder: Folder, data: identity.Record) -> Start:
    """Return the start of a new run, after checking that all processes have the same run; nothing is written.

    Parameters are loaded only if the workdir has no checkpoint to resume from.
    """
    saved = steps.saved_steps(folder)
    sizes = {"data": data, "steps": setup.plan.total_steps, "evaluations": list(setup.evaluators)}
    multihost.agree({**setup.record, **sizes, "saved steps": saved})
    shapes = state_shapes(setup)
    loaded = jax.tree.map(lambda _: None, shapes.params)
    if setup.model.load_initial and not saved:
        loaded = setup.model.load_initial(shapes.params)
    teacher = None
    if setup.task.distillation:
        teacher = setup.task.distillation.load(setup.model.mesh, setup.model.strategy)
    return Start(0, {}, shapes, loaded, teacher)


def _check_same_teacher(before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise CheckpointError, with a name, if the checksums of a teacher differ from those when the run started."""
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise CheckpointError(f"config.distill.teacher has another {changed[0]} than when the run started")


def _accepted_differences(folder: Folder, about: Mapping[str, Any], accept: Sequence[str]) -> list[str]:
    """Return the accepted differences from the run in a workdir; raise ConfigError for others, or damaged metrics."""
    rows, _ = [metrics.read(folder / name) for name in metrics.FILES]
    has_started = steps.saved_steps(folder) or any(row["step"] for row in rows)
    existing = workdir.existing(folder) if has_started else {}
    return identity.check_same_run(folder, existing, about["config"], about["data"], accept)


def _claim(setup: Setup, folder: Folder, data: identity.Record, accept: Sequence[str], changes: Sequence[str]) -> None:
    """Write config.json and other files that identify the run, in the first process; the other processes wait."""
    if multihost.is_first():
        workdir.record(folder, setup.record, data, accept, changes)
        if setup.tokenizer is not None:
            replace(folder / TOKENIZER, setup.tokenizer)
    multihost.wait_for_all("workdir claimed")
    workdir.check_shared(folder)


def _latest_start(setup: Setup, folder: Folder, fresh: Start) -> Start:
    """Return the start from the latest checkpoint; `fresh` if there is none.

    The checkpoint of step 0 holds the parameters of a converted model, from which a new run starts.
    """
    step = restoring.latest(folder)
    if step is None:
        return fresh
    if step > setup.plan.total_steps:
        raise ConfigError(f"{folder} is at step {step}, beyond the {setup.plan.total_steps} steps of this config")
    checkpoint = folder / steps.FOLDER / str(step)
    if step == steps.CONVERTED:
        LOG.info("training starts from the converted model in %s", checkpoint)
        loaded = place_params(find(checkpoint).params, fresh.shapes.params, str(checkpoint))
        return dataclasses.replace(fresh, about=steps.about(checkpoint), loaded=loaded)
    restoring.check_compatible(checkpoint, fresh.shapes.items())
    return dataclasses.replace(fresh, step=step, about=steps.about(checkpoint))
