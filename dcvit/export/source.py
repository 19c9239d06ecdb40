"""Models to convert: a description, and parameters that are read one at a time, in the tree of unrolled layers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from dcvit.config import load as configs
from dcvit.config.keys import TRAINING_ONLY_FIELDS
from dcvit.errors import ConfigError, InputError
from dcvit.inference.images import read_class_names
from dcvit.models import lm, vit
from dcvit.models.trees import check_tree
from dcvit.runs.restoring import as_tensor, open_params
from dcvit.runs.workdir import find
from dcvit.training.trained import TrainedModel, open_trained
from dcvit.weights.families import Weights, open_weights
from dcvit.weights.family import Description
from dcvit.weights.modules import errors_name_file, example, param_shapes
from dcvit.weights.placement import unrolled
from dcvit.weights.tensors import Json, Tensor, Tensors

log = logging.getLogger(__name__)


class Model(NamedTuple):
    """A model that can be converted.

    Fields:
      path: the file or folder it is read from.
      origin: "dcvit" for a run of this project, or else the family of the weights.
      description: the model, without the fields of `TRAINING_ONLY_FIELDS`.
      params: the parameters by path.
      config: content of the run's config.json; empty for weights.
      workdir: folder of the run.
    """

    path: Path
    origin: str
    description: Description
    params: Tensors
    config: Json
    workdir: Path | None = None

    def in_float32(self) -> Model:
        """Return the model with parameters that are converted to float32 when they are read."""

        def wide(tensor: Tensor) -> Tensor:
            return Tensor(tensor.shape, lambda: tensor.read().astype(np.float32))

        return self._replace(params={name: wide(tensor) for name, tensor in self.params.items()})

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the path and the value of each parameter."""
        return ((name, tensor.read()) for name, tensor in self.params.items())

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.params.values())


def open_model(path: Path) -> Model:
    """Open a workdir, one of its checkpoints, or weights of another library.

    Raises:
      CheckpointError, ConfigError: there is no such model, or it is damaged or unsupported.
    """
    workdir = find(path)
    if not isinstance(workdir, Path):
        return from_weights(open_weights(path))
    trained = open_trained(workdir, None, None if workdir == path else path)
    return _from_run(path, workdir, trained)


def _from_run(path: Path, workdir: Path, trained: TrainedModel) -> Model:
    """Return the model of a run, with the parameters of a scan split into layers."""
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
    description = Description(name, outputs, fields, pp, tuple(names), ends)
    params = _unrolled(open_params(trained.checkpoint))
    shapes = param_shapes(description, params)
    check_tree({at: tensor.shape for at, tensor in params.items()}, shapes, str(trained.checkpoint))
    return Model(path, "dcvit", description, params, configs.read_json(workdir / "config.json").to_dict(), workdir)


def _end_tokens(trained: TrainedModel, known: int | None) -> tuple[int, ...]:
    """Return the token that ends a text in the data of a run; () if there is none besides the model's."""
    end = trained.record()["input"].get("data", {}).get("end_of_text")
    if not isinstance(end, int):
        try:
            end = trained.tokenizer().end_of_text
        except (ConfigError, InputError):  # the data came as tokens, or the tokenizer is not here
            return ()
    return () if end in (None, known) else (end,)


def _unrolled(arrays: Mapping[str, ts.TensorStore]) -> dict[str, Tensor]:
    """Return the parameters of single layers, which a scan stacks in the arrays of a checkpoint, by their paths."""
    parts = unrolled({path: tuple(array.shape) for path, array in arrays.items()})
    return {
        name: as_tensor(arrays[path] if layer is None else arrays[path][layer], name)
        for name, (path, layer) in parts.items()
    }


def from_weights(weights: Weights) -> Model:
    """Return the model of weights. Raises CheckpointError if the parameters are not those of their description."""
    params = weights.parameters()
    with errors_name_file(weights.path):
        shapes = param_shapes(weights.description, params)
    check_tree({path: tensor.shape for path, tensor in params.items()}, shapes, str(weights.path))
    return Model(weights.path, weights.family, _with_preprocessing(weights, params), params, {})


def _with_preprocessing(weights: Weights, params: Tensors) -> Description:
    """Return the description, with big_vision's usual preprocessing if the weights name none.

    Without it, the description of an image model has no size, which other libraries need. The size is that of the
    position embeddings; without them, or for other than square grids or 1 or 3 channels, nothing is assumed.
    """
    found = weights.description
    if found.model_name != "vit" or found.pp or "pos_embedding" not in params:
        return found
    _, height, width, channels = example(found, params).shape
    patch_height, patch_width = params["embedding/kernel"].shape[:2]
    if height * patch_width != width * patch_height or channels not in (1, 3):
        return found
    size = height if height == width else [height, width]
    pp = f"{'decode' if channels == 3 else 'decode(1)'}|resize({size})|value_range(-1, 1)"
    log.info("%s names no preprocessing; assumed: %s", weights.path, pp)
    return found._replace(pp=pp)
