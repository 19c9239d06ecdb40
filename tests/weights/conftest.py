"""Makes transformers and timm importable where torchvision does not fit torch, before any test imports them."""

import importlib.util

if importlib.util.find_spec("torch"):
    import torchvision_ops  # noqa: F401
