"""Thresholds of a multi-label classifier, stored beside its run: the probability from which each class is predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from dcvit.errors import ConfigError, first_line
from dcvit.runs.files import Folder, replace

NAME = "thresholds.json"


class Thresholds(NamedTuple):
    """Thresholds of all classes, the evaluation on whose data they were chosen, and the step of the checkpoint."""

    values: tuple[float, ...]
    evaluation: str
    step: int | None

    @property
    def origin(self) -> str:
        """A sentence about where the thresholds were chosen."""
        at = "" if self.step is None else f" at step {self.step}"
        return f"The thresholds maximize F1 on {self.evaluation!r}{at}, where it is therefore optimistic."


def write(workdir: Folder, found: Thresholds, class_names: Sequence[str]) -> None:
    """Write thresholds to the workdir, by the names of the classes; an existing file is replaced."""
    by_name = dict(zip(class_names, found.values, strict=True))
    content = {"evaluation": found.evaluation, "step": found.step, "thresholds": by_name}
    replace(workdir / NAME, json.dumps(content, indent=2) + "\n")


def read(workdir: Folder, class_names: Sequence[str]) -> Thresholds | None:
    """Return the thresholds in a workdir; None if it has none.

    Raises:
      ConfigError: the file is damaged, or of other classes.
    """
    path = workdir / NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        by_name, evaluation, step = content["thresholds"], content["evaluation"], content["step"]
        values = tuple(float(by_name[name]) for name in class_names)
        if len(by_name) != len(class_names) or not all(0 <= value <= 1 for value in values):
            raise ValueError(f"expected a number from 0 to 1 for each of the {len(class_names)} classes")
    except KeyError as e:
        raise ConfigError(
            f"{path}: no entry {e}; remove the file, and choose them again with dcvit evaluate --thresholds"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    return Thresholds(values, str(evaluation), step if isinstance(step, int) else None)
