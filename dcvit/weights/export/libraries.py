"""Logits of a folder of transformers or timm, computed by that library itself."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dcvit.errors import CheckpointError, first_line_with_type
from dcvit.weights import dcvit_hf
from dcvit.weights.lm_families import GPT2, GPT_NEOX, LLAMA
from dcvit.weights.tensors import Json, read_json

# Classes by model type whose inputs are images or tokens alone, and whose outputs are compared.
KNOWN: dict[str, tuple[str, ...]] = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "siglip": ("SiglipForImageClassification",),
    "siglip_vision_model": ("SiglipVisionModel",),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel"),
    "dinov3_vit": ("DINOv3ViTModel",),
    **{kind: (name,) for family in (GPT2, LLAMA, GPT_NEOX) for kind, name in family.classes.items()},
    dcvit_hf.IMAGE: ("DCViTForImageClassification", "DCViTModel"),
    dcvit_hf.TEXT: ("DCFormerForCausalLM",),
}
MAX_BYTES = 2 << 30  # of parameters; these libraries hold all of them in memory


def transformers_logits(folder: Path, x: np.ndarray) -> np.ndarray | None:
    """Return the logits, or else the features, that transformers computes for a folder.

    None if its config.json names no class of `KNOWN`, or transformers cannot import the class.

    Args:
      folder: config.json and weights. Code in the folder is not executed.
      x: images B height width channels, or tokens B T.

    Raises:
      CheckpointError: transformers cannot load the folder.
    """
    name = class_name(read_json(folder / "config.json"))
    if name is None:
        return None
    import torch
    import transformers

    library: ModuleType = transformers
    try:
        if name in itertools.chain(KNOWN[dcvit_hf.IMAGE], KNOWN[dcvit_hf.TEXT]):
            from dcvit.weights import modeling_dcvit as library
        model_class = getattr(library, name, None)
    except (ImportError, RuntimeError):  # transformers imports a class late; torchvision may not fit torch
        return None
    if model_class is None:
        return None
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            found = model.eval()(_torch(x))
    except Exception as e:  # transformers has many types of errors, of values in config.json and of shapes
        raise CheckpointError(f"{folder}: transformers cannot evaluate the model: {first_line_with_type(e)}") from None
    if "logits" in found:
        return np.asarray(found.logits.numpy())
    has_pooler = not any("pooler" in name for name in report["missing_keys"])  # a missing one has random weights
    return np.asarray((found.pooler_output if has_pooler else found.last_hidden_state[:, 0]).numpy())


def class_name(config: Json) -> str | None:
    """Return the class of `KNOWN` that a config.json names; None if it names another or none."""
    kind, names = config.get("model_type"), config.get("architectures")
    known = KNOWN.get(kind, ()) if isinstance(kind, str) else ()
    return next((name for name in known if names == [name]), None)


def timm_logits(folder: Path, x: np.ndarray) -> np.ndarray:
    """Return the logits that timm computes for a folder."""
    import timm
    import torch
    from safetensors.torch import load_file

    config = read_json(folder / "config.json")
    model = timm.create_model(config["architecture"], **config.get("model_args", {}), num_classes=config["num_classes"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        return np.asarray(model.eval()(_torch(x)).numpy())


def installed(*names: str) -> bool:
    """Return True if all modules can be imported; one that fails, as with incompatible versions, counts as absent."""
    try:
        return all(importlib.import_module(name) is not None for name in names)
    except (ImportError, RuntimeError):
        return False


def _torch(x: np.ndarray) -> Any:
    import torch

    images = x.ndim == 4
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2) if images else x.astype(np.int64)))
