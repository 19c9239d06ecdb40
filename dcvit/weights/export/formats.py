"""Writers of weights and of their tokenizers: each writes a model into an empty folder.

`npz` and `safetensors` have this project's parameter names, which are big_vision's for the plain ViT, and describe the
model in config.json and in the file itself. `dcvit` is a workdir. `hf` and `timm` have the names of transformers and
timm.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dcvit.config import values
from dcvit.config.keys import OWN_TOKENIZER
from dcvit.errors import CheckpointError
from dcvit.runs import steps, workdir
from dcvit.runs.checkpointer import Checkpointer
from dcvit.weights import hf_processor, lm_families, preprocessing
from dcvit.weights import links as linking
from dcvit.weights.dcvit_hf import id2label
from dcvit.weights.families import FAMILIES, MULTILABEL, Weights, config_of, special_token
from dcvit.weights.family import Description, example, metadata, to_json
from dcvit.weights.safetensors_writer import SHARD_BYTES, write_shards
from dcvit.weights.tensors import GENERATION, OWN_KEY, PROCESSOR, ROOTS, TOKENIZER, Json, read_json, tokenizer_of
from input_pipeline.text.tokenizer import BYTE_END_OF_TEXT, END_OF_TEXT

OURS, MODELING = "dcvit_hf", "modeling_dcvit.py"  # the family of models without a native class, and its code
# Families of transformers by our models; the first that can express a model is used.
HF = {"vit": ("hf_vit", OURS), "lm": (*(name for name, row in lm_families.ROWS.items() if not row.dynamic), OURS)}
DATA = "data.json"  # of a run; it names the classes
ONE_FILE = sys.maxsize  # bytes of a shard that holds all tensors
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = (TOKENIZER_CONFIG, "special_tokens_map.json")
# Keys that a tokenizer without code of its own honours, besides those that end with _token or _tokens.
KEPT = ("chat_template", "clean_up_tokenization_spaces", "model_max_length", "padding_side", "truncation_side")
log = logging.getLogger(__name__)


def write_npz(weights: Weights, folder: Path) -> None:
    """Write `params.npz`, one array at a time; `numpy.savez` would need all in memory.

    The array `OWN_KEY` holds the description of the model as text. big_vision reads the arrays below `ROOTS[0]` only.
    """
    described = np.array(json.dumps(to_json(weights.description)))
    arrays = ((f"{ROOTS[0]}{name}", array) for name, array in weights.read())
    with zipfile.ZipFile(folder / "params.npz", "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in ((OWN_KEY, described), *arrays):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    _write_json(folder / "config.json", {OWN_KEY: to_json(weights.description)})


def write_safetensors(weights: Weights, folder: Path, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors` or shards with an index; config.json and headers have `weights.description`."""
    header = metadata(weights.description)
    write_shards(folder, weights.read(), max_shard_bytes=max_shard_bytes, metadata=header)
    _write_json(folder / "config.json", {OWN_KEY: to_json(weights.description)})


def write_dcvit(weights: Weights, folder: Path) -> None:
    """Write a workdir: a checkpoint of the parameters and a config, which is the run's if the model is from a run.

    Raises:
      CheckpointError: the model has no head.
    """
    description = weights.description
    if not description.num_outputs:
        raise CheckpointError(f"{weights.path}: the model has no head, which a run needs; choose another format")
    if others := list(description.end_tokens[1:]):
        end = description.end_tokens[0]
        log.warning("a run has one token that ends a text, here %d; others are lost: %s", end, others)
    tokenizer = tokenizer_of(weights.workdir or weights.path)
    described = config_of(description, tokenizer)
    if tokenizer:
        _copy_tokenizer(tokenizer, folder, SPECIAL_TOKENS)
        if "input" in described:
            described["input"]["data"]["tokenizer"] = OWN_TOKENIZER
    record = {**json.loads(json.dumps(values.defaults())), **described, **weights.record}
    if isinstance(record["model"], dict):
        record["model"] = {k: v for k, v in record["model"].items() if k != "scan"}
    for name in (DATA, "accepted.json"):
        if weights.workdir and (weights.workdir / name).is_file():
            shutil.copyfile(weights.workdir / name, folder / name)
    if description.class_names and not weights.workdir:
        _write_json(folder / DATA, {"class_names": list(description.class_names)})
    _write_json(folder / "config.json", record)
    about = {"config": record, **({"data": read_json(folder / DATA)} if (folder / DATA).is_file() else {})}
    checkpointer = Checkpointer(folder)
    try:
        checkpointer.save(steps.CONVERTED, {"params": weights.tree()}, about)
    finally:
        checkpointer.close()


def _hf_class(description: Description) -> tuple[str, Json]:
    """Return the first family of `HF` that can express a model, and the content of its config.json.

    Raises:
      CheckpointError: none can; the message has the reason of each.
    """
    reasons = []
    for name in HF[description.model_name]:
        try:
            found = FAMILIES[name].config(description)
        except CheckpointError as e:
            reasons.append(f"{name}: {e}")
            continue
        if name == OURS:
            log.info("transformers has no class for the model: %s", "; ".join(reasons))
        log.info("class of the model: %s", found["architectures"][0])
        return name, found
    raise CheckpointError("; ".join(reasons))


