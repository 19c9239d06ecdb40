"""Plan of a call of attention: one table of backends (`BACKENDS`), and one function that chooses (`decide`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

import jax
import jax.numpy as jnp

from dcvit.dcmha import check, device, folded
from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.backends.xla.reference import Dropout
from dcvit.dcmha.check import Case
from dcvit.dcmha.device import splits_arrays
from dcvit.dcmha.inputs import Call, Inputs
from dcvit.dcmha.shapes import Array

LOG = logging.getLogger(__name__)
# Scores of one head; with fewer, `reference` computes plain attention on CPUs (docs/performance.md).
MAX_SCORES_FOR_PLAIN_XLA = 20_000
MAX_SCORES_TO_HOLD = 256 * 256  # scores of one head; with more, `reference` may be fast but takes too much memory
# Scores of all heads and examples, 4 GiB in float32. With as many, only dropout holds them on GPUs.
MAX_GPU_SCORES = 2**30

# Kinds of calls, by which the table says where a backend is tried: of one query, as in decoding; of few scores without
# composition on a CPU; all others, and those whose scores are not held on a GPU.
ONE, SMALL, PLAIN, COMPOSED, LONG_PLAIN, LONG_COMPOSED = (
    "one query", "small plain", "plain", "composed", "long plain", "long composed",
)  # fmt: skip


Value = TypeVar("Value")


class Backend(NamedTuple):
    """Implementation of attention, as the table `BACKENDS` lists it.

    Fields:
      module: name of its module in `dcvit.dcmha`, with two functions of a call: `supports` returns the reason why it
        does not compute the call, or None; `run` returns the outputs of the heads, (B T H D).
      tried: the kinds of calls for which it is a candidate, by platform; any call may name it explicitly.
      only_on: the only platform that runs it; None if all do.
      is_kernel: it is a Pallas kernel: it needs a verdict (`dcvit.dcmha.check`), and the compiler cannot split it
        over devices.
      is_fused: the scores stay on the chip. For `folded`, this depends on the plain attention inside it.
    """

    module: str
    tried: Mapping[str, tuple[str, ...]] = {}
    only_on: str | None = None
    is_kernel: bool = False
    is_fused: bool = False

    def load(self) -> ModuleType:
        """Import and return the module: Pallas' GPU part takes 0.1 to 0.2 s, and a platform needs only one backend."""
        return importlib.import_module(f"dcvit.dcmha.{self.module}")


# In the order in which they are tried (docs/performance.md). Attention of one query, as in decoding or in a pooling
# head, is a matrix-vector product: `decode` does not copy the keys.
BACKENDS = {
    "folded": Backend("folded", is_fused=True),  # first wherever it is exact, see `folds`; `attention` runs it
    "decode": Backend("backends.xla.decode", dict.fromkeys(("cpu", "gpu", "tpu"), (ONE,))),
    "cudnn": Backend("backends.cudnn", {"gpu": (PLAIN, LONG_PLAIN)}, "gpu", is_fused=True),
    "pallas_tpu": Backend("backends.tpu.api", {"tpu": (PLAIN, COMPOSED)}, "tpu", is_kernel=True, is_fused=True),
    "pallas_gpu": Backend("backends.gpu.api", {"gpu": (COMPOSED, LONG_COMPOSED)}, "gpu", is_kernel=True, is_fused=True),
    "elementwise": Backend("backends.xla.elementwise", {"gpu": (COMPOSED,)}),
    "blockwise": Backend(
        "backends.xla.blockwise",
        {"cpu": (PLAIN, COMPOSED), "tpu": (PLAIN, COMPOSED), "gpu": (LONG_PLAIN, LONG_COMPOSED)},
    ),
    "reference": Backend("backends.xla.reference", dict.fromkeys(("cpu", "gpu", "tpu"), (ONE, SMALL, PLAIN, COMPOSED))),
}

OF_PAIRS = ("decode", "elementwise", "reference")  # the backends that take `Inputs.composed`

Policy: TypeAlias = Literal["verify", "trust", "off"]
VARIABLE = "DCVIT_KERNELS"  # environment variable with the policy of code outside of `selecting`, and of training


