"""Weights of any model with a description, as single (unrolled) layers, for conversion."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from dcvit.errors import ConfigError, InputError
from dcvit.hub import pretrained
from dcvit.hub.kinds import kind_of
from dcvit.hub.open import Opened, record_of
from dcvit.hub.source import find
from dcvit.hub.tokenizers import open_tokenizer_of
from dcvit.models.fields import TRAINING_ONLY_FIELDS
from dcvit.parallel.trees import Tensor, Tensors, check_tree
from dcvit.weights.families import Weights, verified
from dcvit.weights.family import Description, param_shapes
from dcvit.weights.placement import unrolled


def as_weights(opened: Opened) -> Weights:
    """Return the weights of an opened model, for conversion.

    Raises:
      CheckpointError, ConfigError: they do not fit their model, or are damaged.
    """
    if opened.weights:
        return verified(opened.weights)
    assert isinstance(opened.workdir, Path)
    assert isinstance(opened.place, Path)
    record = record_of(opened.workdir).to_dict()
    if pretrained.is_pretrained(opened.place):  # whose weights state their model, beside the config of their run
        return verified(find(opened.place).weights())._replace(record=record)
    description, params = _described(opened, opened.workdir), _unrolled(opened.params)
    check_tree({at: x.shape for at, x in params.items()}, param_shapes(description, params), str(opened))
    return Weights(opened.place, "dcvit", description, params, record, opened.workdir)


def _described(opened: Opened, workdir: Path) -> Description:
    """Return the description of a run's model, whose fields are those that differ from their defaults."""
    net, is_text = opened.module, opened.config.model_name == "lm"
    omitted = (*TRAINING_ONLY_FIELDS, kind_of(opened.config).outputs_key, "parent", "name")
    given = [field for field in dataclasses.fields(net) if field.name not in omitted]
    values = {field.name: getattr(net, field.name) for field in given if getattr(net, field.name) != field.default}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    names = tuple(opened.classes) if (workdir / "data.json").is_file() else ()
    return Description(
        opened.config.model_name,
        opened.num_outputs or None,  # 0 is no head, too
        fields,
        "" if is_text else opened.preprocessing,
        names,
        _end_tokens(opened) if is_text else (),
        opened.is_multilabel,
    )


def _end_tokens(opened: Opened) -> tuple[int, ...]:
    """Return the token that ends a text in a run's data, alone in a tuple; () if there is none or the model has it."""
    module: Any = opened.module
    end = opened.config.input.get("data", {}).get("end_of_text")
    if not isinstance(end, int):
        try:
            end = open_tokenizer_of(opened).end_of_text
        except (ConfigError, InputError):  # the data came as tokens, or the tokenizer is not here
            return ()
    return () if end in (None, module.end_of_text) else (end,)


def _unrolled(params: Tensors) -> dict[str, Tensor]:
    """Return the parameters of single layers by their paths, from arrays that may stack layers."""

    def read(path: str, layer: int | None) -> np.ndarray:
        array = params[path].read()
        return array if layer is None else array[layer]

    parts = unrolled({path: tensor.shape for path, tensor in params.items()})
    return {
        name: Tensor(params[path].shape[layer is not None :], functools.partial(read, path, layer))
        for name, (path, layer) in parts.items()
    }
