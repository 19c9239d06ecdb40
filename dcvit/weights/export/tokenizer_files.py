"""Files of a tokenizer beside the weights: its special tokens and its chat template, as transformers names them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from dcvit.weights import names
from dcvit.weights.tensors import Json, read_json, tokenizer_of

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (CONFIG, "special_tokens_map.json", TEMPLATE)
# Keys that a tokenizer without code of its own honours, besides those that end with _token or _tokens.
KEPT = ("chat_template", "clean_up_tokenization_spaces", "model_max_length", "padding_side", "truncation_side")


def copy(source: Path, folder: Path) -> None:
    """Copy a tokenizer.json and the files beside it that name its special tokens and its chat template."""
    for file in (source, *(source.with_name(name) for name in FILES)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def write_hf(weights: Path, folder: Path, ends: Sequence[int]) -> None:
    """Write the tokenizer beside `weights`, if there is one, for transformers.

    Args:
      weights: folder or file of the weights, or a workdir.
      folder: the files are written into it.
      ends: tokens that end a text. The first is `eos_token` and `pad_token` if the source names none.

    Raises:
      CheckpointError: a file of the tokenizer is damaged.
    """
    source = tokenizer_of(weights)
    if not source:
        return
    found: Json = {}
    for file in (source.with_name(name) for name in FILES if name != TEMPLATE):
        found |= {key: value for key, value in (read_json(file) if file.is_file() else {}).items() if value is not None}
    kept: Json = {k: v for k, v in found.items() if k in KEPT or k.endswith(("_token", "_tokens"))}
    if ends and (end := names.special_token(read_json(source), ends[0])):
        kept.setdefault("eos_token", end)
    if "eos_token" in kept:
        kept.setdefault("pad_token", kept["eos_token"])
    # Generation continues rows on the right. The classes of language models take no `token_type_ids`.
    kept.setdefault("padding_side", "left")
    inputs = ["input_ids", "attention_mask"]
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **kept}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    for file in (source, source.with_name(TEMPLATE)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
