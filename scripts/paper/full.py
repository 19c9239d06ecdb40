"""The runs of the paper at full size: commands, TPU slices and estimated hours. Nothing is launched."""

import functools
import json
import math
import runpy
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from paper import ablations, costs, runs
from paper.table import Row, Table

from dcvit.config.load import load, shipped
from dcvit.hub.kinds import make_model
from dcvit.models import flops
from dcvit.parallel.topologies import topology

DOCS = Path(__file__).parents[2] / "docs"  # measurements and estimates are beside the pages
IMAGES = 1_268_355  # of train[:99%]


@functools.cache
def seconds_per_example() -> dict[tuple[str, str], float]:
    """Return the seconds of one chip for an example of a training step, by config and chip, as the compiler estimates.

    An estimate is that of the batch for which it was made (`scripts/tpu/step.py`); configs with overrides are not here.
    """
    found = {}
    for row in json.loads((DOCS / "tpu_step.json").read_text()):
        config, chip = row["config"].partition(",grad_accum=")[0], row["topology"].partition(":")[0]
        if " " not in row["config"]:
            found[config, chip] = row["seconds"] / row["examples"]
    return found


def gpu_bound(gpus: int = 8) -> float:
    """Return images/s that DCViT-S/16 cannot exceed in training: its 12 layers of attention alone, as measured."""
    wanted = ("vit_s16", "forward + backward", "DC, pallas_gpu")
    rows = json.loads((DOCS / "gpu_attention.json").read_text())
    (ms,) = (row["ms"] for row in rows if (row["shape"], row["pass"], row["row"]) == wanted)  # of 256 images
    return gpus * 256 / (12 * ms / 1000)


def ablated(fields: Mapping[str, object]) -> tuple[str, str]:
    """Return (config, overrides) that train the model of Table 9 with `fields`; the preset has compose="both"."""
    if fields["compose"] is None:
        return "lm_pile:preset=Transformer++-405M", ""
    words = (f"--config.model.{key}={value}" for key, value in fields.items() if value != "both")
    return "lm_pile:preset=DCFormer++-405M", " ".join(words)


def recommended() -> list[tuple[str, str]]:
    """Return (config, TPU topology) for each recommendation of the package's configs.

    A config file recommends slices by a function `pods()`, which returns {arguments: topology}.
    """
    return [
        (f"{path.stem}:{arguments}", topology)
        for path in shipped()
        for arguments, topology in runpy.run_path(str(path)).get("pods", dict)().items()
    ]


def presets(*names: str, overrides: str = "") -> dict[str, tuple[str, str]]:
    """Return (config, overrides) of language models by preset."""
    return {name: (f"lm_pile:preset={name}", overrides) for name in names}


# For each entry: name of the run → config, overrides.
RUNS: dict[str, dict[str, tuple[str, str]]] = {
    "figure3": presets(*(
        f"{family}-{size}" for family in ("Transformer", "DCFormer", "Transformer++", "DCFormer++")
        for size in ("405M", "834M", "1.4B")
    )),
    "figure4": presets("Pythia-2.8B", "Pythia-6.9B", "Pythia-12B", "DCPythia-2.8B", "DCPythia-6.9B"),
    "table4": presets("Pythia-2.8B", "DCPythia-2.8B", "DCFormer++-2.8B", "Pythia-6.9B", "DCPythia-6.9B", "Pythia-12B"),
    "table6": presets(
        *(f"{family}-{size}" for size in ("2.8B", "6.9B", "13B", "33B") for family in ("Transformer++", "DCFormer++")),
        overrides="--config.total_steps=100",
    ),
    "table8": {
        variant: (f"vit_i1k:variant={variant}", "--config.total_epochs=300")
        for variant in ("ViT-S/16", "DCViT-S/16", "ViT-M/16")
    },
    "table9": {name: ablated(fields) for name, (fields, _) in ablations.ARMS.items()},
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
    slices = {spec.split(",")[0]: (spec, pod) for spec, pod in recommended()}
    rows = [_row(run, spec, overrides, *slices[spec]) for run, (spec, overrides) in RUNS[name].items()]
    notes = [
        "hours = steps · batch · seconds of an example / chips, by the TPU compiler's estimate of a step without input "
        "(docs/tpu_step.json, in part with another batch); a dash where there is none.",
        "DATA is the Pile, tokenized as docs/text.md describes; docs/imagenet.md describes imagenet2012.",
    ]
    if name == "table8":
        notes.append(
            "On GPUs a step of DCViT-S/16 was not measured. Its attention alone, measured on an H200, limits 8 of "
            f"them to {round(gpu_bound(), -2):,.0f} images/s (docs/gpu_attention.json)."
        )
    return Table(f"{name}_full", f"Runs of the paper for {name}", rows, notes)


def _row(run: str, spec: str, overrides: str, recommended_spec: str, pod: str) -> Row:
    """Return a run's table row: its command, and the estimated hours on the TPU slice `pod`."""
    images = spec.startswith("vit")
    parts = "" if images else f",{recommended_spec.split(',')[1]},data_dir=DATA"
    words = [word.removeprefix("--config.") for word in overrides.split()]
    config = load(spec + parts.replace("DATA", "/data/pile"), words)
    batch = int(config.input.batch_size)
    example = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32) if images else costs.row_of(config.model.context)
    each = flops.training_flops(make_model(config), example)
    steps = IMAGES * int(config.total_epochs) // batch if images else int(config.total_steps)
    chips = math.prod(topology(pod)[1])
    known = None if "config.model." in overrides else seconds_per_example().get((spec, pod.partition(":")[0]))
    hours = None if known is None else steps * batch * known / chips / 3600
    workdir = runs.folder_of(Path("RUNS"), run)
    return {
        "run": run, "slice": pod, "chips": chips, "steps": steps, "batch": batch,
        "PFLOP per step": batch * each / 1e15, "hours": hours, "chip hours": None if hours is None else chips * hours,
        "command": f"`dcvit train --config {spec}{parts} --workdir {workdir} {overrides}".rstrip() + "`",
    }  # fmt: skip
