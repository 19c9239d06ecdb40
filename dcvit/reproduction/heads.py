"""Leaderboard of cross-head attention: the names of `dcvit.models.head_settings` on small language models.

Every name is trained on embedded text, as `dcvit.reproduction.arms` describes, and on the generated tasks of
`configs/lm_synthetic.py`, in RUNS/NAME=synthetic/seedN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcvit.models import head_settings, lm
from dcvit.reproduction import arms, costs, seeded
from dcvit.reproduction.arms import Arm
from dcvit.reproduction.seeded import Train
from dcvit.reproduction.table9 import about, row
from dcvit.reproduction.tables import Cell, Chart, Table
from dcvit.training.seeds import summarize, workdir_of

KEY_HEADS = 4  # two heads share a key head, so that all names are possible
ARMS = {name: Arm({"heads": name, "num_key_heads": KEY_HEADS}) for name in head_settings.NAMES}
ACCURACY = "validation/accuracy"
TASK_STEPS = 2000  # of runs on generated tasks, for `arms.STEPS` steps of those on text
TASK_KEY_HEADS = 2  # of four heads
TASK_LR = 3e-3  # that of scripts/bench_synthetic.py
ESTIMATES = Path(__file__).parents[2] / "docs" / "tpu_heads.json"  # of scripts/tpu_step.py; not in a package


def train(runs: Path, seeds: Sequence[int], train: Train, steps: int) -> int:
    """Train all models on text and on generated tasks, and return the exit status of the first run that fails, or 0.

    Raises:
      ConfigError, MetricsError: see `dcvit.reproduction.seeded.run`.
    """
    if status := arms.train_arms(ARMS, runs, seeds, train, steps):
        return status
    for seed in seeds:
        for name in ARMS:
            spec, path = f"lm_synthetic:steps={task_steps(steps)}", workdir_of(task_folder(runs, name), seed)
            if status := seeded.run(train, spec, path, task_words(name, seed), ACCURACY):
                return status
    return 0


def task_steps(steps: int) -> int:
    """Return the steps of a run on generated tasks, in proportion to those of a run on text."""
    return max(1, round(steps * TASK_STEPS / arms.STEPS))


def task_folder(runs: Path, name: str) -> Path:
    """Return the folder of a name's runs on generated tasks."""
    return arms.folder_of(runs, f"{name}=synthetic")


def task_words(name: str, seed: int) -> list[str]:
    """Return the overrides of configs/lm_synthetic.py for a name."""
    fields = [f"model.heads={name}", f"model.num_key_heads={TASK_KEY_HEADS}"]
    return [*fields, f"lr={TASK_LR}", f"seed={seed}", "tensorboard=False", "evals.validation.log_percent=100"]


def table(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of complete runs.

    Raises:
      ConfigError: a run is not complete, or the runs of a name differ in more than their seed.
    """
    found = arms.compare(ARMS, runs, seeds, steps)
    folders = {name: task_folder(runs, name) for name in ARMS}
    values = seeded.all_finals(runs, folders, seeds, ACCURACY)
    accuracies = summarize({seed: {name: 100 * value for name, value in each.items()} for seed, each in values.items()})
    rows, seconds = [], tpu_seconds(ESTIMATES)
    for (name, arm), accuracy in zip(ARMS.items(), accuracies, strict=True):
        net = model_of(arm)
        more: dict[str, Cell] = {
            "MFLOP per token": costs.forward_operations(net, arms.CONTEXT) / arms.CONTEXT / 1e6,
            "cache per token": costs.cache_per_token(net, arms.CONTEXT),
            "flash": "yes" if is_flash(net) else "no",
            "405M on TPU v5e, s": seconds.get(name),
            "accuracy on tasks %": accuracy["mean"],
            "accuracy on tasks ± 95 %": accuracy["± 95 %"],
        }
        rows.append(row(name, found, more))
    tasks = (
        f"The accuracy on tasks is that of other models, trained by configs/lm_synthetic.py for {task_steps(steps)} "
        "steps on the generated tasks of docs/composed_tasks.md, and evaluated on their validation split. They have "
        f"four heads and two key heads, and the learning rate is {TASK_LR} for all."
    )
    tpu = (
        "The column of the TPU is the compiler's estimate of a training step of a model of 405M parameters, with 16 "
        "heads and 8 key heads, on a slice v5e:4x4 (docs/tpu_heads.json, by scripts/tpu_step.py). There is none of "
        "`diff`, whose layers differ and cannot be scanned."
    )
    notes = (about(found, steps), tasks, *([tpu] if seconds else []))
    return Table("heads", "Leaderboard of cross-head attention", rows, notes,
                 Chart("config", "bits per byte", "± 95 %"))  # fmt: skip


def tpu_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of a training step on TPUs by name, from a file of scripts/tpu_step.py, if it exists."""
    if not path.is_file():
        return {}
    estimates: Sequence[Mapping[str, object]] = json.loads(path.read_text())
    found = {}
    for each in estimates:
        if name := re.search(r"model[.]heads=(\w+)", str(each["config"])):
            found[name[1]] = float(str(each["seconds"]))
    return found


def model_of(arm: Arm) -> lm.LM:
    """Return the model of an arm."""
    return arms.model_of({**arms.MODEL, **arm.fields})


def is_flash(net: lm.LM) -> bool:
    """Return True if any fused plain attention computes the scores and weights of a model."""
    if net.heads is not None:
        return net.heads != "diff"
    return net.compose is None or net.composition().foldable(net.num_key_heads or net.num_heads)
