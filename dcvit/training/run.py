"""Training as a call in Python, and the run that it returns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from dcvit.config import load as configs
from dcvit.errors import ConfigError
from dcvit.inference import model
from dcvit.inference.images import ImageModel
from dcvit.inference.texts import LanguageModel
from dcvit.parallel import runtime
from dcvit.parallel.trees import flattened
from dcvit.runs import metrics, steps
from dcvit.runs.files import Folder, folder
from dcvit.runs.seeds import check_no_runs
from dcvit.training import loop
from dcvit.training.setup import make_setup
from input_pipeline.optional import require_extra


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A training run, returned by `train`: its metrics, checkpoints and model, in the folder `workdir`."""

    workdir: Folder

    @property
    def metrics(self) -> list[dict[str, float | None]]:
        """The rows of metrics.jsonl: step, loss, learning rate and the results of evaluations."""
        return [dict(row) for row in metrics.read(self.workdir / "metrics.jsonl")]

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the saved checkpoints."""
        return steps.saved_steps(self.workdir)

    def load(self) -> ImageModel | LanguageModel:
        """Load the model of the latest checkpoint; see `dcvit.load`."""
        return model.load(str(self.workdir))  # type: ignore[return-value]


def train(
    config: str,
    workdir: str | os.PathLike[str],
    *,
    accept: Sequence[str] = (),
    on_row: Callable[[int, Mapping[str, float]], object] | None = None,
    **overrides: object,
) -> TrainingRun:
    """Train a model as `dcvit train` does, in this process; the same call resumes an interrupted run.

    Ctrl-C raises KeyboardInterrupt, and the steps since the last checkpoint are lost.

    Args:
      config: "NAME[:argument=value,…]", a config file or the name of a shipped config.
      workdir: the folder of the run.
      accept: config keys, or "data", that may differ from those of the run that the workdir holds.
      on_row: called with the step and the metrics of each new row of metrics.jsonl, such as {"loss": 0.3, "test/top1":
        0.9}; a metric that is not finite is NaN or infinite, where the file has null. An exception that it raises ends
        training and reaches the caller, for example to stop a run early; the same call resumes the run from its latest
        checkpoint, and passes the rows that follow.
      **overrides: keys of the config, such as `lr=0.01, model={"depth": 2}`. A mapping sets the keys in it; a string is
        parsed as on the command line, such as `evals="{}"` to replace all evaluators.

    Raises:
      ConfigError, InputError, CheckpointError: invalid input, before anything compiles.
      CheckpointError, MetricsError: saving failed.
      FloatingPointError: the run diverged.
    """
    require_extra("train")
    try:
        path = folder(str(workdir))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    check_no_runs(path)
    runtime.skip_absent_tpu()
    words = [f"{key}={value}" for key, value in flattened(overrides).items()]
    setup = make_setup(configs.load(config, words, [path]), workdir=path)
    loop.train(setup, path, accept, on_row=on_row)
    return TrainingRun(path)
