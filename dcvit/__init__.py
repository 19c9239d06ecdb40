"""Vision transformers and language models with Dynamically Composable Multi-Head Attention (DCMHA), in JAX.

In plain multi-head attention, heads work independently. DCMHA (Xiao et al., ICML 2024) mixes them: before the softmax
(pre-compose) and after it (post-compose), the H scores of each query-key pair are multiplied by a small H×H matrix that
is computed from the query and the key.

    dcvit.load("runs/W").predict("image.png")   a trained model, or weights of another library
    dcvit.DCMHA(num_heads=8)                    the flax layer, in place of nn.MultiHeadDotProductAttention
    dcvit.dcmha.attention(q, k, v, pre, post)   the same attention on JAX arrays
    dcvit.list_models()                         the names of trained models, which `load` opens
    dcvit.list_presets()                        the names of architectures, to train
    dcvit.quiet()                               no messages of a libtpu that finds no TPU

`import dcvit` imports no other library: these names import theirs when they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dcvit.versions import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from dcvit import dcmha
    from dcvit.inference.images import ImageModel
    from dcvit.inference.texts import LanguageModel
    from dcvit.models.dcmha import DCMHA

__all__ = ["DCMHA", "__version__", "dcmha", "list_models", "list_presets", "load", "quiet"]


def load(
    source: str | Path,
    *,
    config: str | None = None,
    sharding: str | None = None,
    image_size: int | Sequence[int] | None = None,
) -> ImageModel | LanguageModel:
    """Load a trained model, such as `dcvit.load("runs/W").predict("image.png")`.

    Args:
      source: a workdir, one of its checkpoints, weights of another library (see `dcvit.weights.families.FAMILIES`),
        the name of a model of the package: "digits", "tasks" or "text", or "hf:OWNER/NAME" with an optional /FOLDER and
        @REVISION, a repository of the Hugging Face Hub (see `dcvit.hub.repository`).
      config: "NAME[:key=value,…]", the config of a checkpoint that is in no workdir.
      sharding: splits the parameters over all devices as `config.sharding_strategy`: "fsdp", "tensor" or "ddp" (the
        whole model on each device). By default the model is on the first device.
      image_size: height and width of images, or one number for both, if other than the model was trained with. Learned
        position embeddings are interpolated, and the preprocessing is scaled.

    Raises:
      dcvit.errors.CheckpointError: the source is missing, damaged, of an unknown format, or does not fit its config.
      dcvit.errors.ConfigError: an argument or the config is invalid.
    """
    from dcvit.inference import model

    given = None if config is None else importlib.import_module("dcvit.config.load").load(config)
    return model.load(str(source), config=given, sharding=sharding, image_size=image_size)  # type: ignore[return-value]


def list_models() -> list[str]:
    """Return the names of the trained models of the package, each of which `load` opens."""
    from dcvit.hub import pretrained

    return pretrained.names()


def list_presets() -> list[str]:
    """Return the names of models to train: the `variant` of ViTs without patch size, and the `preset` of LMs.

    `dcvit.models.vit.Model(1000, variant="DCViT-S/16")` and `dcvit.models.lm.Model(50257, preset="DCFormer++-405M")`
    build them.
    """
    from dcvit.models import presets, vit

    return [f"{kind}-{size}" for kind in ("ViT", "DCViT") for size in vit.VARIANTS] + list(presets.PRESETS)


def quiet() -> None:
    """Skip libtpu on a machine without TPU, as the commands, `load` and `dcvit.training.train` do.

    It then prints no lines about its search for one. For code that uses the layers only: call it before the first use
    of a device; later, it has no effect. Where a TPU is present, nothing changes.
    """
    from dcvit.parallel import runtime

    runtime.skip_absent_tpu()


def __getattr__(name: str) -> Any:
    """Import `DCMHA` or `dcmha` when it is first used."""
    if name == "DCMHA":
        return importlib.import_module("dcvit.models.dcmha").DCMHA
    if name == "dcmha":
        return importlib.import_module("dcvit.dcmha")
    if name == "train":
        raise AttributeError("dcvit.train was removed in 0.3.0: from dcvit.training import train")
    raise AttributeError(f"module 'dcvit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
