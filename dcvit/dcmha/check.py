"""Verdicts on Pallas kernels: each is compared with a reference and timed in a process of its own.

`dcvit.dcmha.plan` selects a kernel only if a verdict for this kind of device, these versions and the same shapes says
that its output and all gradients are finite and right, and that it is the fastest of the candidates. The process that
asks for verdicts opens no device: for each case and candidate it starts a child with one time limit, so that a kernel
that hangs, crashes or does not compile costs one bad verdict, and nothing else.

Verdicts are JSON files in $DCVIT_CACHE, or else `dcvit/kernels` in $XDG_CACHE_HOME or `~/.cache`: one file for each
kind of device and versions of JAX, its backend and this package.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypedDict

import jax
import numpy as np

from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.compose import Columns, ComposeWeights, HiddenLayout, HiddenWeights
from dcvit.dcmha.inputs import Call, Composition, Inputs, Options
from dcvit.dcmha.numerics import is_float
from dcvit.dcmha.segments import Segments
from dcvit.dcmha.shapes import Array
from dcvit.versions import __version__

LOG = logging.getLogger(__name__)
SECONDS = 900.0  # limit of a child, which starts JAX, compiles and runs the reference and one candidate
# Python code by which a process is killed when its parent ends; without it, a kernel that hangs keeps the device.
END_WITH_PARENT = "import ctypes, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9)"
# Largest relative error in the 2-norm; that of a row, relative to the mean row, may be four times as large. Products of
# 16-bit numbers have errors of 2^-9 and pass several roundings; on TPUs, operands of float32 products are rounded to
# bfloat16 at JAX's default precision, on GPUs to 10 bits (TF32).
BOUND, BOUND_FLOAT32 = 2e-2, 1e-4
MOST_SCORES = 2**30  # of one example in the reference
RUNS = 5  # timed
DOCUMENTS = 6  # of a row in a case with segments
PASSED, WRONG, FAILED, TIMED_OUT, UNCHECKED = "passed", "wrong", "failed", "timed out", "unchecked"
BAD = (WRONG, FAILED, TIMED_OUT)
SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64")  # that change how a call is computed or supported

Arrays: TypeAlias = Mapping[str, Any]  # by name: fields of `Inputs`, such as "q" and "pre.q1"
Shapes: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of arrays by name
Computation: TypeAlias = Callable[[Arrays], Array]


class Verdict(TypedDict, total=False):
    """Result of checking one candidate.

    Fields:
      status: one of the names above. "unchecked", because the reference failed, is not kept.
      error: largest relative error of output and gradients; None if unknown or not finite.
      ms: median milliseconds of the output and all gradients.
      reason: why the status is not "passed".
    """

    status: str
    error: float | None
    ms: float
    reason: str


class Case(NamedTuple):
    """A call that a kernel may compute, as JSON data. A function is "MODULE:NAME".

    Fields:
      label: short text for messages.
      arrays: dtype and shape of each array by name.
      options: the fields of `Options` for a call of attention; empty for `combine_heads`, whose arrays are "x" and "w".
      settings: values of the JAX settings `SETTINGS`.
      candidates: the functions that compute it, by name, in their order of preference; kernels start with "pallas_".
    """

    label: str
    arrays: Shapes
    options: Mapping[str, object]
    settings: Mapping[str, object]
    candidates: Mapping[str, str]

    @property
    def key(self) -> str:
        """The text that determines the computation, by which verdicts are kept."""
        return json.dumps([self.arrays, self.options, self.settings])

    def function(self, name: str) -> Computation:
        """Import a function "MODULE:NAME", and return it as a function of the arrays."""
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not self.options:
            return lambda arrays: found(arrays["x"], arrays["w"])
        return lambda arrays: found(call_of(arrays, self.options))


Table: TypeAlias = dict[str, dict[str, Verdict]]  # verdicts by the key of a case and the name of a candidate


class ChildError(Exception):
    """A child process did not end in time, or failed; `status` is `TIMED_OUT` or `FAILED`."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


