"""Pairs of ViTs that differ in one thing, over several seeds: composition, or the dtype of the computation.

`image_digits`: eight heads with 1, 2, 4 and 8 key heads on handwritten digits, many passes over few images.
`image_scenes`: generated scenes, each of which is seen at most once, from a single digit to five.
`photographs`: photographs of solar cells in two classes.
`bfloat16_digits`, `bfloat16_photographs`: plain and composed models in float32 and in bfloat16.

docs/images.md states the criterion of a gain, which was fixed before the first run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from dcvit.reproduction import arms
from dcvit.reproduction.seeded import Run, of_model
from dcvit.reproduction.tables import Chart, Row, Table

Fields: TypeAlias = Mapping[str, object]  # of a model
COMPOSE: dict[str, Fields] = {"plain": {"compose": None}, "composed": {"compose": "both"}}
DTYPES: dict[str, Fields] = {dtype: {"dtype_mm": dtype} for dtype in ("float32", "bfloat16")}
MIN_GAIN = 1.0  # percentage points
SOLAR_CELLS = "runs/solar_cells"  # the folder that scripts/solar_cells.py makes


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Pairs of models on one dataset.

    Fields:
      name: name of the entry, its files and the folder of its runs.
      title: title of the table.
      spec: the config.
      overrides: config values of all models, by key.
      pairs: for each pair, the model fields of both its models.
      arms: the further fields of the two models of a pair; a difference is the second's metric minus the first's.
      options: config values of one model of a pair alone, by arm and key.
      metric: "EVALUATOR/METRIC", a fraction of correct answers.
      steps: number of steps of a run.
      about: a sentence about the data and the models.
    """

    name: str
    title: str
    spec: str
    overrides: Mapping[str, object]
    pairs: Mapping[str, Fields]
    metric: str
    steps: int
    about: str
    arms: Mapping[str, Fields] = dataclasses.field(default_factory=lambda: COMPOSE)
    options: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)

    def runs(self, folder: Path, steps: int) -> dict[str, dict[str, Run]]:
        """Return the training runs of both models of each pair, by pair and then by arm."""
        return {pair: {arm: self._run(folder, pair, arm, steps) for arm in self.arms} for pair in self.pairs}

    def plan(self, folder: Path, steps: int) -> list[Run]:
        """Return the training runs of all pairs in one list."""
        return [run for pair in self.runs(folder, steps).values() for run in pair.values()]

    def table(self, folder: Path, seeds: Sequence[int], steps: int) -> Table:
        """Return a table of complete runs: accuracies, and each pair's difference: "gain", "loss" or "not shown"."""
        rows: list[Row] = []
        first = next(iter(self.arms))
        for pair, runs in self.runs(folder, steps).items():
            found = arms.measure(runs, seeds, scale=100)
            for arm, run in runs.items():
                row = {"model": f"{pair} {arm}", "parameters": run.parameters(seeds[0]), **found.cells(arm, "top-1 %")}
                verdict = arms.verdict(found.differences[arm], lower=False, least=MIN_GAIN)
                of_first = {"difference": None, "difference ± 95 %": None, "verdict": "–"}
                rows.append({**row, **(of_first if arm == first else {"verdict": verdict})})
        return Table(self.name, self.title, rows, (self._note(seeds, steps), CRITERION),
                     Chart("model", "top-1 %", "± 95 %"))  # fmt: skip

    def _run(self, folder: Path, pair: str, arm: str, steps: int) -> Run:
        overrides = {**self.overrides, **self.options.get(arm, {}), "total_steps": steps}
        overrides |= of_model({**self.pairs[pair], **self.arms[arm]})
        return Run(folder / pair / arm, self.spec, overrides, self.metric)

    def _note(self, seeds: Sequence[int], steps: int) -> str:
        of_first = f"the {next(iter(self.arms))} model with the same seed and as many steps"
        return (
            f"{self.about} {steps:,} steps; seeds {', '.join(map(str, seeds))}. Intervals of Student's t distribution. "
            f"Differences are in percentage points, to {of_first}.{UNEQUAL if self.arms is COMPOSE else ''}"
        )


UNEQUAL = (
    " The composed model has more parameters and operations; no model of equal parameters or equal time was trained."
)
CRITERION = (
    f"A gain: the 95 % interval of the mean difference excludes 0, and the mean is at least {MIN_GAIN:g} percentage "
    "point. A loss: the same below 0. Everything else is “not shown”."
)


DIGITS = Experiment(
    "image_digits", "Grouped queries in ViTs on digits", "vit_digits:attention=dcmha", {"input.batch_size": 32},
    {f"K={k}": {"num_heads": 8, "num_key_heads": k} for k in (1, 2, 4, 8)}, "test/top1", 449,
    "ViTs of configs/vit_digits.py with 8 heads and K key heads (two layers, width 64) on scikit-learn's handwritten "
    "digits: 1,437 training images, batches of 32, and 360 test images.",
)  # fmt: skip
COUNTS = {"relations": ("count",), "attributes": ("same",), "least_distractors": 0}
SCENES = Experiment(
    "image_scenes", "ViT and DCViT on scenes that are counted", "vit_scenes:attention=dcmha",
    {f"{data}.{key}": value for data in ("input.data", "evals.validation.data", "evals.test.data")
     for key, value in COUNTS.items()},
    {"4 heads": {"num_heads": 4}}, "test/top1", 1500,
    "ViTs of configs/vit_scenes.py (two layers, width 64, four heads) on generated scenes of one to eight digits, of "
    "which 1 to 4 are the same. The answer is how many. Batches of 64 scenes, each of which is seen once; 1,024 test "
    "scenes of other handwritten digits.",
)  # fmt: skip
PHOTOGRAPHS = Experiment(
    "photographs", "ViT and DCViT on photographs of solar cells",
    f"vit_folder:data_dir={SOLAR_CELLS},variant=ViT-mu/8,res=64,batch_size=32,augment=flip", {"lr": 2e-3},
    {"4 heads": {"width": 64, "depth": 2, "mlp_dim": 256, "num_heads": 4}}, "val/top1", 496,
    "ViTs of configs/vit_folder.py with augment=flip (64×64 pixels, patches of 8×8, two layers, width 64, four heads) "
    "on 1,983 photographs of solar cells of the package elpv-dataset in two classes, and 641 held-out ones, of which "
    "66.3 % are in the larger class. Batches of 32, 8 passes.",
)  # fmt: skip
BFLOAT16_DIGITS = Experiment(
    "bfloat16_digits", "ViTs in float32 and bfloat16 on digits", "vit_digits", {}, COMPOSE, "test/top1", 1347,
    "Plain and composed ViTs of configs/vit_digits.py on scikit-learn's handwritten digits, in float32 and with "
    "activations in bfloat16: 1,437 training images, batches of 64, 60 passes, and 360 test images.", DTYPES,
)  # fmt: skip
BFLOAT16_PHOTOGRAPHS = dataclasses.replace(
    PHOTOGRAPHS, name="bfloat16_photographs", title="ViTs in float32 and bfloat16 on photographs of solar cells",
    pairs={name: {**PHOTOGRAPHS.pairs["4 heads"], **fields} for name, fields in COMPOSE.items()}, arms=DTYPES,
)  # fmt: skip
