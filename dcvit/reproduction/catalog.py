"""Catalog of the paper's tables and figures: for each, what the scales "desk" and "full" compute, and the function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dcvit.errors import ConfigError, nearest
from dcvit.reproduction import (
    ablations,
    arms,
    circuits,
    costs,
    distillation,
    downstream,
    equal_time,
    full,
    heads,
    images,
    in_context,
    optimizers,
    overhead,
    scaling,
    seeded,
    tables,
)
from dcvit.reproduction.seeded import Run, Train
from dcvit.reproduction.tables import Table

NOTHING = "nothing to compute"


class Trained(NamedTuple):
    """A computation of scale "desk" that trains models first.

    Fields:
      plan: function (folder of the runs, steps) -> the runs to train.
      table: function (folder, seeds, steps) -> the table with the results of the trained runs.
      steps: the default number of steps.
      name: the name of the folder of the runs; computations with the same name share runs.
    """

    plan: Callable[[Path, int], list[Run]]
    table: Callable[[Path, Sequence[int], int], Table]
    steps: int
    name: str


Computation: TypeAlias = Trained | images.Experiment | equal_time.Stage  # which have `plan`, `table`, `steps`, `name`


class Entry(NamedTuple):
    """A table or figure of the paper, or a comparison that is not in the paper.

    Fields:
      title: its title.
      desk: a phrase that says what scale "desk" computes, or `NOTHING`.
      full: a phrase that says what scale "full" computes, or `NOTHING`.
      compute: the computation of scale "desk": a function, or an object that says what to train first.
    """

    title: str
    desk: str
    full: str = NOTHING
    compute: Callable[[], Table] | Computation | None = None


def on_tasks(table: Callable[[Path, Sequence[int], int], Table]) -> Trained:
    """Return the computation of `table` that first trains the models of Table 5, on in-context tasks."""
    return Trained(in_context.plan, table, in_context.STEPS, "in_context")


def scaled(name: str) -> Trained:
    """Return the computation of the figure `name`, a key of `dcvit.reproduction.scaling.FIGURES`."""
    return Trained(
        functools.partial(scaling.plan, name), functools.partial(scaling.table, name), scaling.STEPS, name
    )  # fmt: skip


def unpublished(title: str, desk: str, compute: Computation) -> Entry:
    """Return the entry of a comparison that is not in the paper."""
    return Entry(f"{title}, not in the paper", desk, compute=compute)


def at_equal_time(title: str, stage: equal_time.Stage) -> Entry:
    """Return the entry of a comparison at equal training time, a `Stage` of `dcvit.reproduction.equal_time`."""
    kind = "ViTs" if stage.spec.startswith("vit") else "small language models"
    return unpublished(title, f"{len(stage.forms)} {kind}, trained for the same time", stage)


COMMANDS = "commands, slices and hours of the runs"
CASE = "an answer of the models of table5"
SCALED, GENERATED = "4 small language models", "2 small language models on generated tasks"
ENTRIES = {
    "table1": Entry("comparison of head composition approaches", NOTHING),
    "table2": Entry(
        "ratios of extra parameters and computation", "by formula, and counted in models and programs",
        compute=costs.table2,
    ),
    "table3": Entry("model sizes of the scaling experiments", NOTHING, "the runs of figure3"),
    "table4": Entry(
        "downstream tasks of Pythia and DCPythia", "2 models of figure4 on local tasks", COMMANDS,
        Trained(downstream.plan, downstream.table, scaling.STEPS, "figure4"),
    ),
    "table5": Entry("synthetic dataset", GENERATED, "the models of table4", on_tasks(in_context.table5)),
    "table6": Entry(
        "training and inference speed", "bounds by FLOPs and cache, and speed of small models", COMMANDS,
        overhead.table,
    ),
    "table7": Entry("ViT architectures", "parameters and FLOPs, counted", "the runs of table8", costs.table7),
    "table8": Entry(
        "ImageNet-1k accuracy", "ViT and DCViT on digits and scenes, trained twice per seed", COMMANDS,
        Trained(ablations.plan8, ablations.table8, ablations.IMAGE_STEPS, "table8"),
    ),
    "table9": Entry(
        "ablations of DCMHA's components", "12 small language models, trained twice per seed", COMMANDS,
        Trained(ablations.plan9, ablations.table9, arms.STEPS, "table9"),
    ),
    "table10": Entry(
        "local:global attention and query-wise composition", "FLOPs and cache", COMMANDS, costs.table10
    ),
    "table11": Entry(
        "examples of the synthetic dataset", "examples of the generated tasks", compute=in_context.table11
    ),
    "figure1": Entry("prototypical composition maps", NOTHING),
    "figure2": Entry("illustration of DCMHA", NOTHING),
    "figure3": Entry(
        "scaling curves of Transformers and DCFormers", f"4 families of {SCALED}", COMMANDS, scaled("figure3")
    ),
    "figure4": Entry("scaling curves of Pythia and DCPythia", f"2 families of {SCALED}", COMMANDS, scaled("figure4")),
    "figure5": Entry(
        "captured variance of QK and OV heads", "the models of table5", "the models of table4",
        on_tasks(circuits.figure5),
    ),
    "figure6": Entry(
        "few-shot evaluation on the synthetic dataset", GENERATED, "the models of table4", on_tasks(in_context.figure6)
    ),
    "figure7": Entry(
        "composition of weights in a case study", CASE, "the models of table4", on_tasks(circuits.figure7)
    ),
    "figure8": Entry(
        "attention distributions in the case study", CASE, "the models of table4", on_tasks(circuits.figure8)
    ),
    "heads": unpublished(
        "leaderboard of cross-head attention",
        f"{len(heads.ARMS)} small language models, trained twice per seed, and on generated tasks",
        Trained(heads.plan, heads.table, arms.STEPS, "heads"),
    ),
    "key_heads": unpublished(
        "composition with grouped queries", "11 small language models, trained twice per seed, and 4 ViTs on digits",
        Trained(heads.key_heads_plan, heads.key_heads_table, arms.STEPS, "key_heads"),
    ),
    "optimizers": unpublished(
        "AdamW and Muon with plain and composed attention", "4 small language models at 4 learning rates",
        Trained(optimizers.plan, optimizers.table, arms.STEPS, "optimizers"),
    ),
    "forms": at_equal_time("forms of composition at equal time", equal_time.SCREENED),
    "layers": at_equal_time("forms and layers of composition at equal time", equal_time.LAYERED),
    "tasks": at_equal_time("composition on in-context tasks at equal time", equal_time.TASKS),
    "tasks_confirmed": at_equal_time("compositions that gained in tasks, with new seeds", equal_time.TASKS_CONFIRMED),
    "equal_time_text": at_equal_time("folded composition on text at equal time, with AdamW", equal_time.TEXT),
    "equal_time_scenes": at_equal_time("composition in ViTs that count at equal time", equal_time.SCENES),
    "equal_time_digits": at_equal_time("composition in ViTs on digits at equal time", equal_time.DIGITS),
    "equal_time_photographs": at_equal_time("composition in ViTs on photographs at equal time", equal_time.PHOTOGRAPHS),
    "image_digits": unpublished(
        "composition in ViTs with grouped queries on digits",
        "4 pairs of ViTs with 1, 2, 4 and 8 key heads for 8 heads", images.DIGITS,
    ),
    "image_scenes": unpublished(
        "composition in ViTs that count digits in scenes", "a ViT and a DCViT, each scene seen once",
        images.SCENES,
    ),
    "photographs": unpublished(
        "composition in ViTs on photographs of solar cells",
        f"a ViT and a DCViT on the images that scripts/solar_cells.py writes to {images.SOLAR_CELLS}",
        images.PHOTOGRAPHS,
    ),
    "distillation": unpublished(
        "a DCViT distilled from a larger one on few digits",
        "a small DCViT alone, and with the package's model `digits` as teacher", distillation.DIGITS,
    ),
    "bfloat16_digits": unpublished(
        "accuracy with activations in bfloat16 on digits", "a ViT and a DCViT in float32 and in bfloat16",
        images.BFLOAT16_DIGITS,
    ),
    "bfloat16_photographs": unpublished(
        "accuracy with activations in bfloat16 on photographs",
        f"a ViT and a DCViT in float32 and in bfloat16 on the images in {images.SOLAR_CELLS}",
        images.BFLOAT16_PHOTOGRAPHS,
    ),
}  # fmt: skip


def listing() -> list[str]:
    """Return a line for each entry: its name, its title and what each scale computes."""
    lines, width = [], max(map(len, ENTRIES)) + 2
    for name, entry in ENTRIES.items():
        lines += [f"{name:{width}}{entry.title}", f"  desk   {entry.desk}", f"  full   {entry.full}"]
    return lines


def check(name: str, scale: str) -> None:
    """Raise ConfigError if `ENTRIES` lacks a name, or the entry has no computation at a scale, "desk" or "full"."""
    if name not in ENTRIES:
        raise ConfigError(f"unknown table or figure {name!r}; {nearest(name, ENTRIES)}")
    entry = ENTRIES[name]
    if (name not in full.RUNS) if scale == "full" else entry.compute is None:
        raise ConfigError(f"{name} at scale {scale}: {getattr(entry, scale)}; see --list")


def reproduce(
    name: str, scale: str, out: Path, train: Train, seeds: Sequence[int], steps: int | None
) -> tuple[int, Table | None]:
    """Compute a table or figure, after training its models if it has any, and write its files to a folder.

    Args:
      name: a name in `ENTRIES`.
      scale: "desk" or "full".
      out: the folder of the files; training runs are in its subfolder `runs`.
      train: function that trains a model.
      seeds: seeds of the runs.
      steps: steps of a run, of the largest model if they differ; None means the entry's default.

    Returns:
      The exit status, 0 or that of the run that failed; and the table, or None if a run failed.

    Raises:
      ConfigError: see `check`; or a run diverged or is not complete, or the runs of a model differ in more than their
        seed.
    """
    check(name, scale)
    compute = ENTRIES[name].compute
    if scale == "full" or compute is None:
        table = full.table(name)
    elif callable(compute):
        table = compute()
    else:
        folder = out / "runs" / compute.name
        steps = compute.steps if steps is None else steps
        if status := seeded.train_all(compute.plan(folder, steps), seeds, train):
            return status, None
        table = compute.table(folder, seeds, steps)
    tables.write(table, out)
    return 0, table
