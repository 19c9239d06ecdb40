"""Report of a classifier's evaluation: one HTML file with everything inside.

`observe` attaches an `outcomes.Outcomes` to each classification evaluator before it runs; afterwards `page.render`
makes the page. `outcomes` counts predictions, `measures` computes metrics from the counts, `diagram` and `html` draw.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from dcvit.errors import ConfigError
from dcvit.evaluators import classification, multilabel
from dcvit.pages.report.outcomes import Outcomes

SUFFIXES = (".html", ".htm")


def check_path(path: Path, option: str = "--report") -> None:
    """Raise ConfigError if a page cannot be written to the path of an option; an existing page may be replaced."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option} {path}: expected a name ending in .html")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder, expected a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as e:
        raise ConfigError(f"{option} {path}: cannot write to the folder {path.parent}: {e.strerror}") from None


def observe(evaluators: Mapping[str, object]) -> dict[str, Outcomes]:
    """Attach `Outcomes` to each classification evaluator, which its next run fills, and return them by its name.

    A multi-label evaluator keeps the measures of its last run itself.

    Raises:
      ConfigError: there is neither a classification nor a multi-label evaluator.
    """
    found: dict[str, Outcomes] = {}
    for name, evaluator in evaluators.items():
        if isinstance(evaluator, classification.Evaluator):
            found[name] = evaluator.observer = Outcomes(sigmoid=evaluator.loss == "sigmoid_xent")
    if not found and not any(isinstance(evaluator, multilabel.Evaluator) for evaluator in evaluators.values()):
        types = ", ".join(sorted({type(e).__module__.rpartition(".")[2] for e in evaluators.values()}))
        raise ConfigError(
            "--report needs a classifier: no evaluator of type 'classification' or 'multilabel' in config.evals "
            f"({types})"
        )
    return found
