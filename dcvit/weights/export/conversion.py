"""Conversion of a model to another format, which ends with a comparison of logits and of pixels."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError, ConfigError, InputError, first_line, first_line_with_type, nearest
from dcvit.runs import checksums
from dcvit.runs.files import check_name, rename
from dcvit.weights.export import card, check, formats, programs
from dcvit.weights.families import Weights

TOLERANCE = 1e-3  # largest difference of logits, in standard deviations of the logits
EPSILON = 1e-3  # smallest standard deviation for the tolerance
LEVEL = 1.0  # of 255; a larger mean difference of pixels is a warning. Pillow rounds, TensorFlow truncates: about 0.5
WRITERS: dict[str, Callable[[Weights, Path], None]] = {
    "dcvit": formats.write_dcvit,
    "npz": formats.write_npz,
    "safetensors": formats.write_safetensors,
    "hf": formats.write_hf,
    "timm": formats.write_timm,
    "onnx": programs.write_onnx,
    "stablehlo": programs.write_stablehlo,
}
# The library of a format and its logits; `None` where it cannot compute them, so that dcvit reads the result back.
EVALUATORS: dict[str, tuple[str, Callable[[Weights, Path, np.ndarray], np.ndarray | None]]] = {
    "hf": ("transformers", check.by_transformers),
    "timm": ("timm", check.by_timm),
    "onnx": ("onnxruntime", programs.run_onnx),
    "stablehlo": ("jax.export", programs.run_stablehlo),
}
PREPROCESSED = ("hf", "timm")  # formats that hold settings of preprocessing instead of a string
LOGITS_ONLY = ("timm", "onnx")  # formats that do not say whether probabilities are a softmax
Opener = Callable[[Path], Weights]
log = logging.getLogger(__name__)


class Report(NamedTuple):
    """The largest difference of two logits before and after a conversion, the largest one that is accepted, and the
    libraries that computed the logits; the largest and the mean difference of pixels in levels of 255, if compared.
    """

    difference: float
    allowed: float
    source: str
    result: str
    pixels: tuple[float, float] | None = None

    def __str__(self) -> str:
        logits = (
            f"largest difference of logits: {self.difference:.1e} (at most {self.allowed:.1e}); "
            f"source evaluated by {self.source}, result by {self.result}"
        )
        if self.pixels is None:
            return logits
        largest, mean = self.pixels
        return f"{logits}; pixels of a photo differ by at most {largest:.1f} of 255 levels, {mean:.2f} on average"


def convert(
    sources: Sequence[Path],
    target: Path,
    to: str,
    open_saved: Opener,
    combine: Callable[[Sequence[Weights]], Weights] | None = None,
) -> Report:
    """Convert a model, compare it with the result, move the result to `target`, and return a report.

    A process that is killed leaves a folder `.TARGET.unfinished-…` beside the target.

    Args:
      sources: workdirs, their checkpoints, or weights of other libraries; one without `combine`.
      target: a new folder.
      to: the format, of `WRITERS`.
      open_saved: function that opens a source and, for the comparison, results in this project's own formats.
      combine: function from the weights of several sources to those that are converted.

    Raises:
      ConfigError: the target exists, or the format is unknown.
      CheckpointError: the source is unusable, the format cannot express the model, or the logits differ; nothing is
        left at the target.
      OSError: a file cannot be written; nothing is left at the target.
    """
    if to not in WRITERS:
        raise ConfigError(f"--to {to}; {nearest(to, WRITERS, '--to ')}")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; give a new path")
    if to == "dcvit":
        check_name(target)
    for place in sources:
        if target.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"{target} is inside of {place}; give a path outside")
    opened = [open_saved(place) for place in sources]
    weights = combine(opened) if combine else opened[0]
    if weights.description.multilabel and to in LOGITS_ONLY:
        log.warning("%s cannot say that probabilities are sigmoids of the logits: programs may use a softmax", to)
    prefix = f".{target.name}.unfinished-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as name:
            report = _write(weights, Path(name), to, open_saved)
            rename(Path(name), target)
    except OSError as e:
        raise OSError(f"cannot write {target}: {e.strerror or first_line(e)}") from None
    except (CheckpointError, ConfigError, InputError):
        raise
    except Exception as e:  # each library has error types of its own
        raise CheckpointError(f"{weights.path} to {to}: {first_line_with_type(e)}") from e
    return report


def _write(weights: Weights, folder: Path, to: str, open_saved: Opener) -> Report:
    """Write all files of a conversion into a folder, and return the comparison."""
    WRITERS[to](weights, folder)
    formats.write_thresholds(weights, folder)
    report = compare(weights, folder, to, open_saved)
    if not report.difference <= report.allowed:
        raise CheckpointError(f"{weights.path} to {to}: {report}")
    card.write(weights, folder, to, str(report))
    if to != "dcvit":  # whose checkpoint has its own; training changes the other files
        checksums.write(folder, (card.CARD,), checksums.WEIGHTS)  # its author edits the card
    folder.chmod(0o755)  # `mkdtemp` allows only the owner
    return report


def compare(weights: Weights, folder: Path, to: str, open_saved: Opener) -> Report:
    """Return a comparison of a model with a folder in the format `to`.

    Raises:
      CheckpointError: the format cannot express the model, or some logits are not finite.
    """
    x = check.inputs(weights)
    expected, by = _source_logits(weights, x)
    result_by, evaluate = EVALUATORS.get(to, ("", lambda *_: None))
    found = evaluate(weights, folder, x)
    if found is None:
        result_by, found = "dcvit, which read the files back", check.by_dcvit(open_saved(folder), x)
    for side, values, library in (("source", expected, by), ("result", found, result_by)):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{weights.path} to {to}: the logits of the {side}, by {library}, are not finite")
    if np.ptp(expected) == 0:
        log.warning("all logits of %s are equal, as with a head of zeros: their comparison shows little", weights.path)
    same_shape = expected.shape == found.shape
    largest = float(np.abs(expected.astype(np.float64) - found).max()) if same_shape else float("inf")
    allowed = TOLERANCE * max(float(np.std(expected)), EPSILON)
    return Report(largest, allowed, by, result_by, _pixels(weights, to))


def _source_logits(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the logits of the source, and the library that computed them: transformers for its folders if possible."""
    if weights.family != "dcvit":
        try:
            if (found := check.by_transformers(weights, weights.path, x)) is not None:
                return found, "transformers"
        except CheckpointError as e:
            log.warning("dcvit evaluates the source, because transformers does not: %s", e)
    return check.by_dcvit(weights, x), "dcvit"


def _pixels(weights: Weights, to: str) -> tuple[float, float] | None:
    """Return the difference of the pixels that a format's settings yield, with a warning if it is large."""
    pp = weights.description.pp
    if to not in PREPROCESSED or not pp:
        return None
    try:
        largest, mean = check.pixel_difference(pp)
    except (CheckpointError, InputError) as e:
        log.warning("the preprocessing of the result was not compared with pp=%r: %s", pp, e)
        return None
    if mean > LEVEL:
        log.warning(
            "pixels of a photo by the written settings differ from those of pp=%r by up to %.1f of 255 levels, %.1f on "
            "average: other libraries resize with antialiasing", pp, largest, mean,
        )  # fmt: skip
    return largest, mean
