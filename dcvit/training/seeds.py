"""Training of one config with several seeds, one run after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dcvit.errors import EXPECTED, ConfigError
from dcvit.parallel import multihost
from dcvit.process import say
from dcvit.runs import stop
from dcvit.runs.files import Folder
from dcvit.runs.seeds import final_metrics, workdir_of
from dcvit.runs.stop import StopSignals
from dcvit.training.loop import train
from dcvit.training.setup import Setup


def train_seeds(
    makers: Mapping[int, Callable[[], Setup]],
    folder: Folder,
    accept: Sequence[str],
    signals: StopSignals,
) -> dict[int, dict[str, float]]:
    """Train one run per seed in FOLDER/seedN, and return the final metrics of the seeds that did not fail.

    A seed that fails is reported on stderr, and the others are still trained.

    Args:
      makers: by seed, a function that returns its setup.
      folder: the folder of the workdirs.
      accept: see `dcvit.training.loop.train`.
      signals: the stop signals; one that arrives while a seed is completed starts no other seed.

    Raises:
      ConfigError: this is a run of several processes, or the folder is the workdir of a run.
      ConfigError, InputError: the config or the data is invalid, which concerns every seed.
    """
    if not multihost.is_single_process():
        raise ConfigError("--seeds needs a run of one process; start one run of several processes per seed")
    if (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds a run; --seeds needs a folder for the workdirs of its runs")
    results, is_first = {}, True
    for seed, make in makers.items():
        if signals.received:
            signals.end(f"seed {seed} has not started")
        workdir, setup = workdir_of(folder, seed), None
        say(f"seed {seed}, to {workdir}")
        try:
            setup = make()
            train(setup, workdir, accept, signals)
            results[seed] = final_metrics(workdir)
        except EXPECTED as e:
            if setup is None and is_first:
                raise
            stop.say(f"error: seed {seed}: {e}")
        is_first = False
    return results
