"""Search for the cheapest composition that improves plain attention at equal time.

A form is the attention of a model, plain or composed. The stages are:
`forms`: plain attention, and forms of composition in all layers.
`layers`: plain attention, and a few forms of composition, each in all layers and in a part of the layers.
`tasks`: plain and composed attention on generated in-context tasks.
`tasks_confirmed`: the forms that gained in `tasks`, with new seeds, and a plain model with more parameters than they.
`equal_time_text`: plain and folded (query-wise, inside groups of a key head) attention on text with AdamW.
`equal_time_scenes`, `equal_time_digits`, `equal_time_photographs`: ViTs on the images of `dcvit.reproduction.images`.

A stage trains every form for the time that its first form, plain attention, takes for a number of steps. Each form has
its own number of steps, and a complete learning rate schedule over them. Models of text are those of
configs/lm_stdlib.py with size=small, whose heads are as wide as those of larger models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dcvit.models import head_settings
from dcvit.reproduction import arms, images, speeds
from dcvit.reproduction.arms import Group
from dcvit.reproduction.optimizers import OPTIMIZERS
from dcvit.reproduction.seeded import Run, of_model
from dcvit.reproduction.tables import Chart, Row, Table

Fields: TypeAlias = Mapping[str, object]  # of a model
COMPOSITIONS = "(.*/)?(pre|post)/.*"  # names of their parameters


def folded(key_heads: int, rank: int, compose: str, *, gate: bool = True) -> tuple[str, Fields]:
    """Return (name, model fields) of a form whose composition is only query-wise and inside key-head groups."""
    own = {"num_key_heads": key_heads, "groups": key_heads, "rank": rank, "gate": gate, "compose": compose}
    name = f"folded, K={key_heads}, R={rank}, {compose}"
    return name if gate else f"{name}, no gate", {**head_settings.SETTINGS["folded"], **own}


FORMS: dict[str, Fields] = {
    "mha": {"compose": None},
    "grouped, K=3": {"compose": None, "num_key_heads": 3},
    "grouped, K=2": {"compose": None, "num_key_heads": 2},
    **dict(
        folded(2, rank, compose, gate=gate)
        for rank in (2, 1) for gate in (True, False) for compose in ("both", "pre", "post")
    ),
    **dict(folded(3, rank, "both") for rank in (2, 1)),
    **{name: {"heads": name} for name in ("talking", "gated", "lightweight")},
    "dcmha, R=1": {"heads": "dcmha", "rank": 1},
}  # fmt: skip
LAYERS = {"last layer": (3,), "last two": (2, 3), "every second": (1, 3)}  # that compose, of four
IN_LAYERS: dict[str, Fields] = {
    **{
        name: FORMS[name] for name in (
            "mha", "grouped, K=2", "folded, K=2, R=2, post", "folded, K=2, R=2, pre, no gate", "folded, K=2, R=2, both",
            "folded, K=2, R=1, both", "folded, K=2, R=1, pre, no gate",
        )
    },
    **{
        f"{form}, {layers}": {**FORMS[form], "compose_layers": LAYERS[layers]}
        for form in ("folded, K=2, R=2, post", "folded, K=2, R=2, both") for layers in LAYERS
    },
    **{
        f"{form}, last layer": {**FORMS[form], "compose_layers": LAYERS["last layer"]}
        for form in ("talking", "lightweight", "dcmha, R=1")
    },
}  # fmt: skip
ON_TASKS: dict[str, Fields] = {
    **{
        name: FORMS[name] for name in (
            "mha", "grouped, K=2", "folded, K=2, R=2, both", "folded, K=2, R=2, post", "folded, K=2, R=1, both",
            "folded, K=2, R=1, post", "lightweight",
        )
    },
    "dcmha, post": {"compose": "post"},
    "dcmha": {"heads": "dcmha"},
}  # fmt: skip
WIDER = "mha, wider"
CONFIRMED: dict[str, Fields] = {
    "mha": FORMS["mha"],
    WIDER: {**FORMS["mha"], "mlp_dim": 152},  # more parameters than any composed form
    **{name: ON_TASKS[name] for name in ("grouped, K=2", "folded, K=2, R=2, post", "lightweight", "dcmha, post")},
}


class Measure(NamedTuple):
    """A metric of trained models, which a `Stage` compares between its forms.

    Fields:
      metric: "EVALUATOR/METRIC" of a run.
      column: its name in the table.
      scale: factor that multiplies the metric.
      lower: lower values are better.
    """

    metric: str
    column: str
    scale: int = 1
    lower: bool = True


BITS = Measure(arms.METRIC, "bits per byte")
ANSWERS = Measure("validation/accuracy", "accuracy %", 100, lower=False)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A comparison of forms at equal time.

    Fields:
      name: name of the entry, its files and the folder of its runs.
      title: title of the table.
      forms: the model's fields by name of the form; the first is `mha`, and forms with `compose=None` are plain.
      steps: number of steps of the first form; the others train for the same time.
      limit: forms whose step takes more than `limit` times as long as the first form's are timed and not trained.
      spec: the config of all forms.
      shared: overrides of all forms.
      measure: the metric that is compared.
      optimizer: a name in `OPTIMIZERS`.
      lr: the learning rate.
      own_lr: the learning rate by name of the form, for forms that learn better with another one than `lr`.
      of_compositions: factor by which the learning rate of the compositions' parameters is multiplied.
      first_seed: added to the seeds of the workdirs, so that stages train with different seeds.
    """

    name: str
    title: str
    forms: Mapping[str, Fields]
    steps: int
    limit: float = math.inf
    spec: str = "lm_stdlib:size=small"
    shared: Mapping[str, object] = dataclasses.field(default_factory=dict)
    measure: Measure = BITS
    optimizer: str = "Muon"
    lr: float = 3e-3
    own_lr: Mapping[str, float] = dataclasses.field(default_factory=dict)
    of_compositions: float = 0.1
    first_seed: int = 0

    def plan(self, folder: Path, steps: int) -> list[Run]:
        """Return the runs to train, after measuring the times of a step, which determine their numbers of steps."""
        return [*self._runs(folder, steps).values()]

    def table(self, folder: Path, seeds: Sequence[int], steps: int) -> Table:
        """Return the table of the trained forms: the metric, and its difference to that of the best plain form."""
        measure, runs, ms = self.measure, self._runs(folder, steps), self._group(folder).times().ms
        found = arms.measure(runs, seeds, measure.scale)
        ranked = sorted(runs, key=lambda form: found.means[form].mean, reverse=not measure.lower)
        best = next(form for form in ranked if self._plain(form))
        differences = arms.over_seeds(arms.differences(found.values, best))
        rows: list[Row] = [
            {
                "form": form, "parameters": runs[form].parameters(seeds[0]), "step ÷ mha": ms[form] / ms["mha"],
                "steps": int(str(runs[form].overrides["total_steps"])),
                **found.means[form].cells(measure.column, "± 95 %"), **differences[form].cells("difference"),
                "verdict": "–" if self._plain(form) else arms.verdict(differences[form], lower=measure.lower),
            } for form in ranked
        ]  # fmt: skip
        notes = [self._note(seeds, steps, folder)]
        if costly := self._costly(folder):
            costs = "; ".join(f"{form}: {ratio:.2f}" for form, ratio in costly.items())
            notes.append(f"Not trained, because a step takes over {self.limit:g} times mha's: {costs}.")
        return Table(self.name, self.title, rows, notes, Chart("form", measure.column, "± 95 %"))

    def _plain(self, form: str) -> bool:
        return self.forms[form].get("compose", "") is None

    def _runs(self, folder: Path, steps: int) -> dict[str, Run]:
        """Return, by form, the runs of the forms whose step is fast enough to train them, see `limit`."""
        costly = self._costly(folder)
        timed = self._group(folder).at_equal_time(steps)
        return {form: run for form, run in timed.items() if form not in costly}

    def _group(self, folder: Path) -> Group:
        def run(form: str, folder: Path, steps: int) -> Run:
            slow = not self._plain(form) and self.of_compositions != 1
            mults = {"lr_mults": ((COMPOSITIONS, self.of_compositions),)} if slow else {}
            rate = {"lr": self.own_lr.get(form, self.lr)}
            own = {**of_model(self.forms[form]), **OPTIMIZERS[self.optimizer], **mults, **rate, "total_steps": steps}
            return Run(folder, self.spec, {**self.shared, **own}, self.measure.metric, self.first_seed)

        return Group(folder, [*self.forms], run, timed=1)

    def _costly(self, folder: Path) -> dict[str, float]:
        """Return the forms that are too slow to train, see `limit`: by form, time of a step ÷ that of the first."""
        ms = self._group(folder).times().ms
        return {form: time / ms["mha"] for form, time in ms.items() if time > self.limit * ms["mha"]}

    def _note(self, seeds: Sequence[int], steps: int, folder: Path) -> str:
        machine = self._group(folder).times().machine
        used = ", ".join(str(self.first_seed + seed) for seed in seeds)
        slow = f", times {self.of_compositions:g} for compositions" if self.of_compositions != 1 else ""
        slow += "".join(f", {lr:g} for {form}" for form, lr in self.own_lr.items())
        gain, loss = ("below", "above") if self.measure.lower else ("above", "below")
        return (
            f"Models of {self.spec} after the time of {steps} steps of mha; seeds {used}. {self.optimizer} with the "
            f"rate {self.lr:g}{slow}. Differences are to the plain form with the "
            f"{'lowest' if self.measure.lower else 'highest'} mean, paired by seed; intervals of "
            f"Student's t distribution. Gain: the interval is {gain} 0; loss: it is {loss} 0. Times of a step are "
            f"medians of {speeds.ROUNDS} interleaved rounds, without compilation, data and evaluations, on {machine}; "
            "other processes on the machine change them."
        )


