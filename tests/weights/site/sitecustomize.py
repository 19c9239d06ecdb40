"""Makes transformers and timm importable in the subprocesses of tests; see `torchvision_ops`."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("torch"):
    sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))
    import torchvision_ops  # noqa: F401
