"""Verification and timing of implementations on the device that runs them.

A kernel is selected automatically (`dcvit.dcmha.selection`) only if its output and gradients agree with those of a
reference on this device, for arrays of the same shapes and dtypes, and if it is the fastest of those that agree.

Each implementation is compiled and run in a thread of its own: a thread has no trace in progress, so verification also
works while the function that needs the verdict is traced, and the thread can be left behind if it blocks. While a
thread that was left behind runs, nothing is verified in its process.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
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
from dcvit.dcmha.numerics import is_float
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
SLOW = 10  # times as long may an implementation run that is no kernel
RUNS = 5  # timed
DOCUMENTS = 6  # of a row in a case with segments
TIMING_SECONDS = 5.0  # after which no further run is timed
COMPILING = "compiling raised"
# Settings of JAX that a thread has for itself: the names of the functions that set them.
SETTINGS = (
    "enable_x64", "default_matmul_precision", "default_prng_impl", "numpy_rank_promotion", "numpy_dtype_promotion",
)  # fmt: skip

_threads: list[threading.Thread] = []  # of all implementations


class DeviceHungError(RuntimeError):
    """An implementation does not finish. Its verdict is stored, so that a new process does not run it again."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation that has several implementations, for arrays of given shapes and dtypes.

    Fields:
      label: short name for messages.
      key: text that determines the computation, the shapes and the dtypes.
      arrays: shapes of the functions' argument, a tree of `jax.ShapeDtypeStruct`.
      candidates: functions of such a tree by name, in their order of preference without verdicts.
      kernels: names of the candidates that need a verdict to be selected.
      reference: the function in plain JAX operations to compare with.
    """

    label: str
    key: str
    arrays: Tree
    candidates: Mapping[str, Callable[[Tree], Array]]
    kernels: frozenset[str]
    reference: Callable[[Tree], Array]

    @property
    def default(self) -> str | None:
        """The name of the first candidate that needs no verdict; None if all need one."""
        return next((name for name in self.candidates if name not in self.kernels), None)


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` as a warning, once in a process."""
    LOG.warning("attention: %s", message)


def shapes_of(arrays: Tree) -> Tree:
    """Return the shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def describe(arrays: Tree) -> str:
    """Return the names, dtypes and shapes of a tree of arrays as text, for `Case.key`."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    return ", ".join(f"{name} {x.dtype}[{','.join(map(str, x.shape))}]" for name, x in named.items())


def examine(case: Case, store: Verdicts) -> dict[str, Verdict]:
    """Return the verdicts on all candidates by name; produce and store the missing ones.

    Verdicts stay missing while an implementation whose compilation timed out still compiles.

    Args:
      case: the computation.
      store: the verdicts of the device.

    Raises:
      DeviceHungError: a candidate does not finish on the device.
    """
    if not _missing(case, found := store.read(case.key)) or is_blocked():
        return found
    with store.verifying():  # one process after the other: they time undisturbed, and find each other's verdicts
        found = store.read(case.key)
        return _examine(case, store, found, _missing(case, found))


def _missing(case: Case, found: Mapping[str, Verdict]) -> list[str]:
    """Return the names of candidates without a verdict, the default first: its time is compared with others."""
    missing = [name for name in case.candidates if name not in found or found[name].status == verdicts.STARTED]
    return sorted(missing, key=lambda name: name != case.default)


def _examine(case: Case, store: Verdicts, found: dict[str, Verdict], missing: list[str]) -> dict[str, Verdict]:
    """Verify the candidates `missing`, store their verdicts, and return them with those in `found`; see `examine`."""
    if not missing:  # another process has verified them
        return found
    LOG.info("attention: verifying %s for %s", ", ".join(missing), case.label)
    arrays = _random_arrays(case.arrays)
    cotangent = _normal(np.random.default_rng(1), jax.eval_shape(case.reference, case.arrays))
    try:
        expected = _in_threads([lambda: _reference(case, arrays, cotangent)], SLOW * SECONDS)[0]
    except Exception as e:  # such as a lack of memory; the next start tries again
        LOG.warning("attention: cannot verify kernels for %s: the reference raised %s", case.label, _first_line(e))
        return {name: verdict for name, verdict in found.items() if name in case.kernels and not verdict.passed}
    for name in missing:
        if is_blocked():
            break
        if name in found:  # an earlier process has started it
            found[name] = Verdict(verdicts.FAILED, reason="it ended its process")
            store.write(case.key, name, found[name])
            continue
        store.write(case.key, name, Verdict(verdicts.STARTED))
        kept = None
        try:
            found[name] = _verdict(case, name, (arrays, cotangent), expected)
            if "RESOURCE_EXHAUSTED" not in found[name].reason or found[name].reason.startswith(COMPILING):
                kept = found[name]  # else there may be more memory at the next start
        except DeviceHungError as e:
            kept = Verdict(verdicts.TIMED_OUT, reason=str(e))
            raise
        finally:  # also if the user interrupts it
            store.write(case.key, name, kept)
    return found


def is_blocked() -> bool:
    """Return True, after a warning, while a thread that did not return in time runs: timings would be wrong."""
    busy = any(thread.is_alive() for thread in _threads)
    if busy:
        warn_once(
            "an implementation that did not compile in time still compiles: the fastest implementations measured so "
            "far are used"
        )
    return busy


