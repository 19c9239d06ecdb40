"""Verification and timing of implementations on the device that runs them.

A kernel is selected automatically (`dcvit.dcmha.selection`) only if its output and gradients agree with those of a
reference on this device, for arrays of the same shapes and dtypes, and if it is the fastest of the implementations that
do. `verify` does this for the calls of attention in a function.

Each implementation is compiled and run in a thread of its own: a thread has no trace in progress, so verification also
works while the function that needs the verdict is traced, and the thread can be left behind if it blocks.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha import verdicts
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.shapes import Array
from dcvit.dcmha.verdicts import Verdict, Verdicts

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
Tree: TypeAlias = Any  # of arrays, or of their shapes and dtypes
# Largest relative error in the 2-norm; that of a row, relative to the mean row, may be four times as large. Products of
# 16-bit numbers have errors of 2^-9 and pass several roundings; on TPUs, operands of float32 products are rounded to
# bfloat16 at JAX's default precision, on GPUs to 10 bits (TF32).
BOUND, BOUND_FLOAT32 = verdicts.LARGEST_ERROR, 1e-4
SECONDS = 60.0  # limit of compiling, and of running, one implementation
RUNS = 5  # timed
REPETITIONS = 7  # at most; their results must equal those of the first run, because a race shows in some runs only
DOCUMENTS = 6  # of a row in a case with segments
TIMING_SECONDS = 5.0  # after which no further run is compared or timed
COMPILING = "compiling raised"


class DeviceHungError(RuntimeError):
    """An implementation does not finish on the device. Its verdict is kept: a new process does not run it again."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation, for arrays of given shapes and dtypes.

    Fields:
      label: short name for messages.
      key: text that determines the computation, the shapes and the dtypes.
      arrays: the argument of the functions, a tree of `jax.ShapeDtypeStruct`.
      candidates: functions of the tree by name, in the order in which they are tried without verdicts.
      kernels: the candidates that need a verdict.
      reference: the function in plain JAX operations to compare with.
      is_inference: only the output is timed, not the gradients, which are compared in any case.
    """

    label: str
    key: str
    arrays: Tree
    candidates: Mapping[str, Callable[[Tree], Array]]
    kernels: frozenset[str]
    reference: Callable[[Tree], Array]
    is_inference: bool = False


def shapes_of(arrays: Tree) -> Tree:
    """Return the shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def describe(arrays: Tree) -> str:
    """Return the names, dtypes and shapes of a tree of arrays, for the key of a case."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    return ", ".join(f"{name} {x.dtype}[{','.join(map(str, x.shape))}]" for name, x in named.items())


def examine(case: Case, store: Verdicts, seconds: float) -> dict[str, Verdict]:
    """Return the verdicts on all candidates; produce and keep those that are missing.

    Args:
      case: the computation.
      store: the verdicts of the device.
      seconds: limit of compiling, and of running, one implementation.

    Raises:
      DeviceHungError: one of them does not finish.
    """
    if not _missing(case, found := store.read(case.key)):
        return found
    with store.verifying():  # one process after the other: they time undisturbed, and find each other's verdicts
        return _examine(case, store, seconds)


def _missing(case: Case, found: Mapping[str, Verdict]) -> list[str]:
    """Return the candidates without a final verdict."""
    return [name for name in case.candidates if name not in found or found[name].status == verdicts.STARTED]


def _examine(case: Case, store: Verdicts, seconds: float) -> dict[str, Verdict]:
    """Compute `examine` in the only process that verifies the case."""
    found = store.read(case.key)
    if not (missing := _missing(case, found)):  # another process has verified it
        return found
    for name in [name for name in missing if name in case.kernels]:
        if reason := _why_unsupported(case, name, seconds):
            found[name] = Verdict(verdicts.UNSUPPORTED, reason=reason)
            store.write(case.key, name, found[name])
            missing.remove(name)
    if case.kernels and not any(name in missing or found[name].passed for name in case.kernels):
        return found
    LOG.info("attention: verifying %s for %s", ", ".join(missing), case.label)
    arrays = _random_arrays(case.arrays)
    cotangent = _normal(np.random.default_rng(1), jax.eval_shape(case.reference, case.arrays))
    try:
        expected = _in_thread(lambda: _reference(case, arrays, cotangent), 10 * seconds)
    except Exception as e:  # such as a lack of memory; the next start tries again
        LOG.warning("attention: cannot verify kernels for %s: the reference raised %s", case.label, _first_line(e))
        return {name: verdict for name, verdict in found.items() if name in case.kernels and not verdict.passed}
    for name in missing:
        before = found.get(name)  # an earlier process ended while it verified this candidate
        if before is not None and before.reason:
            found[name] = Verdict(verdicts.FAILED, reason="it ended its process twice")
            store.write(case.key, name, found[name])
            continue
        store.write(case.key, name, Verdict(verdicts.STARTED, reason="again" if before else ""))
        kept = before
        try:
            found[name] = _verdict(case, name, (arrays, cotangent), expected, seconds)
            if "RESOURCE_EXHAUSTED" not in found[name].reason or found[name].reason.startswith(COMPILING):
                kept = found[name]  # else there may be more memory at the next start
        except DeviceHungError as e:
            kept = Verdict(verdicts.TIMED_OUT, reason=str(e))
            raise
        finally:  # also if the user interrupts it
            store.write(case.key, name, kept)
    return found


def _why_unsupported(case: Case, name: str, seconds: float) -> str:
    """Return the reason for which a candidate does not support the case, or ""."""
    try:
        _in_thread(lambda: jax.eval_shape(case.candidates[name], case.arrays), seconds)
    except UnsupportedError as e:
        return str(e)
    except Exception:  # `_verdict` reports it
        return ""
    return ""


def _verdict(
    case: Case, name: str, inputs: tuple[Tree, np.ndarray], expected: list[np.ndarray], seconds: float
) -> Verdict:
    """Compile and run one candidate, compare its results with the expected ones, and time it."""
    try:
        programs = _in_thread(lambda: _compile(case, name, inputs), seconds)
    except UnsupportedError as e:
        return Verdict(verdicts.UNSUPPORTED, reason=str(e))
    except TimeoutError:
        return Verdict(verdicts.TIMED_OUT, reason=f"it was not compiled after {seconds:.0f} s")
    except Exception as e:
        return Verdict(verdicts.FAILED, reason=f"{COMPILING} {_first_line(e)}")
    is_kernel = name in case.kernels
    try:
        repetitions = REPETITIONS if is_kernel else 0
        results, difference, milliseconds = _in_thread(
            lambda: _run(programs, inputs, repetitions), seconds if is_kernel else 10 * seconds
        )
    except TimeoutError:
        if not is_kernel:  # it is slow
            return Verdict(verdicts.TIMED_OUT, reason=f"it did not finish in {10 * seconds:.0f} s")
        raise DeviceHungError(
            f"{name} did not finish on the device in {seconds:.0f} s for {case.label}; the same command will not use it"
        ) from None
    except Exception as e:
        return Verdict(verdicts.FAILED, reason=f"running raised {_first_line(e)}")
    errors = [_error(x, y) for x, y in zip(results, expected, strict=True)]
    worst = max(errors)
    if not worst <= _bound(case.arrays):
        return Verdict(
            verdicts.WRONG, worst if np.isfinite(worst) else None, milliseconds,
            f"the largest relative error of output and gradients is {worst:.1e}, above {_bound(case.arrays):.0e}",
        )  # fmt: skip
    if difference:
        return Verdict(verdicts.WRONG, worst, milliseconds, difference)
    return Verdict(verdicts.PASSED, worst, milliseconds)


def _compile(case: Case, name: str, inputs: tuple[Tree, np.ndarray]) -> list[Callable[..., list[Array]]]:
    """Return the compiled program of the output and the gradients, and the one that is timed."""
    candidate = case.candidates[name]
    functions = [_with_gradients(candidate)]
    if case.is_inference:
        functions.append(lambda arrays, cotangent: [candidate(arrays)])
    return [jax.jit(function).lower(*inputs).compile() for function in functions]


def _run(
    programs: Sequence[Callable[..., list[Array]]], inputs: tuple[Tree, np.ndarray], repetitions: int
) -> tuple[list[np.ndarray], str, float]:
    """Run the compiled programs.

    Returns:
      The results of the first program, in how many repetitions they differ ("" for none), and the median time of the
      last program in milliseconds.
    """
    placed = jax.device_put(inputs)
    first = programs[0](*placed)
    equal = jax.jit(lambda a, b: jnp.stack([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)]).all())
    made, differing, end = 0, 0, time.perf_counter() + TIMING_SECONDS
    while made < repetitions and (made == 0 or time.perf_counter() < end):
        differing += not equal(first, programs[0](*placed))
        made += 1
    difference = f"{differing} of {made} repetitions differ" if differing else ""
    results = jax.device_get(first)
    times: list[float] = []
    while len(times) < RUNS + 1 and sum(times) < TIMING_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(programs[-1](*placed))
        times.append(time.perf_counter() - start)
    return results, difference, statistics.median(times[1:] or times) * 1e3


def _reference(case: Case, arrays: Tree, cotangent: np.ndarray) -> list[np.ndarray]:
    """Return the output and the gradients of the reference, in float32 and from products at the highest precision."""
    wide = jax.tree.map(lambda x: x.astype(np.promote_types(x.dtype, np.float32)) if _is_float(x) else x, arrays)
    with jax.default_matmul_precision("highest"):
        results = jax.jit(_with_gradients(case.reference))(wide, cotangent.astype(np.float32))
    return list(jax.device_get(results))


def _with_gradients(function: Callable[[Tree], Array]) -> Callable[[Tree, Array], list[Array]]:
    """Return the function (arrays, cotangent) -> [output, gradients of the floating-point arrays]."""

    def run(arrays: Tree, cotangent: Array) -> list[Array]:
        leaves, structure = jax.tree_util.tree_flatten(arrays)
        places = [i for i, x in enumerate(leaves) if _is_float(x)]

        def of_floats(*floats: Array) -> Array:
            both = dict(enumerate(leaves)) | dict(zip(places, floats, strict=True))
            return function(jax.tree_util.tree_unflatten(structure, [both[i] for i in range(len(leaves))]))

        out, gradients = jax.vjp(of_floats, *[leaves[i] for i in places])
        return [out, *gradients(cotangent.astype(out.dtype))]

    return run


def _random_arrays(shapes: Tree) -> Tree:
    """Return normal numbers, smaller ones for compose weights, and masks with padded keys and a row without keys.

    Integers are segment ids: those of packed documents, the first of which occurs again at the end, and a query whose
    id no key has.
    """
    random = np.random.default_rng(0)

    def fill(path: Sequence[Any], x: jax.ShapeDtypeStruct) -> np.ndarray:
        if _is_float(x):
            is_weight = any(getattr(key, "name", "") in ("pre", "post") for key in path)
            return _normal(random, x, 0.3 if is_weight else 1.0)
        if x.dtype == np.int32:
            return _random_segments(x.shape, is_query=any(getattr(key, "name", "") == "queries" for key in path))
        mask: np.ndarray = random.random(x.shape) < 0.7
        mask[..., -max(1, x.shape[-1] // 8) :] = False
        if x.shape[-2] > 1:
            mask[0, ..., 0, :] = False
        return mask

    return jax.tree_util.tree_map_with_path(fill, shapes)


def _random_segments(shape: tuple[int, ...], *, is_query: bool) -> np.ndarray:
    """Return ids (B, N) of documents that begin at the same fractions of the queries and the keys of an example."""
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


def _is_float(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _bound(shapes: Tree) -> float:
    """Return the bound of the relative errors; see `BOUND`."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = jax.default_backend() == "cpu" or precision in ("highest", "float32")
    narrow = any(_is_float(x) and x.dtype.itemsize < 4 for x in jax.tree.leaves(shapes))
    return BOUND_FLOAT32 if exact and not narrow else BOUND


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return |found - expected| / |expected| in the 2-norm, or a fourth of the largest such ratio of a row.

    A row is compared with the larger of its norm and the root mean square norm. NaN if `found` is not finite.
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


def _in_thread(function: Callable[[], Result], seconds: float) -> Result:
    """Return the result of a function that runs in a new thread, on one device.

    Raises:
      TimeoutError: it did not return in time; the thread keeps running.
    """
    result: list[Result] = []
    errors: list[BaseException] = []
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # a thread has its own settings

    def run() -> None:
        try:
            with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
                result.append(function())
        except BaseException as e:  # raised again in the thread that waits
            errors.append(e)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError
    return result[0]
