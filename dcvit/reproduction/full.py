"""The runs of the paper at full size: commands, TPU slices and estimated hours. Nothing is launched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from dcvit.config.load import load, recommended
from dcvit.hub.kinds import make_model
from dcvit.models import flops
from dcvit.parallel.topologies import topology
from dcvit.reproduction import ablations, costs
from dcvit.reproduction.seeded import folder_of
from dcvit.reproduction.tables import Row, Table

UTILIZATION = 0.4  # the share of the peak that is assumed
IMAGES = 1_268_355  # of train[:99%]
PILE, IMAGENET = "the Pile, tokenized: docs/text.md", "imagenet2012: docs/tutorials/imagenet.md"
SIZES_3 = ("405M", "834M", "1.4B")


def ablated(fields: Mapping[str, object]) -> tuple[str, str]:
    """Return (config, overrides) that train the model of Table 9 with `fields`; the preset has compose="both"."""
    if fields["compose"] is None:
        return "lm_pile:preset=Transformer++-405M", ""
    words = (f"--config.model.{key}={value}" for key, value in fields.items() if value != "both")
    return "lm_pile:preset=DCFormer++-405M", " ".join(words)


# For each entry: name of the run → config, overrides.
RUNS: dict[str, dict[str, tuple[str, str]]] = {
    "figure3": {
        f"{family}-{size}": (f"lm_pile:preset={family}-{size}", "")
        for family in ("Transformer", "DCFormer", "Transformer++", "DCFormer++") for size in SIZES_3
    },
    "figure4": {
        name: (f"lm_pile:preset={name}", "")
        for name in ("Pythia-2.8B", "Pythia-6.9B", "Pythia-12B", "DCPythia-2.8B", "DCPythia-6.9B")
    },
    "table4": {
        name: (f"lm_pile:preset={name}", "")
        for name in ("Pythia-2.8B", "DCPythia-2.8B", "DCFormer++-2.8B", "Pythia-6.9B", "DCPythia-6.9B", "Pythia-12B")
    },
    "table6": {
        f"{family}-{size}": (f"lm_pile:preset={family}-{size}", "--config.total_steps=100")
        for size in ("2.8B", "6.9B", "13B", "33B") for family in ("Transformer++", "DCFormer++")
    },
    "table8": {
        variant: (f"vit_i1k:variant={variant}", "--config.total_epochs=300")
        for variant in ("ViT-S/16", "DCViT-S/16", "ViT-M/16")
    },
    "table9": {name: ablated(arm.fields) for name, arm in ablations.ARMS.items()},
    "table10": {
        f"{name} {column}": (
            f"lm_pile:preset={name}",
            f"--config.model.window_pattern={pattern} --config.model.branches={branches} {steps}".rstrip(),
        )
        for name, steps in (("DCFormer++-405M", ""), ("DCPythia-6.9B", "--config.total_steps=13000"))
        for column, (pattern, branches, *_) in costs.TABLE_10.items()
    },
}  # fmt: skip


def table(name: str) -> Table:
    """Return a table of the runs at full size for `name`, a key of `RUNS`: a row has a run's command and cost."""
    slices = dict(recommended())
    by_model = {spec.split(",")[0]: (spec, pod) for spec, pod in slices.items()}
    rows = [_row(run, spec, overrides, by_model) for run, (spec, overrides) in RUNS[name].items()]
    notes = (
        f"hours = steps · batch · F / (chips · peak · {UTILIZATION}), with F the FLOPs of a training step for one "
        f"example (`dcvit.models.flops`) and the chip's peak in bfloat16 (`dcvit.parallel.topologies`); {UTILIZATION} "
        "is an assumption. Slices are those of docs/pods.md. Re-run the same command to resume.",
    )
    return Table(f"{name}_full", f"Runs of the paper for {name}", rows, notes)


def _row(run: str, spec: str, overrides: str, by_model: Mapping[str, tuple[str, str]]) -> Row:
    """Return a run's table row: its command, and the estimated hours on the TPU slice in `by_model`."""
    recommended_spec, pod = by_model[spec.split(",")[0]]
    images = spec.startswith("vit")
    parts = "" if images else f",{recommended_spec.split(',')[1]},data=DATA"
    words = [word.removeprefix("--config.") for word in overrides.split()]
    config = load(spec + parts.replace("DATA", "/data/pile"), words)
    net = make_model(config)
    batch = int(config.input.batch_size)
    shape = (1, 224, 224, 3) if images else (1, int(config.model.context))
    each = flops.training_flops(net, jax.ShapeDtypeStruct(shape, np.float32 if images else np.int32))
    assert each is not None
    steps = IMAGES * int(config.total_epochs) // batch if images else int(config.total_steps)
    chip, sides = topology(pod)
    chips = int(np.prod(sides))
    seconds = steps * batch * each / (chips * chip.peak * UTILIZATION)
    command = f"dcvit train --config {spec}{parts} --workdir RUNS/{folder_of(Path(), run)} {overrides}".rstrip()
    return {
        "run": run, "slice": pod, "chips": chips, "steps": steps, "batch": batch,
        "PFLOP per step": batch * each / 1e15, "hours": seconds / 3600, "chip hours": chips * seconds / 3600,
        "data": IMAGENET if images else PILE, "command": f"`{command}`",
    }  # fmt: skip
