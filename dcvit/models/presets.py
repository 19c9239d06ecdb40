"""Language models of the paper by name: architectures, and sizes from Tables 3, 4 and 6.

The models "DCFlash-…" are not in the paper: they are DCFormer++ in which four query heads share a key head, and are
composed query-wise with each other, so that composition folds into any plain attention (`dcvit.dcmha.folded`).
"""

from __future__ import annotations

import difflib
import math
from typing import Any

# depth, width, heads, MLP width of the SwiGLU models (8/3·M, rounded up to a multiple of 256).
SIZES = {
    "405M": (24, 1024, 16, 2816),  # Table 3
    "834M": (24, 1536, 24, 4096),
    "1.4B": (24, 2048, 32, 5632),
    "2.8B": (32, 2560, 32, 6912),  # Table 6: Pythia's shapes
    "6.9B": (32, 4096, 32, 11008),  # and LLaMA's
    "13B": (40, 5120, 40, 13824),
    "33B": (60, 6656, 52, 17920),
}
PYTHIA_SIZES = {"2.8B": (32, 2560, 32), "6.9B": (32, 4096, 32), "12B": (36, 5120, 40)}

GPT3 = {
    "position": "learned", "norm": "layernorm", "norm_epsilon": 1e-5, "mlp": "gelu_tanh", "use_bias": True,
}  # fmt: skip
LLAMA = {"position": "rotary", "norm": "rmsnorm", "norm_epsilon": 1e-6, "mlp": "swiglu", "use_bias": False}
PYTHIA = {
    "position": "rotary", "rotary_fraction": 0.25, "norm": "layernorm", "norm_epsilon": 1e-5, "mlp": "gelu",
    "use_bias": True, "parallel": True,
}  # fmt: skip
COMPOSED = {"compose": "both", "window_pattern": "1:1"}


def _presets() -> dict[str, dict[str, Any]]:
    """Return the fields of `dcvit.models.lm.LM` for each model that the paper trains or times, and for DCFlash."""
    presets: dict[str, dict[str, Any]] = {}
    for size, (depth, width, heads, mlp_dim) in SIZES.items():
        shape = {"depth": depth, "width": width, "num_heads": heads}
        qk_norm = {"qk_norm": "rmsnorm"} if size in ("405M", "834M", "1.4B") else {}  # as released: used up to 1.4B
        composed = COMPOSED | qk_norm
        if qk_norm:  # the sizes of Table 3
            presets[f"Transformer-{size}"] = GPT3 | shape
            presets[f"DCFormer-{size}"] = GPT3 | shape | composed
        presets[f"Transformer++-{size}"] = LLAMA | shape | {"mlp_dim": mlp_dim}
        presets[f"DCFormer++-{size}"] = LLAMA | shape | {"mlp_dim": mlp_dim} | composed
        grouped = {"num_key_heads": heads // 4, "groups": heads // 4, "branches": "q"}
        presets[f"DCFlash-{size}"] = presets[f"DCFormer++-{size}"] | grouped
    for size, (depth, width, heads) in PYTHIA_SIZES.items():
        # GPT-NeoX's "small init" (Nguyen and Salazar, 2019) and "Wang init" (Wang and Komatsuzaki, 2021).
        init = {"init_std": math.sqrt(2 / (5 * width)), "out_init_std": 2 / (depth * math.sqrt(width))}
        shape = {"depth": depth, "width": width, "num_heads": heads}
        presets[f"Pythia-{size}"] = PYTHIA | shape | init
        if size != "12B":
            presets[f"DCPythia-{size}"] = PYTHIA | shape | init | COMPOSED | {"qk_norm": "rmsnorm"}
    return presets


PRESETS = _presets()


def decode_preset(preset: str | None) -> dict[str, Any]:
    """Return the fields of a preset, such as "DCFormer++-405M".

    Raises:
      ValueError: the preset is unknown; the message names the nearest ones.
    """
    if preset is None:
        return {}
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=3, cutoff=0.0)
        raise ValueError(f"unknown preset {preset!r}; nearest: {', '.join(near)}")
    return dict(PRESETS[preset])
