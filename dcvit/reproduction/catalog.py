"""Every table and figure of the paper, with what each scale computes, and the functions that do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dcvit.errors import ConfigError, nearest
from dcvit.reproduction import (
    arms,
    case_study,
    diversity,
    full,
    heads,
    in_context,
    key_heads,
    scaling,
    table2,
    table4,
    table6,
    table8,
    table9,
    table10,
    tables,
)
from dcvit.reproduction.seeded import Train
from dcvit.reproduction.tables import Table

NOTHING = "nothing to compute"
SCALES = ("desk", "full")


class Trained(NamedTuple):
    """A desk computation that trains models first: with a folder of runs, seeds, `dcvit train`, and steps."""

    train: Callable[[Path, Sequence[int], Train, int], int]
    table: Callable[[Path, Sequence[int], int], Table]
    steps: int  # by default
    runs: str  # name of the folder of runs, which entries may share


STATIC: dict[str, Callable[[], Table]] = {
    "table2": table2.table, "table6": table6.table, "table10": table10.table, "table11": in_context.table11,
    "table7": table8.table7,
}  # fmt: skip
TRAINED = {
    "table4": Trained(table4.train, table4.table, scaling.STEPS, "figure4"),  # the largest models of figure4
    "table8": Trained(table8.train, table8.table8, table8.STEPS, "table8"),
    "table9": Trained(functools.partial(arms.train_arms, table9.ARMS), table9.table, arms.STEPS, "table9"),
    "heads": Trained(heads.train, heads.table, arms.STEPS, "heads"),
    "key_heads": Trained(key_heads.train, key_heads.table, arms.STEPS, "key_heads"),
    "table5": Trained(in_context.train, in_context.table5, in_context.STEPS, "in_context"),
    "figure5": Trained(in_context.train, diversity.figure5, in_context.STEPS, "in_context"),
    "figure6": Trained(in_context.train, in_context.figure6, in_context.STEPS, "in_context"),
    "figure7": Trained(in_context.train, case_study.figure7, in_context.STEPS, "in_context"),
    "figure8": Trained(in_context.train, case_study.figure8, in_context.STEPS, "in_context"),
} | {
    name: Trained(functools.partial(scaling.train, name), functools.partial(scaling.table, name), scaling.STEPS, name)
    for name in scaling.FIGURES
}


class Entry(NamedTuple):
    """A table or figure. `desk` and `full` say what is computed, or `NOTHING`."""

    title: str
    desk: str
    full: str = NOTHING


COMMANDS = "commands, slices and hours of the runs"
CASE = "an answer of the models of table5"
SCALED, GENERATED = "4 small language models", "2 small language models on generated tasks"
ENTRIES = {
    "table1": Entry("comparison of head composition approaches", NOTHING),
    "table2": Entry("ratios of extra parameters and computation", "by formula, and counted in models and programs"),
    "table3": Entry("model sizes of the scaling experiments", NOTHING, "the runs of figure3"),
    "table4": Entry("downstream tasks of Pythia and DCPythia", "2 models of figure4 on local tasks", COMMANDS),
    "table5": Entry("synthetic dataset", GENERATED, "the models of table4"),
    "table6": Entry("training and inference speed", "bounds by FLOPs and cache, and speed of small models", COMMANDS),
    "table7": Entry("ViT architectures", "parameters and FLOPs, counted", "the runs of table8"),
    "table8": Entry("ImageNet-1k accuracy", "ViT and DCViT on digits and scenes, trained twice per seed", COMMANDS),
    "table9": Entry("ablations of DCMHA's components", "12 small language models, trained twice per seed", COMMANDS),
    "table10": Entry("local:global attention and query-wise composition", "FLOPs and cache", COMMANDS),
    "table11": Entry("examples of the synthetic dataset", "examples of the generated tasks"),
    "figure1": Entry("prototypical composition maps", NOTHING),
    "figure2": Entry("illustration of DCMHA", NOTHING),
    "figure3": Entry("scaling curves of Transformers and DCFormers", f"4 families of {SCALED}", COMMANDS),
    "figure4": Entry("scaling curves of Pythia and DCPythia", f"2 families of {SCALED}", COMMANDS),
    "figure5": Entry("captured variance of QK and OV heads", "the models of table5", "the models of table4"),
    "figure6": Entry("few-shot evaluation on the synthetic dataset", GENERATED, "the models of table4"),
    "figure7": Entry("composition of weights in a case study", CASE, "the models of table4"),
    "figure8": Entry("attention distributions in the case study", CASE, "the models of table4"),
    "heads": Entry(
        "leaderboard of cross-head attention, not in the paper",
        "11 small language models, trained twice per seed, and on generated tasks",
    ),
    "key_heads": Entry(
        "composition with grouped queries, not in the paper",
        "11 small language models, trained twice per seed, and 4 ViTs on digits",
    ),
}  # fmt: skip


def listing() -> list[str]:
    """Return lines with the entries and what each scale computes."""
    lines, width = [], max(map(len, ENTRIES)) + 2
    for name, entry in ENTRIES.items():
        lines += [f"{name:{width}}{entry.title}", f"  desk   {entry.desk}", f"  full   {entry.full}"]
    return lines


def check(name: str, scale: str) -> None:
    """Raise ConfigError if an entry is unknown or has no computation at a scale."""
    if name not in ENTRIES:
        raise ConfigError(f"unknown table or figure {name!r}; {nearest(name, ENTRIES)}")
    known = full.RUNS if scale == "full" else {*STATIC, *TRAINED}
    if name not in known:
        raise ConfigError(f"{name} at scale {scale}: {getattr(ENTRIES[name], scale)}; see --list")


def reproduce(
    name: str, scale: str, out: Path, seeds: Sequence[int], steps: int | None, train: Train
) -> tuple[int, Table | None]:
    """Compute an entry, and write its files to a folder.

    Args:
      name: a name in `ENTRIES`.
      scale: "desk" or "full".
      out: the folder; the runs of training are in its folder `runs`.
      seeds: seeds of the runs.
      steps: steps of a run, of the largest model if they differ; None means those of the entry.
      train: trains a model.

    Returns:
      The exit status, and the table unless a run failed.

    Raises:
      ConfigError: see `check`.
    """
    check(name, scale)
    if scale == "full":
        table = full.table(name)
    elif name in STATIC:
        table = STATIC[name]()
    else:
        trained = TRAINED[name]
        runs = out / "runs" / trained.runs
        steps = trained.steps if steps is None else steps
        if status := trained.train(runs, seeds, train, steps):
            return status, None
        table = trained.table(runs, seeds, steps)
    tables.write(table, out)
    return 0, table