@dataclasses.dataclass
class Selection:
    """Policy and verdicts by which kernels are selected in functions that are traced inside `selecting`.

    Fields:
      policy: "verify" selects kernels by verdicts, "trust" without verdicts, "off" selects no kernels.
      chosen: the name of the selected candidate by `Case.key`; "" stands for the first that needs no verdict. Existing
        entries are used without verdicts, so that a resumed run computes with the same implementations.
      verdicts: those of `dcvit.dcmha.check`; None reads the file of this process's device at the first need.
      cases: the calls for which verdicts were needed, by `Case.key`.
    """

    policy: Policy = "verify"
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)
    verdicts: check.Table | None = None
    cases: dict[str, Case] = dataclasses.field(default_factory=dict)


_SELECTION: ContextVar[Selection | None] = ContextVar("selection", default=None)
_DEFAULT = Selection()  # of code that is not inside `selecting`
_FUSED_ONLY: ContextVar[bool] = ContextVar("fused_only", default=False)
_RECORD: ContextVar[list[str] | None] = ContextVar("record", default=None)


class NotFusedError(ValueError):
    """The implementation of a call of attention inside `fused_only` is not fused (`Backend.is_fused`)."""


@contextlib.contextmanager
def _having(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Context manager: `variable` has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def selecting(selection: Selection) -> AbstractContextManager[Selection]:
    """Context manager: select kernels by `selection` in functions that are traced inside it."""
    return _having(_SELECTION, selection)  # type: ignore[arg-type]


def fused_only() -> AbstractContextManager[bool]:
    """Context manager: on GPUs and TPUs, `attention` of several queries raises NotFusedError if it is not fused."""
    return _having(_FUSED_ONLY, True)


def recording() -> AbstractContextManager[list[str]]:
    """Context manager: a list that receives the name of the backend of each call of attention that is traced in it."""
    return _having(_RECORD, [])  # type: ignore[arg-type]


def default_policy() -> Policy:
    """Return the policy in $DCVIT_KERNELS, by default "verify".

    Raises:
      ValueError: the variable is not the name of a policy.
    """
    found = os.environ.get(VARIABLE) or "verify"
    if found not in get_args(Policy):
        raise ValueError(f"{VARIABLE}={found!r}: expected 'verify', 'trust' or 'off'")
    return cast(Policy, found)


def current() -> Selection:
    """Return the selection set by `selecting`, or else one with `default_policy`, which may raise ValueError."""
    found = _SELECTION.get()
    if found is None:
        _DEFAULT.policy = default_policy()
    return found or _DEFAULT


def attention(call: Call, implementation: str | None = None, dropout: object = None) -> Array:
    """Return the outputs of the heads, (B T H D), computed by the backend that `decide` returns.

    Args:
      call: returned by `dcvit.dcmha.inputs.make_call`.
      implementation: a name from `BACKENDS`; None chooses the best.
      dropout: see `dcvit.dcmha.attention`.

    Raises:
      ValueError: as `decide`; or the dropout or the environment variable DCVIT_KERNELS is invalid.
    """
    if dropout is not None and not (isinstance(dropout, Dropout) and 0 <= dropout.rate <= 1):
        raise ValueError(f"dropout={dropout!r}: expected dcvit.dcmha.Dropout(key, rate) with a rate from 0 to 1")
    current()  # an invalid environment variable is an error also where no kernel exists
    if call.inputs.q.size == 0 and implementation in (None, *BACKENDS):
        return jnp.zeros_like(call.inputs.q)
    name = decide(call, implementation if dropout is None else implementation or "reference")
    if dropout is not None:
        if name != "reference":
            raise ValueError(f"implementation {name} does not support this case: only reference has dropout")
        return reference.run(call, dropout=dropout)
    if name != "pallas_tpu":
        call = dataclasses.replace(call, inputs=call.inputs._replace(hidden=None))
    if name == "folded":
        return folded.run(call, attend=attention, combine=combine_heads)
    out: Array = BACKENDS[name].load().run(call)
    return out


def decide(call: Call, implementation: str | None = None) -> str:
    """Return the name of the backend that computes a call: the named one, or the best of the `candidates`.

    The first candidate is the best, unless there are kernels: then verdicts decide (`select`). The choice and the
    reasons against others are logged.

    Raises:
      ValueError: the named implementation does not exist, does not support the call, or is not fused inside
        `fused_only`.
    """
    if implementation is not None:
        if implementation not in BACKENDS:
            raise ValueError(f"unknown implementation {implementation!r}; expected one of {', '.join(BACKENDS)}")
        name, note = implementation, ", as requested"
        if (reason := refusal(name, call, is_named=True)) is not None:
            raise ValueError(f"implementation {name} does not support this case: {reason}")
    else:
        names, reasons = candidates(call)
        kernels = [name for name in names if BACKENDS[name].is_kernel]
        name = next(name for name in names if name not in kernels)
        if kernels:
            name = select(make_case(names, call)) or name
        not_selected = "it is not selected (see dcvit check-kernels)"
        reasons |= {kernel: not_selected for kernel in kernels if kernel != name}
        note = "".join(f"; not {other}: {reason}" for other, reason in reasons.items())
    here, about = device.platform(), _describe(call)
    if _FUSED_ONLY.get() and here != "cpu" and call.inputs.q.shape[1] > 1 and not BACKENDS[name].is_fused:
        raise NotFusedError(f"attention is not fused: {name} on {here} for {about}{note}")
    LOG.info("attention: %s on %s for %s%s", name, here, about, note)
    if (record := _RECORD.get()) is not None:
        record.append(name)
    return name


def candidates(call: Call) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the backends to choose from for a call on the current platform, in the order of `BACKENDS`.

    These are the backends that the table lists for the kind of call, and that support it.

    Returns:
      The names, at least one, and the reasons against the others.
    """
    if folds(call):
        return ("folded",), {}
    here, kind = device.platform(), _kind(call)
    tried = [name for name, backend in BACKENDS.items() if kind in backend.tried.get(here, ())]
    refused = {name: reason for name in tried if (reason := refusal(name, call)) is not None}
    names = tuple(name for name in tried if name not in refused)
    return names or ("reference",), refused  # no name on another platform


def folds(call: Call, implementation: str | None = None, dropout: Dropout | None = None) -> bool:
    """Return True if the composition of a call is to be folded into the queries and outputs of plain attention.

    That is wherever folding is exact, without dropout and other named implementations: plain attention holds no scores
    in memory. With small models on CPUs, folding may not be the fastest.
    """
    return implementation in (None, "folded") and dropout is None and call.composition.foldable(call.inputs.k.shape[2])


def refusal(name: str, call: Call, *, is_named: bool = False) -> str | None:
    """Return the reason why a backend does not compute a call on the current platform and mesh, or None.

    The compiler cannot split kernels over devices: they need `jax.shard_map`, or a process with a single device.
    Without a mesh, a kernel that the caller named (`is_named`) is also allowed with several devices.
    """
    backend, here = BACKENDS[name], device.platform()
    if backend.only_on not in (None, here):
        return f"it needs a {str(backend.only_on).upper()}, found a {here.upper()}"
    if backend.is_kernel and splits_arrays():
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            axes = ", ".join(mesh.axis_names)
            return f"the compiler cannot split a kernel over the mesh axes {axes}; use jax.shard_map"
        if not is_named:
            warn_once(
                f"no fused kernels, because there are {jax.device_count()} devices and no mesh: call jax.set_mesh with "
                "a mesh of the axes data, fsdp, context or tensor, use jax.shard_map, or name the implementation in a "
                "program for one device"
            )
            return "the compiler cannot split a kernel over several devices, and no mesh is set"
    if call.inputs.composed is not None and name not in OF_PAIRS:
        return "the composition has a window of cached keys"
    reason: str | None = backend.load().supports(call)
    return reason


def combine_heads(x: Array, w: Array) -> Array:
    """Return the result of `dcvit.dcmha.folded.combine_heads` in the form that is the fastest on this platform.

    On CPUs that is a matrix product. On GPUs it is the sum, which took 0.6 (output) and 0.3 (with gradients) of the
    time of the product on an H200 (docs/gpu_attention.json). On TPUs a kernel replaces the sum if its verdict says so.
    Gates alone, which multiply the vector of each head by a number, are left to XLA's fusion.
    """
    here, mixes = device.platform(), w.shape[-1] > 1
    if mixes and here == "cpu":
        return folded.multiply_heads(x, w)
    if mixes and here == "tpu" and not splits_arrays():
        from dcvit.dcmha.backends.tpu import combine

        candidates = {
            "pallas_tpu": "dcvit.dcmha.backends.tpu.combine:combine_heads", "sum": "dcvit.dcmha.folded:combine_heads"
        }  # fmt: skip
        case = Case("combined heads", check.shapes_of({"x": x, "w": w}), {}, check.settings(), candidates)
        if combine.supports(x, w) is None and select(case) == "pallas_tpu":
            return combine.combine_heads(x, w)
    return folded.combine_heads(x, w)


def make_case(names: Sequence[str], call: Call) -> Case:
    """Return the `Case` whose verdicts determine which of the backends `names` a call uses."""
    is_long = call.inputs.q.shape[1] * call.inputs.k.shape[1] > MAX_SCORES_TO_HOLD
    functions = {
        name: f"dcvit.dcmha.{BACKENDS[name].module}:run" for name in names if name != "reference" or not is_long
    }
    arrays, options = check.shapes_of(call.inputs.once()), dataclasses.asdict(call.options)
    if options["compose_window"] is None:
        del options["compose_window"]  # verdicts of calls without it were kept before it existed
    if (hidden := call.inputs.hidden) is not None:
        options["hidden"] = dataclasses.asdict(hidden.layout)
    return Case(_describe(call), arrays, options, check.settings(), functions)


def select(case: Case) -> str:
    """Return the name of the candidate that the verdicts select; "" stands for the first that needs no verdict."""
    selection = current()
    if selection.policy != "verify":
        return next(iter(case.candidates)) if selection.policy == "trust" else ""
    selection.cases[case.key] = case
    name = selection.chosen.get(case.key)
    if name is not None and (not name or name in case.candidates):
        return name
    if selection.verdicts is None:
        selection.verdicts = _verdicts_of_this_device()
    found = selection.verdicts.get(case.key, {})
    for each in case.candidates.keys() & found.keys():
        if each.startswith("pallas_") and found[each]["status"] != check.PASSED:
            warn_once(f"{each} is not used for {case.label}: {found[each]['status']}: {found[each]['reason']}")
    if case.candidates.keys() - found.keys():
        warn_once(
            "kernels without a verdict for this device and the shapes of a call are not used; "
            "`dcvit check-kernels --config CONFIG` checks those of a config"
        )
        return ""  # no choice to keep: a run that is resumed with verdicts uses them
    name = selection.chosen[case.key] = check.fastest(case, found)
    return name


def _verdicts_of_this_device() -> check.Table:
    """Return the verdicts on this process's device; none, after a warning, where they could be those of another."""
    chip = device.attached()
    if chip is None:
        warn_once("the devices of the mesh are not attached to this host, and have no verdicts: no kernel is used")
    elif jax.process_count() > 1:
        warn_once("several processes could select different kernels: none is used; see Selection in dcvit.dcmha.plan")
    else:
        return check.read(check.environment(chip))
    return {}


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` as a warning, once in a process."""
    LOG.warning("attention: %s", message)


def _kind(call: Call) -> str:
    """Return the kind of a call, such as "plain" or "long composed", by which `Backend.tried` lists it.

    A part of the queries (`Options.first_query`) on a GPU counts as long, because `pallas_gpu` needs all queries.
    """
    queries, here = call.inputs.q.shape[1], device.platform()
    if queries == 1:
        return ONE
    if here == "gpu" and (call.options.first_query or is_long(call.inputs)):
        return LONG_PLAIN if call.is_plain else LONG_COMPOSED
    if here == "cpu" and call.is_plain and queries * call.inputs.k.shape[1] < MAX_SCORES_FOR_PLAIN_XLA:
        return SMALL
    return PLAIN if call.is_plain else COMPOSED


def is_long(inputs: Inputs) -> bool:
    """Return True if the examples together have too many scores to hold on a GPU by default."""
    batch, queries, heads, _ = inputs.q.shape
    return batch * heads * queries * inputs.k.shape[1] >= MAX_GPU_SCORES


def _describe(call: Call) -> str:
    """Return the dtype, shapes, composes and window of a call as text for the log."""
    inputs, options = call.inputs, call.options
    compositions = " and ".join(call.composition.names) or "plain"
    suffix = f", window {options.window}" if options.window is not None else ""
    suffix += f", composed in {options.compose_window}" if options.compose_window is not None else ""
    suffix += ", segments" if inputs.segments is not None else ""
    return f"{inputs.q.dtype}{list(inputs.q.shape)}, {inputs.k.shape[1]} keys, {compositions}{suffix}"
