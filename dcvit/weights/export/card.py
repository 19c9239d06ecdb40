"""Model card: the README.md of a converted model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from dcvit.runs import metrics, steps
from dcvit.versions import __version__
from dcvit.weights import dcvit_hf
from dcvit.weights.export import tokenizer_files
from dcvit.weights.families import Weights
from dcvit.weights.family import example
from dcvit.weights.tensors import Json
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
    print(model($zeros).logits.shape)
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


def write(weights: Weights, folder: Path, to: str, report: str) -> None:
    """Write the model card: config, data, metrics, parameters, how to load the model, and the comparison."""
    kind, inputs = _image_facts(weights) if weights.description.model_name == "vit" else _text_facts(weights)
    fields = {**weights.description.fields, "outputs": weights.description.num_outputs}
    title, values = huggingface.title(weights.path) if weights.path.name else "model", _metrics(weights)
    card = TEMPLATE.substitute(
        title=title, metadata=_metadata(weights, to), kind=kind, size=f"{weights.size:,}", to=to,
        origin=_origin(weights), report=report,
        load=_load(weights, folder, to), inputs=inputs, config=_table(fields, "field"), version=__version__,
    )  # fmt: skip
    for section, column, rows in (
        ("Data", "key", _without_folders(tokenizer_files.training_data(weights.record))), ("Metrics", "metric", values),
    ):  # fmt: skip
        if rows:
            card += SECTION.substitute(title=section, table=_table(rows, column))
    (folder / CARD).write_text(card, encoding="utf-8")


def _metadata(weights: Weights, to: str) -> str:
    """Return the lines of YAML in the header of the card, from which the Hugging Face Hub makes filters."""
    outputs = weights.description.num_outputs
    image_task = "image-classification" if outputs else "image-feature-extraction"
    task = image_task if weights.description.model_name == "vit" else "text-generation"
    found: Json = {"library_name": "dcvit", "pipeline_tag": task, "tags": ["dcvit", *TAGS.get(to, ())]}
    if huggingface.is_name(init := weights.record.get("model_init")):
        found["base_model"] = huggingface.parse(str(init)).id
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in found.items())


def _without_folders(data: Mapping[str, object]) -> dict[str, object]:
    """Return options of data with the last parts of absolute paths, whose folders are of the author's machine."""
    return {key: Path(x).name if isinstance(x, str) and Path(x).is_absolute() else x for key, x in data.items()}


def _origin(weights: Weights) -> str:
    """Return a phrase about the source of a model, for the text of the card."""
    if weights.averaged:
        names = ", ".join(f"`{huggingface.title(path)}`" for path in weights.averaged)
        return f"the average of the parameters of {len(weights.averaged)} models ({names})"
    return "a run" if weights.workdir else f"weights of the family `{weights.family}`"


def _image_facts(weights: Weights) -> tuple[str, str]:
    """Return the kind of model, and a sentence about its inputs, both for the text of the card."""
    height, width, channels = example(weights.description, weights.params).shape[1:]
    pp = weights.description.pp
    steps = f", preprocessed by `{pp}`" if pp else ""
    return "vision transformer", f"Inputs are images of {height}×{width} pixels with {channels} channels{steps}."


def _text_facts(weights: Weights) -> tuple[str, str]:
    is_bytes = tokenizer_files.reads_bytes(weights.record)
    tokens = "bytes" if is_bytes else "those of the tokenizer of the source"
    return "language model", f"Inputs are rows of tokens; tokens are {tokens}."


def _load(weights: Weights, folder: Path, to: str) -> str:
    """Return Markdown with Python code that loads the converted model, or a command of `dcvit` that uses it."""
    image = weights.description.model_name == "vit"
    if to == "dcvit":
        command = "predict --workdir . IMAGE" if image else 'generate --workdir . --prompt "def main"'
        return f"```bash\ndcvit {command}\n```"
    shape = (1, *example(weights.description, weights.params).shape[1:])
    slots = {
        "shape": shape, "dtype": "float32" if image else "int32",
        "zeros": "torch.zeros(1, {3}, {1}, {2})".format(*shape) if image else "torch.tensor([[0, 1]])",
        "auto": dcvit_hf.AUTO[dcvit_hf.IMAGE if image else dcvit_hf.TEXT], "trust": "",
    }  # fmt: skip
    if to == "hf" and json.loads((folder / "config.json").read_text()).get("model_type") in dcvit_hf.CLASSES:
        slots["trust"] = ", trust_remote_code=True"
    return f"```python{Template(LOAD.get(to, DCVIT)).substitute(slots)}```"


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