def settings() -> dict[str, object]:
    """Return the values of the JAX settings `SETTINGS`."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


def shapes_of(arrays: object) -> Shapes:
    """Return dtype and shape of each array of a tree, by its path, such as "pre.q1"."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path, simple=True, separator="."): (str(x.dtype), x.shape) for path, x in leaves}


def call_of(arrays: Arrays, options: Mapping[str, Any]) -> Call:
    """Return the call of attention with these arrays and options."""
    nested: dict[str, dict[str, Any]] = {}
    for name, x in arrays.items():
        place, _, field = name.rpartition(".")
        nested.setdefault(place, {})[field] = x
    options = dict(options)
    kinds = {"pre": ComposeWeights, "post": ComposeWeights, "segments": Segments}
    if (layout := options.pop("hidden", None)) is not None:  # the fields of `HiddenLayout`
        columns = tuple(Columns(*each) for each in layout["columns"])
        hidden = HiddenWeights(**nested.pop("hidden"), layout=HiddenLayout(**{**layout, "columns": columns}))
        for name, weights in hidden.weights().items():
            nested.setdefault(name, {}).update(weights)
        nested[""]["hidden"] = hidden
    inputs = Inputs(**nested.pop(""), **{name: kinds[name](**fields) for name, fields in nested.items()})
    found, composition = Options(**options), Composition.of_weights(inputs.pre, inputs.post, options["groups"])
    return Call(inputs, found, dataclasses.replace(composition, compose_window=found.compose_window))


def environment(device: jax.Device) -> dict[str, str]:
    """Return the properties that verdicts depend on: kind of device, versions of JAX, its backend and this package."""
    return {
        "device": device.device_kind, "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": " ".join(device.client.platform_version.split()), "dcvit": __version__,
    }  # fmt: skip


def path(environment: Mapping[str, str]) -> Path:
    """Return the file with the verdicts of an environment, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never raises
    folder = Path(os.environ.get("DCVIT_CACHE") or Path(base) / "dcvit" / "kernels")
    return folder / (re.sub(r"[^\w.]+", "-", " ".join(environment.values()))[:200] + ".json")


def read(environment: Mapping[str, str]) -> Table:
    """Return the verdicts of an environment; none, after a warning, if the file is damaged."""
    file = path(environment)
    try:
        table: Table = json.loads(file.read_text())["cases"]
        for verdict in [verdict for found in table.values() for verdict in found.values()]:
            _ = verdict["status"], verdict["reason"]
        return table
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        LOG.warning("attention: ignored the verdicts in %s: %s", file, e)
        return {}


def write(environment: Mapping[str, str], key: str, name: str, verdict: Verdict) -> None:
    """Add a verdict to the file of an environment. OSError is logged, not raised."""
    file, table = path(environment), read(environment)
    table.setdefault(key, {})[name] = verdict
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")  # renamed, because other processes read the file
        fresh.write_text(json.dumps({"environment": environment, "cases": table}, indent=1))
        fresh.replace(file)
    except OSError as e:
        LOG.warning("attention: verdicts are not kept: %s", e)


def examine(case: Case, environment: Mapping[str, str], seconds: float = SECONDS) -> dict[str, Verdict]:
    """Return the verdicts on all candidates of a case by name; missing ones are produced in children and written."""
    found = read(environment).get(case.key, {})
    for name in [name for name in case.candidates if name not in found]:
        try:
            request = {"case": case._asdict(), "name": name}
            found[name] = run_child("from dcvit.dcmha.check import main; main()", request, seconds)
        except ChildError as e:
            found[name] = Verdict(status=e.status, reason=str(e))
        if found[name]["status"] == UNCHECKED:
            LOG.warning("attention: cannot check %s for %s: %s", name, case.label, found[name]["reason"])
        else:
            write(environment, case.key, name, found[name])
    return found


def fastest(case: Case, found: Mapping[str, Verdict]) -> str:
    """Return the candidate that passed in the shortest time, of verdicts on all candidates; "" if none passed."""
    passed = [name for name in case.candidates if found[name]["status"] == PASSED]
    return min(passed, key=lambda name: found[name]["ms"], default="")


def run_child(code: str, request: object, seconds: float) -> Any:
    """Run Python code in a process of its own, with `request` as JSON on stdin; return the JSON of its last line.

    The process imports from the same places as this one, and on Linux it ends with it.

    Raises:
      ChildError: it did not end in time, or failed.
    """
    command, pipe = [sys.executable, "-P", "-c", f"{END_WITH_PARENT}; {code}"], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment,
        start_new_session=True,
    ) as child:  # fmt: skip
        try:
            out, errors = child.communicate(json.dumps(request), timeout=seconds)
        except BaseException as e:  # Ctrl-C does not reach the child
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(e, subprocess.TimeoutExpired):
                raise ChildError(TIMED_OUT, f"it did not end in {seconds:.0f} s") from None
            raise
    last_error, last = ([line for line in text.splitlines() if line.strip()] or [""] for text in (errors, out))
    if child.returncode:
        raise ChildError(FAILED, f"its process ended with status {child.returncode}: {last_error[-1]}")
    try:
        return json.loads(last[-1])
    except ValueError:
        raise ChildError(FAILED, f"its process printed no result: {last[-1]}") from None


def main() -> None:
    """Check one candidate on this process's first device: read case and name from stdin, and print the verdict."""
    request = json.load(sys.stdin)
    case = Case(**request["case"])
    for name, value in case.settings.items():
        jax.config.update(name, value)
    try:
        device = jax.local_devices()[:1]
    except Exception as e:
        print(json.dumps(Verdict(status=UNCHECKED, reason=f"no device can be opened: {_first_line(e)}")))
        return
    with jax.set_mesh(jax.sharding.Mesh(np.array(device), ("data",))):
        print(json.dumps(judge(case, request["name"])))


