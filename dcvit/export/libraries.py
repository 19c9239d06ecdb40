"""Logits of a folder of transformers or timm, computed by that library itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dcvit.interop import dcvit_hf
from dcvit.interop.tensors import Json

WITH_TEXT = ("SiglipModel",)  # classes whose inputs are images and text
MAX_BYTES = 2 << 30  # of parameters; these libraries hold all of them in memory


def transformers_logits(folder: Path, x: np.ndarray) -> np.ndarray | None:
    """Return the logits, or else the features, that transformers computes for a folder.

    None if its config.json names no class that takes images or tokens alone, or transformers cannot import the class.

    Args:
      folder: config.json and weights. Code in the folder is not executed.
      x: images B height width channels, or tokens B T.
    """
    import torch
    import transformers

    config = _config(folder)
    name = (config.get("architectures") or [""])[0]
    library: ModuleType = transformers
    if config.get("model_type") in dcvit_hf.CLASSES:
        from dcvit.interop import modeling_dcvit as library
    try:
        model_class = getattr(library, str(name), None)
    except (ImportError, RuntimeError):  # transformers imports a class late; torchvision may not fit torch
        return None
    if model_class is None or name in WITH_TEXT:
        return None
    transformers.utils.logging.disable_progress_bar()
    model, report = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    has_pooler = not any("pooler" in name for name in report["missing_keys"])  # a missing one has random weights
    with torch.no_grad():
        found = model.eval()(_torch(x))
        if "logits" in found:
            return np.asarray(found.logits.numpy())
        return np.asarray((found.pooler_output if has_pooler else found.last_hidden_state[:, 0]).numpy())


def timm_logits(folder: Path, x: np.ndarray) -> np.ndarray:
    """Return the logits that timm computes for a folder."""
    import timm
    import torch
    from safetensors.torch import load_file

    config = _config(folder)
    model = timm.create_model(config["architecture"], **config.get("model_args", {}), num_classes=config["num_classes"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        return np.asarray(model.eval()(_torch(x)).numpy())


def installed(*names: str) -> bool:
    """Return True if all modules can be imported. An installation that does not fit another library is as none."""
    try:
        return all(importlib.import_module(name) is not None for name in names)
    except (ImportError, RuntimeError):
        return False


def _config(folder: Path) -> Json:
    found: Json = json.loads((folder / "config.json").read_text())
    return found


def _torch(x: np.ndarray) -> Any:
    import torch

    images = x.ndim == 4
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2) if images else x.astype(np.int64)))
