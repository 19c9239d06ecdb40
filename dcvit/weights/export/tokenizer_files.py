"""Tokenizer files of a converted model: vocabulary, special tokens and chat template, under transformers' names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcvit.weights import names
from dcvit.weights.families import Weights
from dcvit.weights.tensors import TOKENIZER, Json, read_json, tokenizer_of
from input_pipeline.text.tokenizer import BYTE_END_OF_TEXT, END_OF_TEXT

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (CONFIG, "special_tokens_map.json", TEMPLATE)
# Keys that a tokenizer without code of its own honours, besides those that end with _token or _tokens.
KEPT = ("chat_template", "clean_up_tokenization_spaces", "model_max_length", "padding_side", "truncation_side")


def copy(source: Path, folder: Path) -> None:
    """Copy a tokenizer.json and the files beside it with its special tokens and its chat template."""
    for file in (source, *(source.with_name(name) for name in FILES)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def training_data(config: Mapping[str, object]) -> Json:
    """Return `input.data` of a run's config, the options of the training data; empty if there are none."""
    given = config.get("input")
    data = given.get("data") if isinstance(given, dict) else None
    return data if isinstance(data, dict) else {}


def reads_bytes(config: Mapping[str, object]) -> bool:
    """Return True if a run was trained on text whose tokens are bytes, according to its config."""
    data = training_data(config)
    return data.get("kind") in ("answers", "spans", "stdlib", "text") and data.get("tokenizer") is None


def write_hf(weights: Weights, folder: Path, ends: Sequence[int]) -> None:
    """Write the tokenizer of a model, if it has one, for transformers.

    Args:
      weights: the model; the tokenizer is a file beside it, or that of bytes.
      folder: the files are written into it.
      ends: tokens that end a text. The first becomes `eos_token` and `pad_token` if the source has none.

    Raises:
      CheckpointError: a file of the tokenizer is damaged.
    """
    source = tokenizer_of(weights.workdir or weights.path)
    is_bytes = not source and reads_bytes(weights.record)
    if is_bytes:
        source = folder / TOKENIZER
        source.write_text(json.dumps(_of_bytes()) + "\n")
    if not source:
        return
    found: Json = {"split_special_tokens": True} if is_bytes else {}  # text never becomes the end of a text
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
    for file in () if is_bytes else (source, source.with_name(TEMPLATE)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def _of_bytes() -> Json:
    """Return the content of a tokenizer.json whose tokens are bytes, in GPT-2's alphabet, and `END_OF_TEXT`."""
    visible = [i for i in range(BYTE_END_OF_TEXT) if chr(i).isprintable() and i != ord(" ")]
    others = [i for i in range(BYTE_END_OF_TEXT) if i not in visible]
    letters = {chr(i): i for i in visible} | {chr(256 + n): i for n, i in enumerate(others)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": BYTE_END_OF_TEXT, "content": END_OF_TEXT, "special": True, **flags}],
        "pre_tokenizer": level, "decoder": level, "model": {"type": "BPE", "vocab": letters, "merges": []},
    }  # fmt: skip
