"""Results that take long, computed once and stored as JSON beside the runs that they describe."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dcvit.errors import ConfigError, first_line
from dcvit.runs.files import replace

Value = TypeVar("Value", bound=object)


def stored(path: Path, source: object, compute: Callable[[], Value]) -> Value:
    """Return the value in a file, or compute it and write the file.

    Args:
      path: the file. It also holds `source`, and a checksum of both.
      source: what the value is computed from, as JSON: configs, or the checksum of a run.
      compute: returns the value, as JSON.

    Raises:
      ConfigError: the file is damaged, was changed, or its value was computed from something else.
    """
    if not path.is_file():
        found = {"source": source, "value": compute()}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps({**found, "crc32": checksum(found)}, indent=1, allow_nan=False) + "\n")
    try:
        content = json.loads(path.read_text())
        if content.pop("crc32", None) != checksum(content):
            raise ValueError("its checksum is missing or differs: it was changed")
        value: Value = content["value"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}; remove it to compute it again") from None
    if content["source"] != json.loads(json.dumps(source)):
        raise ConfigError(f"{path} was computed from other configs or another run; remove it to compute it again")
    return value


def checksum(content: object) -> str:
    """Return the CRC-32 of JSON as 8 hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def run_checksum(workdir: Path) -> str:
    """Return the CRC-32 of the metrics of a run, which tells it from every other one."""
    return f"{zlib.crc32((workdir / 'metrics.jsonl').read_bytes()):08x}"
