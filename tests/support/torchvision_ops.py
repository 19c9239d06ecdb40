"""The operators of torchvision's compiled part, which does not load beside another build of PyTorch; timm imports it.

Import this module before timm or transformers.
"""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:  # operator torchvision::nms does not exist
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
