"""Model card: the README.md of a converted model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import dcvit
from dcvit.errors import MetricsError
from dcvit.runs import metrics
from dcvit.weights import dcvit_hf
from dcvit.weights.export import formats
from dcvit.weights.families import Weights
from dcvit.weights.modules import example

CARD = "README.md"
DIGITS = 5  # significant ones of a metric
READ = """```python
import dcvit

model = dcvit.load(".")
print(model.module)
```"""
NUMPY = """```python
import numpy

print({name: array.shape for name, array in numpy.load("params.npz").items()})
```"""
TRANSFORMERS = """```python
import torch
import transformers

model = transformers.{auto}.from_pretrained("."{trust})
with torch.no_grad():
    print(model({inputs}).logits.shape)
```"""
TIMM = """```python
import json

import timm
import torch
from safetensors.torch import load_file

config = json.load(open("config.json"))
model = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config.get("model_args", {{}}))
model.load_state_dict(load_file("model.safetensors"))
print(model.eval()({inputs}).shape)
```"""
ONNX = """```python
import numpy
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {{"{name}": numpy.zeros({shape}, numpy.{dtype})}})
print(logits.shape)
```"""
SAVED_MODEL = """```python
import tensorflow as tf

model = tf.saved_model.load("saved_model").signatures["serving_default"]
print(model({name}=tf.zeros({shape}, tf.{dtype}))["logits"].shape)
```"""
STABLEHLO = """```python
import jax
import numpy
from safetensors.numpy import load_file

function = jax.export.deserialize(bytearray(open("model.stablehlo", "rb").read()))
print(function.call(load_file("model.safetensors"), numpy.zeros({shape}, numpy.{dtype})).shape)
```"""


def write(weights: Weights, folder: Path, to: str, report: str) -> None:
    """Write the model card: config, data, metrics, parameters, how to load the model, and the comparison."""
    fields = {**weights.description.fields, "outputs": weights.description.num_outputs}
    kind = {"vit": "vision transformer", "lm": "language model"}[weights.description.model_name]
    sections = [
        "---\n# license: to be chosen by the author of the weights\n---",
        f"# {weights.path.name or 'model'}",
        f"A {kind} with {weights.size:,} parameters, converted from {_origin(weights)} to `{to}` by dcvit "
        f"{dcvit.__version__}; {report}.",
        "## Load\n\nIn this folder:\n\n" + _load(weights, folder, to),
        _inputs(weights),
        "## Config\n\n" + _table(fields, "field"),
    ]
    if data := _data(weights.record):
        sections.append("## Data\n\n" + _table(data, "key"))
    if values := _metrics(weights):
        sections.append("## Metrics\n\n" + _table(values, "metric"))
    (folder / CARD).write_text("\n\n".join(section for section in sections if section) + "\n")


def _origin(weights: Weights) -> str:
    return "a run" if weights.workdir else f"weights of the family `{weights.family}`"


def _load(weights: Weights, folder: Path, to: str) -> str:
    """Return the code that loads the result."""
    image = weights.description.model_name == "vit"
    shape = (1, *example(weights.description, weights.params).shape[1:])
    if to == "onnx" and not image:
        shape = (1, formats.context_of(weights))
    slots = {
        "shape": shape, "dtype": "float32" if image else "int32", "name": "images" if image else "tokens",
        "inputs": "torch.zeros(1, {3}, {1}, {2})".format(*shape) if image else "torch.tensor([[0, 1]])",
    }  # fmt: skip
    if to == "hf":
        config = json.loads((folder / "config.json").read_text())
        ours = config.get("model_type") in dcvit_hf.CLASSES
        auto = dcvit_hf.AUTO[dcvit_hf.IMAGE if image else dcvit_hf.TEXT]
        return TRANSFORMERS.format(auto=auto, trust=", trust_remote_code=True" if ours else "", **slots)
    templates = {"timm": TIMM, "onnx": ONNX, "savedmodel": SAVED_MODEL, "stablehlo": STABLEHLO}
    if to in templates:
        return templates[to].format(**slots)
    if to == "dcvit":
        command = "predict --workdir . IMAGE" if image else 'generate --workdir . --prompt "def main"'
        return f"```bash\ndcvit {command}\n```"
    return READ + (f"\n\n{NUMPY}" if to == "npz" else "")


def _inputs(weights: Weights) -> str:
    """Return the section about the inputs."""
    if weights.description.model_name == "vit":
        height, width, channels = example(weights.description, weights.params).shape[1:]
        pp = weights.description.pp
        steps = f", preprocessed by `{pp}`" if pp else ""
        return f"Inputs are images of {height}×{width} pixels with {channels} channels{steps}."
    return "Inputs are rows of tokens; tokens are " + (
        "bytes." if _data(weights.record).get("kind") == "stdlib" else "those of the tokenizer of the source."
    )


def _data(config: Mapping[str, object]) -> dict[str, object]:
    """Return the training data of a run's config."""
    given = config.get("input")
    data = given.get("data") if isinstance(given, dict) else None
    return data if isinstance(data, dict) else {}


def _metrics(weights: Weights) -> dict[str, object]:
    """Return the last value of each metric of a run; of a damaged file none."""
    try:
        rows = metrics.read(weights.workdir / "metrics.jsonl") if weights.workdir else []
    except MetricsError:
        rows = []
    values: dict[str, object] = {}
    for row in rows:
        values |= {key: f"{v:.{DIGITS}g}" if isinstance(v, float) else v for key, v in row.items() if v is not None}
    return values


def _table(values: Mapping[str, object], title: str) -> str:
    """Return a Markdown table."""
    rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in values.items()]
    return "\n".join([f"| {title} | value |", "|---|---|", *rows])
