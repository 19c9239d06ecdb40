"""The table of a model's parameters in the workdir of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from dcvit.checkpoint.files import Folder, replace

FILE = "parameters.txt"


def write_overview(workdir: Folder, params: Mapping[str, Any]) -> None:
    """Write name, shape, dtype and size of every parameter to `parameters.txt`; does nothing without the library clu.

    Args:
      workdir: the folder of the run.
      params: the parameters, or their shapes.
    """
    if importlib.util.find_spec("clu") is None:
        return
    from clu import parameter_overview

    table: str = parameter_overview.get_parameter_overview(params, include_stats=False)
    replace(workdir / FILE, table + "\n")