SCREENED = Stage("forms", "Forms of composition at equal time", FORMS, 250, limit=1.1, first_seed=100)
LAYERED = Stage("layers", "Forms and layers of composition at equal time", IN_LAYERS, 500, first_seed=101)
TASKS = Stage(
    "tasks", "Composition on in-context tasks at equal time", ON_TASKS, 2000, spec="lm_synthetic", measure=ANSWERS,
    optimizer="AdamW", of_compositions=1, first_seed=200,
)  # fmt: skip
TASKS_CONFIRMED = dataclasses.replace(
    TASKS, name="tasks_confirmed", title="Composition on in-context tasks at equal time, with new seeds",
    forms=CONFIRMED, first_seed=300,
)  # fmt: skip

GROUPED = "grouped, K=2"
TEXT = Stage(
    "equal_time_text", "Folded composition on text at equal time, with AdamW",
    {name: FORMS[name] for name in ("mha", GROUPED, "folded, K=2, R=2, both")}, 500,
    optimizer="AdamW", own_lr={GROUPED: 1.5e-3}, of_compositions=1, first_seed=400,
)  # fmt: skip


def on_images(experiment: images.Experiment, pair: str, forms: Mapping[str, Fields], lr: float) -> Stage:
    """Return the stage that trains `forms` of attention in ViTs on the data, and with the `pair`, of an experiment."""
    shared = {**experiment.overrides, **of_model(experiment.pairs[pair])}
    name = f"equal_time_{experiment.name.removeprefix('image_')}"
    measure = Measure(experiment.metric, "top-1 %", 100, lower=False)
    return Stage(
        name, f"{experiment.title}, at equal time", forms, experiment.steps, spec=experiment.spec, shared=shared,
        measure=measure, optimizer="AdamW", lr=lr, of_compositions=1, first_seed=400,
    )  # fmt: skip


PLAIN_AND_POST: dict[str, Fields] = {"mha": FORMS["mha"], "dcmha_post": ON_TASKS["dcmha, post"]}
ON_SCENES: dict[str, Fields] = {
    **PLAIN_AND_POST, WIDER: {**FORMS["mha"], "mlp_dim": 180}, "dcmha": {"compose": "both"},
}  # fmt: skip
SCENES = on_images(images.SCENES, "4 heads", ON_SCENES, lr=2e-3)
DIGITS = on_images(images.DIGITS, "K=8", PLAIN_AND_POST, lr=2e-3)
PHOTOGRAPHS = on_images(images.PHOTOGRAPHS, "4 heads", PLAIN_AND_POST, lr=2e-3)
