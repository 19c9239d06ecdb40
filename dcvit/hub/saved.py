"""Weights of a run with a description of its model, as single (unrolled) layers, for conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dcvit.config import values
from dcvit.errors import ConfigError, InputError
from dcvit.hub import pretrained
from dcvit.hub.model import TrainedModel, open_trained
from dcvit.hub.source import ModelSource
from dcvit.models import lm, vit
from dcvit.models.fields import TRAINING_ONLY_FIELDS
from dcvit.parallel.trees import check_tree
from dcvit.runs.restoring import as_tensor, open_params
from dcvit.runs.workdir import read_class_names
from dcvit.weights.families import Weights, verified
from dcvit.weights.family import Description, param_shapes
from dcvit.weights.placement import unrolled
from dcvit.weights.tensors import Tensor

if TYPE_CHECKING:
    import tensorstore as ts


def open_saved(path: Path) -> Weights:
    """Open a workdir, one of its checkpoints, a model of the package, or weights of another library.

    Args:
      path: its path, or the name of a repository of the Hugging Face Hub, which is downloaded.

    Raises:
      CheckpointError, ConfigError: there is no such model, or it is damaged or unsupported.
    """
    path = Path(pretrained.downloaded(path))
    source = ModelSource(path)
    if pretrained.is_pretrained(path):
        return verified(source.open_weights())._replace(record=source.config().to_dict())
    workdir = source.workdir
    if not isinstance(workdir, Path):
        return verified(source.open_weights())
    trained = open_trained(workdir, checkpoint=None if workdir == path else path)
    return _from_run(path, workdir, trained)


def _from_run(path: Path, workdir: Path, trained: TrainedModel) -> Weights:
    """Return the weights of a run, with the parameters of a scan split into layers."""
    net = trained.model
    outputs_key = "vocab_size" if isinstance(net, lm.LM) else "num_classes"
    fields = {}
    for field in dataclasses.fields(net):
        value = getattr(net, field.name)
        if field.name not in (*TRAINING_ONLY_FIELDS, outputs_key, "parent", "name") and value != field.default:
            fields[field.name] = list(value) if isinstance(value, tuple) else value
    name, pp = ("lm", "") if isinstance(net, lm.LM) else ("vit", trained.pp_predict)
    outputs: int | None = getattr(net, outputs_key) or None  # 0 is no head, too
    has_names = isinstance(net, vit.ViT) and (workdir / "data.json").is_file()
    names = read_class_names(workdir, outputs) if has_names and outputs else ()
    ends = _end_tokens(trained, net.end_of_text) if isinstance(net, lm.LM) else ()
    description = Description(name, outputs, fields, pp, tuple(names), ends, trained.is_multilabel)
    params = _unrolled(open_params(trained.source.path))
    shapes = param_shapes(description, params)
    check_tree({at: tensor.shape for at, tensor in params.items()}, shapes, str(trained.source))
    record = values.read_json(workdir / "config.json").to_dict()
    return Weights(path, "dcvit", description, params, record, workdir)


def _end_tokens(trained: TrainedModel, known: int | None) -> tuple[int, ...]:
    """Return the token that ends a text in a run's data, alone in a tuple; () if there is none or it is `known`."""
    end = trained.record()["input"].get("data", {}).get("end_of_text")
    if not isinstance(end, int):
        try:
            end = trained.tokenizer().end_of_text
        except (ConfigError, InputError):  # the data came as tokens, or the tokenizer is not here
            return ()
    return () if end in (None, known) else (end,)


def _unrolled(arrays: Mapping[str, ts.TensorStore]) -> dict[str, Tensor]:
    """Return the parameters of single layers by their paths, from a checkpoint whose arrays may stack layers."""
    parts = unrolled({path: tuple(array.shape) for path, array in arrays.items()})
    return {
        name: as_tensor(arrays[path] if layer is None else arrays[path][layer], name)
        for name, (path, layer) in parts.items()
    }