def write_hf(weights: Weights, folder: Path) -> None:
    """Write a folder of transformers: the native class, or else this project's modeling file with its weights.

    Raises:
      CheckpointError: neither can express the model; the message names the field.
    """
    description = weights.description
    name, config = _hf_class(description)
    if name == OURS:
        shutil.copyfile(Path(linking.__file__).with_name(MODELING), folder / MODELING)
    if description.model_name == "vit":
        config |= _of_images(weights)
        try:
            _write_json(folder / PROCESSOR, hf_processor.write(description.pp))
        except CheckpointError as e:
            log.info("%s is not written: %s", PROCESSOR, e)
    else:
        found = [*description.end_tokens, description.fields.get("end_of_text")]
        ends = list(dict.fromkeys(end for end in found if end is not None))
        tokens: Json = {"eos_token_id": ends if ends[1:] else ends[0]} if ends else {}
        config |= tokens  # without `pad_token_id`, whose embedding transformers would not train
        _write_json(folder / GENERATION, {**tokens, "pad_token_id": ends[0]} if ends else {})
        write_tokenizer(weights, folder, ends)
    _write_json(folder / "config.json", config)
    write_shards(folder, _theirs(name, weights))


def _of_images(weights: Weights) -> Json:
    """Return the entries of config.json for the size, channels and classes of images."""
    description = weights.description
    *size, channels = example(description, weights.params).shape[1:]
    found: Json = {"image_size": preprocessing.square(size), "num_channels": channels}
    found |= id2label(description.class_names) if description.class_names else {}
    return found | ({"problem_type": MULTILABEL} if description.multilabel else {})


def write_timm(weights: Weights, folder: Path) -> None:
    """Write `model.safetensors` and config.json for timm, which reads a single file.

    Raises:
      CheckpointError: timm cannot express the model; the message names the field.
    """
    description = weights.description
    labels = {"label_names": list(description.class_names)} if description.class_names else {}
    _write_json(folder / "config.json", {**FAMILIES["timm"].config(description), **labels})
    write_shards(folder, _theirs("timm", weights), max_shard_bytes=ONE_FILE)


def _theirs(family: str, weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    return linking.write(FAMILIES[family].links(weights.description), weights.params)


def write_thresholds(weights: Weights, folder: Path) -> None:
    """Write the thresholds that the workdir of a run of several labels holds for the converted step, but of no step."""
    about = weights.description
    if weights.workdir and about.multilabel and not weights.averaged:
        classes = workdir.numbered(about.class_names, about.num_outputs or 0)
        found = workdir.read_thresholds(weights.workdir, classes)
        if found and steps.step_folder(weights.path).name == str(found.step):
            workdir.write_thresholds(folder, found._replace(step=None), classes)


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def reads_bytes(config: Mapping[str, object]) -> bool:
    """Return True if a run was trained on text whose tokens are bytes, according to its config."""
    data = training_data(config)
    return data.get("kind") in ("answers", "spans", "stdlib", "text") and data.get("tokenizer") is None


def training_data(config: Mapping[str, object]) -> Json:
    """Return `input.data` of a run's config, the options of the training data; empty if there are none."""
    given = config.get("input")
    data = given.get("data") if isinstance(given, dict) else None
    return data if isinstance(data, dict) else {}


def write_tokenizer(weights: Weights, folder: Path, ends: Sequence[int]) -> None:
    """Write the tokenizer of a model, if it has one, for transformers.

    Args:
      weights: the model; the tokenizer is a file beside it, or that of bytes.
      folder: the files are written into it.
      ends: tokens that end a text. The first becomes `eos_token` and `pad_token` if the source has none.

    Raises:
      CheckpointError: a file of the tokenizer is damaged.
    """
    found: Json = {}
    if source := tokenizer_of(weights.workdir or weights.path):
        _copy_tokenizer(source, folder)
        for file in map(source.with_name, SPECIAL_TOKENS):
            given = read_json(file) if file.is_file() else {}
            found |= {key: value for key, value in given.items() if value is not None}
    elif reads_bytes(weights.record):
        (folder / TOKENIZER).write_text(json.dumps(_of_bytes()) + "\n")
        found["split_special_tokens"] = True  # text never becomes the end of a text
    else:
        return
    kept: Json = {k: v for k, v in found.items() if k in KEPT or k.endswith(("_token", "_tokens"))}
    if ends and (end := special_token(read_json(folder / TOKENIZER), ends[0])):
        kept.setdefault("eos_token", end)
    if "eos_token" in kept:
        kept.setdefault("pad_token", kept["eos_token"])
    # Generation continues rows on the right. The classes of language models take no `token_type_ids`.
    kept.setdefault("padding_side", "left")
    inputs = ["input_ids", "attention_mask"]
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **kept}
    _write_json(folder / TOKENIZER_CONFIG, content)


def _copy_tokenizer(source: Path, folder: Path, others: Sequence[str] = ()) -> None:
    """Copy a tokenizer.json, and its chat template and `others` beside it, as far as they exist."""
    for file in (source, *map(source.with_name, (TEMPLATE, *others))):
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
