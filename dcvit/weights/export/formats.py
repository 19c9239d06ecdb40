"""Writers of weights: each writes a model into an empty folder.

`npz` and `safetensors` have this project's parameter names, which are big_vision's for the plain ViT, and a
config.json with the description of the model. `dcvit` is a workdir. `hf` and `timm` have the names of transformers and
timm.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dcvit.config import values
from dcvit.config.keys import OWN_TOKENIZER
from dcvit.errors import CheckpointError
from dcvit.parallel.trees import nested
from dcvit.runs import steps
from dcvit.runs.checkpointer import Checkpointer
from dcvit.runs.files import replace
from dcvit.weights import dcvit_hf, hf_processor, names, own, preprocessing
from dcvit.weights import links as linking
from dcvit.weights.export import tokenizer_files
from dcvit.weights.families import WRITTEN, Weights
from dcvit.weights.family import Description, example
from dcvit.weights.safetensors_writer import write_shards
from dcvit.weights.tensors import GENERATION, PROCESSOR, Json, tokenizer_of

# Families of transformers by our models; the first that can express a model is used.
NATIVE = {"vit": ("hf_vit",), "lm": ("gpt2", "llama", "gpt_neox")}
OURS = "dcvit_hf"  # the family of `MODELING`
MODELING = Path(dcvit_hf.__file__).with_name(f"{dcvit_hf.MODULE}.py")
# Families whose folders transformers can evaluate.
TRANSFORMERS = (OURS, *NATIVE["vit"], "siglip", "dinov2", "dinov3", *NATIVE["lm"])
DATA = "data.json"  # of a run; it names the classes
SHARD_BYTES = 1 << 29  # the library that writes a shard needs as much memory again
ONE_FILE = sys.maxsize  # bytes of a shard that holds all tensors
log = logging.getLogger(__name__)


def write_npz(weights: Weights, folder: Path) -> None:
    """Write `params.npz`, one array at a time; `numpy.savez` would need all in memory."""
    with zipfile.ZipFile(folder / "params.npz", "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in weights.read():
            with archive.open(f"{own.ROOT}{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    _write_json(folder / "config.json", own.config(weights.description))


def write_safetensors(weights: Weights, folder: Path, max_shard_bytes: int | None = None) -> None:
    """Write `model.safetensors` or shards with an index; config.json and headers have `weights.description`."""
    size = max_shard_bytes or SHARD_BYTES
    write_shards(folder, weights.read(), max_shard_bytes=size, metadata=own.metadata(weights.description))
    _write_json(folder / "config.json", own.config(weights.description))


def write_dcvit(weights: Weights, folder: Path) -> None:
    """Write a workdir: a checkpoint of the parameters and a config, which is the run's if the model is from a run.

    Raises:
      CheckpointError: the model has no head.
    """
    if not weights.description.num_outputs:
        raise CheckpointError(f"{weights.path}: the model has no head, which a run needs; choose another format")
    params = nested(dict(weights.read()))
    tokenizer = tokenizer_of(weights.path)
    record = {**json.loads(json.dumps(values.defaults())), **_config(weights.description, tokenizer), **weights.record}
    if isinstance(record["model"], dict):
        record["model"] = {k: v for k, v in record["model"].items() if k != "scan"}
    if weights.workdir:
        for name in (DATA, "accepted.json"):
            if (weights.workdir / name).is_file():
                shutil.copyfile(weights.workdir / name, folder / name)
    if own_tokenizer := tokenizer_of(weights.workdir or weights.path):
        tokenizer_files.copy(own_tokenizer, folder)
    if weights.description.class_names and not weights.workdir:
        _write_json(folder / DATA, {"class_names": list(weights.description.class_names)})
    _write_json(folder / "config.json", record)
    about: Json = {"config": record}
    if (folder / DATA).is_file():
        about["data"] = json.loads((folder / DATA).read_text())
    checkpointer = Checkpointer(folder)
    try:
        checkpointer.save(steps.CONVERTED, {"params": params}, about)
    finally:
        checkpointer.close()


def _config(description: Description, tokenizer: Path | None) -> Json:
    """Return the entries of a config that describe a model and its tokens; `tokenizer` is a file in the workdir."""
    if others := list(description.end_tokens[1:]):
        end = description.end_tokens[0]
        log.warning("a run has one token that ends a text, here %d; others are lost: %s", end, others)
    found = names.config(description, tokenizer)
    if tokenizer and "input" in found:
        found["input"]["data"]["tokenizer"] = OWN_TOKENIZER
    return found


def native_family(weights: Weights, families: tuple[str, ...]) -> tuple[str, Json]:
    """Return the name of the first of `families` that can express a model, and the content of its config.json.

    Raises:
      CheckpointError: none can; the message has the reason of each.
    """
    reasons = []
    for name in families:
        try:
            return name, WRITTEN[name].config(weights.description)
        except CheckpointError as e:
            reasons.append(f"{name}: {e}")
    raise CheckpointError("; ".join(reasons))


def write_hf(weights: Weights, folder: Path) -> None:
    """Write a folder of transformers: the native class, or else this project's modeling file with its weights.

    Raises:
      CheckpointError: neither can express the model; the message names the field.
    """
    try:
        name, config = native_family(weights, NATIVE[weights.description.model_name])
    except CheckpointError as native:
        try:
            name, config = OURS, WRITTEN[OURS].config(weights.description)
        except CheckpointError as e:
            raise CheckpointError(f"{e} ({native})") from None
        shutil.copyfile(MODELING, folder / MODELING.name)
        log.info("transformers has no class for the model: %s", native)
    log.info("class of the model: %s", config["architectures"][0])
    labels = names.id2label(weights.description.class_names) if weights.description.class_names else {}
    problem = {"problem_type": names.MULTILABEL} if weights.description.multilabel else {}
    _write_json(folder / "config.json", {**config, **_image_size(weights), **labels, **problem})
    write_shards(folder, _theirs(name, weights), max_shard_bytes=SHARD_BYTES)
    if weights.description.model_name == "vit":
        try:
            _write_json(folder / PROCESSOR, hf_processor.write(weights.description.pp))
        except CheckpointError as e:
            log.info("%s is not written: %s", PROCESSOR, e)
        return
    found = [*weights.description.end_tokens, weights.description.fields.get("end_of_text")]
    ends = list(dict.fromkeys(end for end in found if end is not None))
    tokens: Json = {"eos_token_id": ends if ends[1:] else ends[0], "pad_token_id": ends[0]} if ends else {}
    _write_json(folder / GENERATION, tokens)
    tokenizer_files.write_hf(weights, folder, ends)


def _image_size(weights: Weights) -> Json:
    """Return the entries of config.json for the size and the channels of images; {} for a language model."""
    if weights.description.model_name == "lm":
        return {}
    *size, channels = example(weights.description, weights.params).shape[1:]
    return {"image_size": preprocessing.square(size), "num_channels": channels}


def write_timm(weights: Weights, folder: Path) -> None:
    """Write `model.safetensors` and config.json for timm, which reads a single file.

    Raises:
      CheckpointError: timm cannot express the model; the message names the field.
    """
    name, config = native_family(weights, ("timm",))
    labels = {"label_names": list(weights.description.class_names)} if weights.description.class_names else {}
    _write_json(folder / "config.json", {**config, **labels})
    write_shards(folder, _theirs(name, weights), max_shard_bytes=ONE_FILE)


def _theirs(family: str, weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    return linking.write(WRITTEN[family].links(weights.description), weights.params)


def _write_json(path: Path, content: Json) -> None:
    replace(path, json.dumps(content, indent=2) + "\n")
