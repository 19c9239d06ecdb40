"""Meaning of outputs in config files of transformers and timm, and as config keys here: classes, end-of-text tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcvit.errors import CheckpointError
from dcvit.weights.family import Description, defaults
from dcvit.weights.tensors import GENERATION, Json, read_json

MULTILABEL = "multi_label_classification"  # transformers' `problem_type` of a sigmoid for each class
PROBLEMS = (None, "single_label_classification", MULTILABEL)


def named(description: Description, config: Json) -> Description:
    """Return a description with class names, end tokens and `multilabel` from config files, unless it already has them.

    Raises:
      CheckpointError: class names or tokens do not fit the model, or its outputs are no classes.
    """
    outputs = description.num_outputs
    if description.model_name == "lm":
        return description._replace(end_tokens=description.end_tokens or end_tokens(config, outputs or 0))
    if (problem := config.get("problem_type")) not in PROBLEMS:
        raise CheckpointError(f"config.json: problem_type={problem!r} is not supported, only classification")
    multilabel = description.multilabel or config.get("problem_type") == MULTILABEL
    names = description.class_names or class_names(config, outputs or 0)
    return description._replace(class_names=names, multilabel=multilabel)


def class_names(config: Json, count: int) -> tuple[str, ...]:
    """Return the names of `count` classes from `id2label` (transformers) or `label_names` (timm); () without names.

    "LABEL_0" and so on, which transformers writes for classes without names, count as no names.
    """
    nested = config.get("pretrained_cfg")
    timm = [part for part in (config, nested) if isinstance(part, dict)]
    values = [("id2label", config.get("id2label"))] + [("label_names", part.get("label_names")) for part in timm]
    key, found = next(((key, value) for key, value in values if value), ("", None))
    if not count or found is None:
        return ()
    pairs = enumerate(found) if isinstance(found, list) else found.items() if isinstance(found, dict) else ()
    try:
        names = {int(number): name for number, name in pairs}
    except (TypeError, ValueError):
        names = {}
    complete = len(names) == count or (key == "label_names" and isinstance(found, dict))  # timm's may have gaps
    if not names or not complete or not all(isinstance(x, str) and 0 <= i < count for i, x in names.items()):
        raise CheckpointError(f"config.json: {key}={found!r:.100}; expected a name for each of the {count} classes")
    if all(name == f"LABEL_{i}" for i, name in names.items()):
        return ()
    texts: Json = next((part["label_descriptions"] for part in timm if part.get("label_descriptions")), {})
    if key == "label_names" and isinstance(texts, dict):  # by name, such as those of the synsets of ImageNet
        names = {i: text if isinstance(text := texts.get(name), str) else name for i, name in names.items()}
    return tuple(names.get(i, str(i)) for i in range(count))


def id2label(names: Sequence[str]) -> Json:
    """Return the entries `id2label` and `label2id`, which hold class names in a config.json of transformers."""
    numbers = {name: i for i, name in enumerate(names)}
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": numbers}


def special_token(tokenizer: Json, number: int) -> str | None:
    """Return the text of special token `number` in the content of a tokenizer.json; None if it is not a special one."""
    added = tokenizer.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    found = next((token.get("content") for token in tokens if token.get("id") == number and token.get("special")), None)
    return found if isinstance(found, str) else None


def config(description: Description, tokenizer: Path | None) -> Json:
    """Return the entries of a config of this project that describe a model and its tokens.

    A config has one token that ends a text; it is the first if the model has several.
    """
    outputs = {"vit": "num_classes", "lm": "vocab_size"}[description.model_name]
    found: Json = {
        "model_name": description.model_name, "model": dict(description.fields), outputs: description.num_outputs,
    }  # fmt: skip
    if description.model_name == "vit":
        found |= {"loss": "sigmoid_xent"} if description.multilabel else {}
        return found | ({"pp_predict": description.pp} if description.pp else {})
    found["model"].setdefault("context", defaults("lm")["context"])  # otherwise that of the data
    # Without a tokenizer, the text is not known to be bytes.
    data: Json = {"kind": "text", "tokenizer": str(tokenizer)} if tokenizer else {"kind": "input_ids"}
    if description.end_tokens:
        end = description.end_tokens[0]
        data["end_of_text"] = special_token(read_json(tokenizer), end) if tokenizer else end
    return {**found, "input": {"data": {key: value for key, value in data.items() if value is not None}}}


def end_tokens(config: Json, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text, from generation_config.json or else config.json; () if neither has them."""
    for file, values in ((GENERATION, config.get(GENERATION) or {}), ("config.json", config)):
        found = values.get("eos_token_id")
        if found is None or found == []:
            continue
        tokens = found if isinstance(found, list) else [found]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
            raise CheckpointError(f"{file}: eos_token_id={found!r:.100}; expected a token or a list of tokens")
        return tuple(token for token in tokens if token < vocab_size)  # others are never generated
    return ()
