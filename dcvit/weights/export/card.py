"""Model card: the README.md of a converted model, from the template card.jinja."""

from __future__ import annotations

from pathlib import Path

import jinja2

from dcvit.runs import metrics, steps
from dcvit.versions import __version__
from dcvit.weights.export.check import auto_class
from dcvit.weights.export.formats import reads_bytes, training_data
from dcvit.weights.families import Weights
from dcvit.weights.family import example
from dcvit.weights.tensors import Json, read_json
from input_pipeline import huggingface

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.jinja")
DIGITS = 5  # significant ones of a metric


def write(weights: Weights, folder: Path, to: str, report: str) -> None:
    """Write the model card: config, data, metrics, parameters, how to load the model, and the comparison."""
    about, init = weights.description, weights.record.get("model_init")
    image_task = "image-classification" if about.num_outputs else "image-feature-extraction"
    # An absolute path is one of the author's machine: its last part stays.
    data = {
        key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for key, value in training_data(weights.record).items()
    }
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    card = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        task=image_task if about.model_name == "vit" else "text-generation",
        base_model=huggingface.parse(str(init)).id if huggingface.is_name(init) else None,
        title=huggingface.title(weights.path) if weights.path.name else "model",
        image=example(about, weights.params).shape[1:] if about.model_name == "vit" else None,
        averaged=[huggingface.title(path) for path in weights.averaged], is_run=weights.workdir is not None,
        family=weights.family, to=to, version=__version__, report=report, size=weights.size, auto=auto_class(about),
        has_code=to == "hf" and "auto_map" in read_json(folder / "config.json"),
        pp=about.pp, bytes=reads_bytes(weights.record), config={**about.fields, "outputs": about.num_outputs},
        data=data, metrics=_metrics(weights),
    )  # fmt: skip
    (folder / CARD).write_text(card, encoding="utf-8")


def _metrics(weights: Weights) -> Json:
    """Return the last value of each metric of a run, up to its checkpoint, by name; none if the model is of no run."""
    if weights.averaged or not weights.workdir:
        return {}
    name = steps.step_folder(weights.path).name
    values: Json = {}
    for row in metrics.read(weights.workdir / "metrics.jsonl"):
        if not steps.is_step(name) or row["step"] <= int(name):
            values |= {
                key: f"{value:.{DIGITS}g}" if isinstance(value, float) else value
                for key, value in row.items() if value is not None
            }  # fmt: skip
    return values