def judge(case: Case, name: str) -> Verdict:
    """Compile and run a candidate, forward and backward, compare its results with the reference, and time it."""
    arrays = _random_arrays(case.arrays)
    try:
        right = reference_of(case)
        cotangent = _normal(np.random.default_rng(1), jax.eval_shape(right, arrays))
        wide = {
            key: x.astype(np.promote_types(x.dtype, np.float32)) if is_float(x) else x for key, x in arrays.items()
        }  # fmt: skip
        with jax.default_matmul_precision("highest"):
            expected = jax.device_get(jax.jit(_with_gradients(right))(wide, cotangent.astype(np.float32)))
    except Exception as e:  # such as a lack of memory
        return Verdict(status=UNCHECKED, reason=f"the reference raised {_first_line(e)}")
    try:
        placed = jax.device_put((arrays, cotangent))
        candidate = case.function(case.candidates[name])
        both = jax.jit(_with_gradients(candidate)).lower(*placed).compile()
        forward = jax.jit(candidate).lower(placed[0]).compile()
        found, again = jax.device_get(both(*placed)), jax.device_get(both(*placed))
        ms = _milliseconds(both, *placed)
        alone = jax.device_get(forward(placed[0]))  # as inference computes it
    except Exception as e:
        status = UNCHECKED if "RESOURCE_EXHAUSTED" in str(e) else FAILED  # memory that another process holds
        return Verdict(status=status, reason=_first_line(e))
    pairs = [*zip(found, expected, strict=True), (alone, expected[0])]
    worst = float(np.max([_error(x, y) for x, y in pairs]))  # NaN if one is NaN
    bound, reason = _bound(arrays), ""
    if not worst <= bound:
        reason = f"the largest relative error of output and gradients is {worst:.1e}, above {bound:.0e}"
    elif name.startswith("pallas_") and not all(np.array_equal(x, y) for x, y in zip(found, again, strict=True)):
        reason = "two runs differ"  # by a race
    status, error = WRONG if reason else PASSED, worst if np.isfinite(worst) else None
    return Verdict(status=status, error=error, ms=ms, reason=reason)


