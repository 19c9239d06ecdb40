"""Results of benchmarks in the documentation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def write(result: Mapping[str, object], table: str, out: Path, page: Path, marks: Sequence[str]) -> None:
    """Write the JSON of a result to `out`, and its table between two marks of a page."""
    begin, end = marks
    out.write_text(json.dumps(result, indent=1) + "\n")
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}")