def _verdict(case: Case, name: str, inputs: tuple[Tree, np.ndarray], expected: list[np.ndarray]) -> Verdict:
    """Return the verdict on one candidate: compile and run it, compare its results with `expected`, and time it."""
    is_kernel = name in case.kernels
    try:
        programs = _in_threads(_compilers(case.candidates[name], inputs), SECONDS)
    except TimeoutError:
        return Verdict(verdicts.TIMED_OUT, reason=f"it was not compiled after {SECONDS:.0f} s")
    except Exception as e:
        return Verdict(verdicts.FAILED, reason=f"{COMPILING} {_first_line(e)}")
    limit = SECONDS if is_kernel else SLOW * SECONDS  # a kernel that runs longer blocks the device
    try:
        results, repeats, times = _in_threads([lambda: _run(programs, inputs)], limit)[0]
    except TimeoutError:
        if not is_kernel:  # it is slow
            return Verdict(verdicts.TIMED_OUT, reason=f"it did not finish in {limit:.0f} s")
        raise DeviceHungError(
            f"{name} did not finish on the device in {limit:.0f} s for {case.label}; the same command will not use it"
        ) from None
    except Exception as e:
        return Verdict(verdicts.FAILED, reason=f"running raised {_first_line(e)}")
    worst = float(np.max([_error(x, y) for x, y in zip(results, expected, strict=True)]))  # NaN if one is NaN
    bound = _bound(case.arrays)
    difference = "two runs differ" if is_kernel and not repeats else ""  # by a race
    if not worst <= bound:
        difference = f"the largest relative error of output and gradients is {worst:.1e}, above {bound:.0e}"
    status = verdicts.WRONG if difference else verdicts.PASSED
    return Verdict(status, worst if np.isfinite(worst) else None, times[0], difference, times[1])


def _compilers(
    candidate: Callable[[Tree], Array], inputs: tuple[Tree, np.ndarray]
) -> list[Callable[[], Callable[..., list[Array]]]]:
    """Return two functions without arguments: one compiles output and gradients, the other the output alone."""
    functions = (_with_gradients(candidate), lambda arrays, cotangent: [candidate(arrays)])
    return [lambda f=function: jax.jit(f).lower(*inputs).compile() for function in functions]  # type: ignore[misc]


def _run(
    programs: Sequence[Callable[..., list[Array]]], inputs: tuple[Tree, np.ndarray]
) -> tuple[list[np.ndarray], bool, list[float]]:
    """Run the compiled programs.

    Returns:
      The results of the first program, whether a second run has the same, and the median time of each program in
      milliseconds.
    """
    placed = jax.device_put(inputs)
    equal = jax.jit(lambda a, b: jnp.stack([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)]).all())
    first = programs[0](*placed)
    repeats = bool(equal(first, programs[0](*placed)))
    return jax.device_get(first), repeats, [_milliseconds(program, placed) for program in programs]


def _milliseconds(program: Callable[..., list[Array]], placed: tuple[Tree, Array]) -> float:
    """Return the median time of a program in milliseconds."""
    times: list[float] = []
    while len(times) < RUNS + 1 and sum(times) < TIMING_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(program(*placed))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times) * 1e3


def _reference(case: Case, arrays: Tree, cotangent: np.ndarray) -> list[np.ndarray]:
    """Return the output and the gradients of the reference, in float32 and from products at the highest precision."""
    wide = jax.tree.map(lambda x: x.astype(np.promote_types(x.dtype, np.float32)) if is_float(x) else x, arrays)
    with jax.default_matmul_precision("highest"):
        results = jax.jit(_with_gradients(case.reference))(wide, cotangent.astype(np.float32))
    return list(jax.device_get(results))


def _with_gradients(function: Callable[[Tree], Array]) -> Callable[[Tree, Array], list[Array]]:
    """Return the function (arrays, cotangent) -> [output, gradients of the floating-point arrays]."""

    def run(arrays: Tree, cotangent: Array) -> list[Array]:
        leaves, structure = jax.tree_util.tree_flatten(arrays)
        places = [i for i, x in enumerate(leaves) if is_float(x)]

        def of_floats(*floats: Array) -> Array:
            both = dict(enumerate(leaves)) | dict(zip(places, floats, strict=True))
            return function(jax.tree_util.tree_unflatten(structure, [both[i] for i in range(len(leaves))]))

        out, gradients = jax.vjp(of_floats, *[leaves[i] for i in places])
        return [out, *gradients(cotangent.astype(out.dtype))]

    return run


def _random_arrays(shapes: Tree) -> Tree:
    """Return random arrays: normal numbers, smaller for compose weights; masks with padded keys and a row without keys.

    Integer arrays are segment ids of packed documents. The id of the first document occurs again at the end, and one
    query has an id that no key has.
    """
    random = np.random.default_rng(0)

    def fill(path: Sequence[Any], x: jax.ShapeDtypeStruct) -> np.ndarray:
        if is_float(x):
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


def _bound(shapes: Tree) -> float:
    """Return the largest relative error of a correct result for arrays of these dtypes; see `BOUND`."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = jax.default_backend() == "cpu" or precision in ("highest", "float32")
    narrow = any(is_float(x) and x.dtype.itemsize < 4 for x in jax.tree.leaves(shapes))
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


def _in_threads(functions: Sequence[Callable[[], Result]], seconds: float) -> list[Result]:
    """Call each function in a new thread, with the JAX settings of this thread, and return their results.

    Raises:
      TimeoutError: a function did not return after `seconds`; its thread keeps running.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
    values = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}  # of this thread

    def run(number: int) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(jax.set_mesh(mesh))
                for name, value in values.items():
                    stack.enter_context(getattr(jax, name)(value))
                results[number] = functions[number]()
        except BaseException as e:  # raised again in the thread that waits
            errors.append(e)

    end = time.perf_counter() + seconds
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, number), daemon=True)
        for number in range(len(functions))
    ]
    _threads.extend(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.perf_counter()))
    if errors:
        raise errors[0]
    if len(results) < len(functions):
        raise TimeoutError
    return [results[number] for number in range(len(functions))]
