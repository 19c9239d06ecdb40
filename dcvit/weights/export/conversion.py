"""Conversion of a model to another format, which ends with a comparison of logits."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError, ConfigError, InputError, first_line, first_line_with_type, nearest
from dcvit.runs import checksums
from dcvit.runs.files import rename
from dcvit.weights.export import card, formats, libraries, logits, programs
from dcvit.weights.families import Weights, open_weights, verified

TOLERANCE = 1e-3  # largest difference of logits, in standard deviations of the logits
WRITERS: dict[str, Callable[[Weights, Path], None]] = {
    "dcvit": formats.write_dcvit,
    "npz": formats.write_npz,
    "safetensors": formats.write_safetensors,
    "hf": formats.write_hf,
    "timm": formats.write_timm,
    "onnx": programs.write_onnx,
    "stablehlo": programs.write_stablehlo,
}
LOGITS_ONLY = ("timm", "onnx")  # formats that do not say whether probabilities are a softmax
LIBRARIES = {"huggingface": "hf", "transformers": "hf", "big_vision": "npz"}
Opener = Callable[[Path], Weights]
log = logging.getLogger(__name__)


class Report(NamedTuple):
    """Result of comparing the logits of a model before and after conversion.

    Fields:
      difference: the largest absolute difference of two logits.
      allowed: the largest difference that is accepted.
      source, result: names of the libraries that computed the logits before and after.
    """

    difference: float
    allowed: float
    source: str
    result: str

    def __str__(self) -> str:
        return (
            f"largest difference of logits: {self.difference:.1e} (at most {self.allowed:.1e}); "
            f"source evaluated by {self.source}, result by {self.result}"
        )


def convert(
    sources: Sequence[Path],
    target: Path,
    to: str,
    open_saved: Opener,
    combine: Callable[[Sequence[Weights]], Weights] | None = None,
) -> Report:
    """Convert a model, compare its logits with those of the result, move the result to `target`; return a report.

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
        raise ConfigError(f"--to {to}; {nearest(LIBRARIES.get(to.lower(), to), WRITERS, '--to ')}")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; give a new path")
    for place in sources:
        if target.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"{target} is inside of {place}; give a path outside")
    opened = [open_saved(place) for place in sources]
    weights = combine(opened) if combine else opened[0]
    if weights.description.multilabel and to in LOGITS_ONLY:
        log.warning("%s cannot say that probabilities are sigmoids of the logits: programs may use a softmax", to)
    try:
        with _new_folder(target) as folder:
            _write(weights, folder, to)
            report = compare(weights, folder, to, open_saved)
            if not report.difference <= report.allowed:
                raise CheckpointError(f"{sources[0]} to {to}: {report}")
            card.write(weights, folder, to, str(report))
            if to != "dcvit":  # whose checkpoint has its own; training changes the other files
                checksums.write(folder, (card.CARD,), checksums.WEIGHTS)  # its author edits the card
            folder.chmod(0o755)  # `mkdtemp` allows only the owner
            rename(folder, target)
    except OSError as e:
        raise OSError(f"cannot write {target}: {e.strerror or first_line(e)}") from None
    return report


def _write(weights: Weights, folder: Path, to: str) -> None:
    """Write a model in a format. A library's failure to write, for instance to a full disk, becomes an OSError."""
    try:
        WRITERS[to](weights, folder)
    except (CheckpointError, ConfigError, InputError, OSError):
        raise
    except Exception as e:  # TensorStore and safetensors have error types of their own
        raise OSError(first_line_with_type(e)) from e


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside the target; remove it at the end, and after an error also parents made for it.

    A process that is killed leaves its folder, `.TARGET.unfinished-…`.
    """
    created = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.unfinished-", dir=target.parent, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
    finally:
        with contextlib.suppress(OSError):  # a parent with other content, such as the target
            for parent in created:
                parent.rmdir()


def compare(weights: Weights, folder: Path, to: str, open_saved: Opener) -> Report:
    """Return a comparison of the logits of a model with those of a folder in the format `to`, for real inputs.

    Raises:
      CheckpointError: the format cannot express the model, or some logits are not finite.
    """
    x = logits.inputs(weights)
    expected, by = _source_logits(weights, x)
    try:
        found, result_by = _result_logits(weights, folder, to, x) or (
            logits.compute(open_saved(folder), x), "dcvit, which read the files back"
        )  # fmt: skip
    except (CheckpointError, OSError):
        raise
    except Exception as e:  # each library has error types of its own
        raise CheckpointError(f"{to} cannot express the model: {first_line_with_type(e)}") from None
    for side, values, library in (("source", expected, by), ("result", found, result_by)):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{weights.path} to {to}: the logits of the {side}, by {library}, are not finite")
    if np.ptp(expected) == 0:
        log.warning("all logits of %s are equal, as with a head of zeros: their comparison shows little", weights.path)
    largest, scale = logits.difference(expected, found)
    return Report(largest, TOLERANCE * scale, by, result_by)


def _source_logits(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the logits of the source, and the library that computed them: the original one if possible."""
    small = weights.size * 4 <= libraries.MAX_BYTES
    if weights.family in formats.TRANSFORMERS and small and libraries.installed("torch", "transformers"):
        try:
            found = libraries.transformers_logits(weights.path, x) if weights.path.is_dir() else None
        except Exception as e:  # it has many types of exceptions for a file that it does not read
            log.warning("transformers cannot evaluate %s, so dcvit does: %s", weights.path, first_line_with_type(e))
            found = None
        if found is not None:
            return found, "transformers"
    return logits.compute(weights, x), "dcvit"


def _result_logits(weights: Weights, folder: Path, to: str, x: np.ndarray) -> tuple[np.ndarray, str] | None:
    """Return the logits of the result, and the library of the format that computed them; None if none can."""
    if to == "onnx":
        return programs.run_onnx(folder / programs.ONNX, x), "onnxruntime"
    if to == "stablehlo":
        return programs.run_stablehlo(folder / programs.STABLEHLO, verified(open_weights(folder)), x), "jax.export"
    if weights.size * 4 <= libraries.MAX_BYTES:
        if to == "hf" and libraries.installed("torch", "transformers"):
            found = libraries.transformers_logits(folder, x)
            if found is not None:
                return found, "transformers"
        if to == "timm" and libraries.installed("torch", "timm"):
            return libraries.timm_logits(folder, x), "timm"
    return None
