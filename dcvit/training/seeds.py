"""Training of one config with several seeds, or on several folds, one run after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dcvit.config.values import fold_evaluator, read_json
from dcvit.errors import EXPECTED, ConfigError
from dcvit.parallel import multihost
from dcvit.process import say
from dcvit.runs import stop
from dcvit.runs.files import Folder
from dcvit.runs.seeds import final_metrics, run_folders, workdir_of
from dcvit.runs.stop import StopSignals
from dcvit.training.loop import train
from dcvit.training.setup import Setup


def train_runs(
    kind: str,
    makers: Mapping[int, Callable[[], Setup]],
    folder: Folder,
    accept: Sequence[str],
    signals: StopSignals,
) -> dict[str, dict[str, float]]:
    """Train one run per seed in FOLDER/seedN, or per fold in FOLDER/foldN; return the final metrics of those completed.

    The metrics are by names such as "seed 3", or "fold 1 (123)" with the number of examples held out. A run that fails
    is reported on stderr, and the others are still trained.

    Args:
      kind: "seed" or "fold".
      makers: by seed or fold, a function that returns its setup.
      folder: the folder of the workdirs.
      accept: see `dcvit.training.loop.train`.
      signals: the stop signals; one that arrives while a run is completed starts no other run.

    Raises:
      ConfigError: this is a run of several processes, or the folder is the workdir of a run.
      ConfigError, InputError: the config or the data is invalid, which concerns every run.
    """
    if not multihost.is_single_process():
        raise ConfigError(f"--{kind}s needs a run of one process; start one run of several processes per {kind}")
    if (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds a run; --{kind}s needs a folder for the workdirs of its runs")
    _check_same_kind(folder, kind, len(makers))
    results, is_first = {}, True
    for number, make in makers.items():
        name, workdir, setup = f"{kind} {number}", workdir_of(folder, number, kind), None
        if signals.received:
            signals.end(f"{name} has not started")
        say(f"{name}, to {workdir}")
        try:
            setup = make()
            label = name if kind == "seed" else f"{name} ({_held_out(setup)})"
            train(setup, workdir, accept, signals)
            results[label] = final_metrics(workdir)
        except EXPECTED as e:
            if setup is None and is_first:
                raise
            stop.say(f"error: {name}: {e}")
        is_first = False
    return results


def _check_same_kind(folder: Folder, kind: str, count: int) -> None:
    """Raise ConfigError if the folder holds runs of the other kind, or folds of another number than `count`."""
    for held in run_folders(folder):
        part = str(read_json(held / "config.json").input.data.get("part"))
        if not held.name.startswith(kind) or (kind == "fold" and not part.endswith(f" of {count}")):
            what = f"{kind}s" if kind == "seed" else f"{count} folds"
            raise ConfigError(f"{held} is not one of {what} ({part=}); give them a folder of their own")


def _held_out(setup: Setup) -> str:
    """Return the number of examples in the fold that a run holds out, after printing it beside that of the others."""
    evaluator = fold_evaluator(setup.config)
    size = f"{len(setup.evaluators[evaluator].data.source):,}"
    say(f"{len(setup.data.source):,} examples train, {size} are held out for config.evals.{evaluator}")
    return size
