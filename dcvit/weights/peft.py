"""LoRA adapters of the library PEFT: reading, merged into their base model, and writing of a run's adapters.

PEFT adds (lora_alpha/r)·B·A to the weight "out in" of a module, with A: r×in and B: out×r. Here (alpha/rank)·A·B is
added to a kernel "in out" (`dcvit.models.lora`), so that both factors are transposed. If several kernels here are one
module there, such as `query_key_value` of GPT-NeoX, A stacks their factors, and B is block-diagonal: the same function,
with r and lora_alpha multiplied by the number of adapted kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcvit.errors import CheckpointError, has_type
from dcvit.models.lora import A, Adaptation, B
from dcvit.models.trees import matrix_axes
from dcvit.parallel.trees import Shapes
from dcvit.weights.links import Link
from dcvit.weights.tensors import ADAPTER, Json, Tensor, Tensors, of_floats, open_file, read_json

FILE = "adapter_model.safetensors"
PREFIX, LOW, HIGH = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
MAX_ALPHA = float(np.finfo(np.float32).max)
# Properties of adapter_config.json that `merged` reads, or that do not change the function; all others must be off.
KNOWN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "target_modules", "task_type", "use_rslora",
))  # fmt: skip


def merged(base: Tensors, folder: Path) -> Tensors:
    """Return the tensors of a model with an adapter of PEFT, merged in float32 when a tensor is read.

    Args:
      base: the tensors of the adapted model.
      folder: the files of the adapter.

    Raises:
      CheckpointError: the adapter is damaged, is not plain LoRA of weights, or adapts a module that `base` lacks.
    """
    config = read_json(folder / ADAPTER)
    factors = of_floats(open_file(folder / FILE).tensors, folder / FILE)
    more = [key for key, value in config.items() if value and key not in KNOWN]
    more += ["peft_type"] if config.get("peft_type") != "LORA" else []
    more += ["init_lora_weights"] if config.get("init_lora_weights", True) not in (True, False, "gaussian") else []
    more += ["use_rslora"] if config.get("use_rslora") not in (None, True, False) else []
    if more:
        raise CheckpointError(f"{folder / ADAPTER}: {more[0]}={config.get(more[0])!r:.100} is not supported")
    modules = [name.removesuffix(LOW) for name in factors if name.endswith(LOW)]
    if other := sorted(factors.keys() ^ {module + end for module in modules for end in (LOW, HIGH)}):
        raise CheckpointError(f"{folder / FILE}: {other[0]} is missing, or no factor of a weight")
    tensors = dict(base)
    adapted: dict[str, str] = {}
    for module in modules:
        name = f"{module.removeprefix(PREFIX)}.weight"
        name = name if name in base else name.removeprefix("transformer.")  # as in the first files of GPT-2
        if name not in base:
            raise CheckpointError(f"{folder / FILE} adapts {name.removesuffix('.weight')}, which its base lacks")
        if adapted.setdefault(name, module) != module:
            raise CheckpointError(f"{folder / FILE}: {adapted[name]} and {module} adapt the same {name}")
        try:
            tensors[name] = _adapted(base[name], factors[module + LOW], factors[module + HIGH], config, module)
        except CheckpointError as e:
            raise CheckpointError(f"{folder}: {e}") from None
    return tensors


def _adapted(base: Tensor, low: Tensor, high: Tensor, config: Json, module: str) -> Tensor:
    """Return the weight `base` plus the scaled product of the factors `low` (A) and `high` (B), computed on demand."""
    in_out = re.search(r"[.]h[.]\d+[.]\w+[.]c_\w+$", module) is not None  # GPT-2, as PEFT corrects fan_in_fan_out
    outputs, *inputs = base.shape[::-1] if in_out else base.shape
    rank = low.shape[0] if low.shape else 0
    if rank < 1 or low.shape != (rank, *inputs) or high.shape != (outputs, rank):
        raise CheckpointError(f"factors of {low.shape} and {high.shape} do not fit {module} of {base.shape}")
    factor = np.float32(_alpha(config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def read() -> np.ndarray:
        update = factor * (np.asarray(high.read(), np.float32) @ np.asarray(low.read(), np.float32))
        return np.asarray(base.read(), np.float32) + (update.T if in_out else update)

    return Tensor(base.shape, read)


def _alpha(config: Json, module: str) -> float:
    """Return `lora_alpha` of a module; CheckpointError if `alpha_pattern` has patterns other than ends of names."""
    found = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"alpha_pattern={patterns!r:.100}; expected names of modules with their lora_alpha")
    for pattern, value in patterns.items():
        if not re.fullmatch(r"[\w.]+", pattern):
            raise CheckpointError(f"alpha_pattern={pattern!r:.100} is not supported; expected the name of a module")
        if f".{module}".endswith(f".{pattern}"):
            found = value
            break
    if found is None or not has_type(found, int | float) or not abs(found) <= MAX_ALPHA:
        raise CheckpointError(f"lora_alpha={found!r:.100} of {module}; expected a number")
    return float(found)


def tensors(links: Sequence[Link], factors: Tensors, model: Shapes, in_out: bool) -> dict[str, np.ndarray]:
    """Return the tensors, by PEFT's names, for adapters of this project.

    Args:
      links: links between the model of transformers and the parameters here.
      factors: A and B of each adapted kernel, by path in unrolled layers.
      model: the shapes of the model's parameters.
      in_out: the weights of transformers are "in out", as GPT-2's.
    """
    found = {}
    for link in links:
        if adapted := [path for path in link.ours if f"{path}/{A}" in factors]:
            module = PREFIX + link.theirs[0].removesuffix(".weight")
            low = np.concatenate([factors[f"{path}/{A}"].read().T for path in adapted])
            blocks, row = [], 0
            for path in link.ours:
                outputs = model[path][-(matrix_axes(path) or (0, 1))[1] :]
                blocks.append(np.zeros((len(low), *outputs), np.float32))
                if path in adapted:
                    high = factors[f"{path}/{B}"].read()
                    blocks[-1][row : row + len(high)] = high.reshape(-1, *outputs)
                    row += len(high)
            (weight,) = link.to_theirs(*blocks)
            found[module + LOW], found[module + HIGH] = low, weight.T if in_out else weight
    return found


def config(lora: Adaptation, tensors: dict[str, np.ndarray], base: Path, in_out: bool) -> Json:
    """Return the content of adapter_config.json for the adapters of a language model in the folder `base`."""
    ranks = {n.removeprefix(PREFIX).removesuffix(LOW): len(x) for n, x in tensors.items() if n.endswith(LOW)}
    joined = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base.absolute()),
        "r": lora.rank, "lora_alpha": lora.factor * lora.rank, "target_modules": list(ranks),
        "rank_pattern": joined, "alpha_pattern": {module: lora.factor * rank for module, rank in joined.items()},
        "fan_in_fan_out": in_out, "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