def reference_of(case: Case) -> Computation:
    """Return the reference of a case in plain JAX: where the scores of an example are too many, that of blocks."""
    if not case.options:
        return case.function("dcvit.dcmha.folded:combine_heads")
    (batch, queries, heads, _), keys = case.arrays["q"][1], case.arrays["k"][1][1]
    if heads * queries * keys >= MOST_SCORES:
        return case.function("dcvit.dcmha.backends.xla.blockwise:run")

    def by_example(arrays: Arrays) -> Array:  # so that only the scores of one example are in memory
        shared = {name: x for name, x in arrays.items() if name.endswith((".static", ".second")) or len(x) != batch}
        own = {name: x for name, x in arrays.items() if name not in shared}

        def attend(one: Arrays) -> Array:
            call = call_of(shared | {name: x[None] for name, x in one.items()}, case.options)
            return reference.run(call)[0]

        out: Array = jax.lax.map(jax.checkpoint(attend), own)
        return out

    return by_example


def _milliseconds(program: Callable[..., object], *placed: object) -> float:
    """Return the median time of a program, which has run before, in milliseconds."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(program(*placed))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _with_gradients(function: Computation) -> Callable[[Arrays, Array], list[Array]]:
    """Return the function (arrays, cotangent) -> [output, gradients of the floating-point arrays]."""

    def run(arrays: Arrays, cotangent: Array) -> list[Array]:
        floats = {name: x for name, x in arrays.items() if is_float(x)}
        out, pull = jax.vjp(lambda floats: function({**arrays, **floats}), floats)
        return [out, *jax.tree.leaves(pull(cotangent.astype(out.dtype)))]

    return run


def _random_arrays(shapes: Shapes) -> dict[str, np.ndarray]:
    """Return random arrays: normal numbers, smaller for compose weights; masks with padded keys and a row without keys.

    Integer arrays are segment ids of packed documents. The id of the first document occurs again at the end, and one
    query has an id that no key has.
    """
    random, found = np.random.default_rng(0), dict[str, np.ndarray]()
    for name, (dtype, shape) in shapes.items():
        if dtype == "int32":
            found[name] = _random_segments(shape, is_query=name == "segments.queries")
        elif dtype == "bool":
            found[name] = np.less(random.random(shape), 0.7)
            found[name][..., -max(1, shape[-1] // 8) :] = False
            if shape[-2] > 1:
                found[name][0, ..., 0, :] = False
        else:
            scale = 0.05 if name == "hidden.second" else 0.3 if name.startswith(("pre.", "post.")) else 1.0
            found[name] = _normal(random, jax.ShapeDtypeStruct(tuple(shape), dtype), scale)
    return found


def _random_segments(shape: Sequence[int], *, is_query: bool) -> np.ndarray:
    """Return ids (B, N) of documents whose first tokens are at the same fractions of N for queries and keys."""
    batch, length = shape
    starts = np.random.default_rng(2).random((batch, DOCUMENTS))
    at = (np.arange(length) + 0.5) / length
    ids: np.ndarray = (at[None, None] > starts[:, :, None]).sum(1).astype(np.int32)
    ids[ids == DOCUMENTS] = 0
    if is_query and length > 1:
        ids[0, 0] = -1
    return ids


def _normal(random: np.random.Generator, x: jax.ShapeDtypeStruct, scale: float = 1.0) -> np.ndarray:
    found: np.ndarray = (random.standard_normal(x.shape, np.float32) * np.float32(scale)).astype(x.dtype)
    return found


def _bound(arrays: Arrays) -> float:
    """Return the largest relative error of a correct result for arrays of these dtypes; see `BOUND`."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = jax.default_backend() == "cpu" or precision in ("highest", "float32")
    narrow = any(is_float(x) and x.dtype.itemsize < 4 for x in arrays.values())
    return BOUND_FLOAT32 if exact and not narrow else BOUND


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the larger of the relative error |found - expected| / |expected| (2-norm), and 1/4 of that of any row.

    The error of a row is divided by the larger of its norm and the root mean square of all norms. NaN if `found` is not
    finite.
    """
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if not np.isfinite(a).all():
        return float("nan")
    total = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6 * np.sqrt(b.size))
    norms = np.linalg.norm(b.reshape(-1, b.shape[-1]), axis=-1)
    floor = max(float(np.sqrt(np.mean(norms**2))), 1e-6 * np.sqrt(b.shape[-1]))
    rows = np.linalg.norm((a - b).reshape(-1, b.shape[-1]), axis=-1) / np.maximum(norms, floor)
    return float(max(total, np.max(rows) / 4))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
