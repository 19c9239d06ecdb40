"""The table of a model's parameters in the workdir of a run."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from dcvit.errors import first_line_with_type
from dcvit.runs.files import Folder, replace

FILE = "parameters.txt"
LOG = logging.getLogger(__name__)


def write_overview(workdir: Folder, params: Mapping[str, Any]) -> None:
    """Write name, shape, dtype and size of every parameter to `parameters.txt`; does nothing without the library clu.

    Args:
      workdir: the folder of the run.
      params: the parameters, or their shapes.
    """
    if importlib.util.find_spec("clu") is None:
        return
    try:
        from clu import parameter_overview
    except Exception as e:  # a broken installation, or too little memory
        LOG.warning("no %s: clu fails to load: %s", FILE, first_line_with_type(e))
        return

    table: str = parameter_overview.get_parameter_overview(params, include_stats=False)
    replace(workdir / FILE, table + "\n")
