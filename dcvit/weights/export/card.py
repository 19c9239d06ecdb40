"""Model card: the README.md of a converted model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from dcvit.runs import metrics, steps
from dcvit.versions import __version__
from dcvit.weights.export.formats import reads_bytes, training_data
from dcvit.weights.families import Weights
from dcvit.weights.family import example
from dcvit.weights.tensors import Json, read_json
from input_pipeline import huggingface

CARD = "README.md"
DIGITS = 5  # significant ones of a metric
TAGS = {"hf": ("transformers",), "timm": ("timm",)}  # the library that also loads a format
TEMPLATE = Template("""---
# license: to be chosen by the author of the weights
$metadata
---

# $title

A $kind with $size parameters, converted from $origin to `$to` by dcvit $version; $report.

## Load

In this folder:

$load

$inputs

## Config

$config
""")
SECTION = Template("""
## $title

$table
""")
DCVIT = """
import dcvit

model = dcvit.load(".")
print(model.module)
"""
# Code that loads the result, by format; `dcvit.load` opens the others.
LOAD = {
    "hf": """
import torch
import transformers

model = transformers.$auto.from_pretrained("."$trust)
with torch.no_grad():
    print(model($zeros).$output.shape)
""",
    "onnx": """
import numpy
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {"images": numpy.zeros($shape, numpy.$dtype)})
print(logits.shape)
""",
    "stablehlo": """
import jax
import numpy
from safetensors.numpy import load_file

function = jax.export.deserialize(bytearray(open("model.stablehlo", "rb").read()))
print(function.call(load_file("model.safetensors"), numpy.zeros($shape, numpy.$dtype)).shape)
""",
}  # fmt: skip
# The automatic class of transformers, and its output, for a model with a head, and for one without.
CLASSIFIER, LANGUAGE_MODEL, HEADLESS = (
    ("AutoModelForImageClassification", "logits"), ("AutoModelForCausalLM", "logits"), ("AutoModel", "pooler_output"),
)  # fmt: skip


def write(weights: Weights, folder: Path, to: str, report: str) -> None:
    """Write the model card: config, data, metrics, parameters, how to load the model, and the comparison."""
    description = weights.description
    size = example(description, weights.params).shape[1:]  # of an image
    if description.model_name == "vit":
        by = f", preprocessed by `{description.pp}`" if description.pp else ""
        kind, inputs = "vision transformer", "images of {}×{} pixels with {} channels".format(*size) + by
    else:
        tokens = "bytes" if reads_bytes(weights.record) else "those of the tokenizer of the source"
        kind, inputs = "language model", f"rows of tokens; tokens are {tokens}"
    card = TEMPLATE.substitute(
        title=huggingface.title(weights.path) if weights.path.name else "model", metadata=_metadata(weights, to),
        kind=kind, size=f"{weights.size:,}", to=to, origin=_origin(weights), report=report,
        load=_load(weights, folder, to, (1, *size)), inputs=f"Inputs are {inputs}.", version=__version__,
        config=_table({**description.fields, "outputs": description.num_outputs}, "field"),
    )  # fmt: skip
    # An absolute path is one of the author's machine: its last part stays.
    data = {
        key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for key, value in training_data(weights.record).items()
    }
    for section, column, rows in (("Data", "key", data), ("Metrics", "metric", _metrics(weights))):
        if rows:
            card += SECTION.substitute(title=section, table=_table(rows, column))
    (folder / CARD).write_text(card, encoding="utf-8")


def _metadata(weights: Weights, to: str) -> str:
    """Return the lines of YAML in the header of the card, from which the Hugging Face Hub makes filters."""
    image_task = "image-classification" if weights.description.num_outputs else "image-feature-extraction"
    task = image_task if weights.description.model_name == "vit" else "text-generation"
    found: Json = {"library_name": "dcvit", "pipeline_tag": task, "tags": ["dcvit", *TAGS.get(to, ())]}
    if huggingface.is_name(init := weights.record.get("model_init")):
        found["base_model"] = huggingface.parse(str(init)).id
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in found.items())


def _origin(weights: Weights) -> str:
    """Return a phrase about the source of a model, for the text of the card."""
    if weights.averaged:
        names = ", ".join(f"`{huggingface.title(path)}`" for path in weights.averaged)
        return f"the average of the parameters of {len(weights.averaged)} models ({names})"
    return "a run" if weights.workdir else f"weights of the family `{weights.family}`"


def _load(weights: Weights, folder: Path, to: str, shape: tuple[int, ...]) -> str:
    """Return Markdown with Python code that loads the converted model, or a command of `dcvit` that uses it."""
    image = weights.description.model_name == "vit"
    if to == "dcvit":
        command = "predict --workdir . IMAGE" if image else 'generate --workdir . --prompt "def main"'
        return f"```bash\ndcvit {command}\n```"
    auto, output = LANGUAGE_MODEL if not image else CLASSIFIER if weights.description.num_outputs else HEADLESS
    has_code = to == "hf" and "auto_map" in read_json(folder / "config.json")
    code = Template(LOAD.get(to, DCVIT)).substitute(
        auto=auto, output=output, trust=", trust_remote_code=True" if has_code else "",
        shape=shape, dtype="float32" if image else "int32",
        zeros="torch.zeros(1, {3}, {1}, {2})".format(*shape) if image else "torch.tensor([[0, 1]])",
    )  # fmt: skip
    return f"```python{code}```"


def _metrics(weights: Weights) -> dict[str, object]:
    """Return the last value of each metric of a run, up to its checkpoint, by name; none if the model is of no run."""
    workdir = None if weights.averaged else weights.workdir
    rows = metrics.read(workdir / "metrics.jsonl") if workdir else []
    name = steps.step_folder(weights.path).name if workdir else ""
    rows = [row for row in rows if not steps.is_step(name) or row["step"] <= int(name)]
    values: dict[str, object] = {}
    for row in rows:
        values |= {key: f"{v:.{DIGITS}g}" if isinstance(v, float) else v for key, v in row.items() if v is not None}
    return values


def _table(values: Mapping[str, object], title: str) -> str:
    """Return a Markdown table with the columns `title` and "value"."""
    rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in values.items()]
    return "\n".join([f"| {title} | value |", "|---|---|", *rows])
