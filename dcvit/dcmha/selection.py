"""Selection of an implementation by the verdicts on the device, and the policy of a part of a program.

Without a verdict, an implementation that needs one is not selected. `dcvit.dcmha.verification` produces verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, TypeAlias, cast

import jax

from dcvit.dcmha import verdicts
from dcvit.dcmha.verdicts import Verdicts, fastest
from dcvit.dcmha.verification import SECONDS, Case, examine

LOG = logging.getLogger(__name__)
Policy: TypeAlias = Literal["verify", "known", "trust", "off"]
VARIABLE = "DCVIT_KERNELS"  # environment variable with the policy of code that is not inside `selecting`


@dataclasses.dataclass
class Selection:
    """Policy and choices by which kernels are selected in the code inside `selecting`.

    Fields:
      policy: "verify" produces missing verdicts, "known" uses those that exist, "trust" selects kernels without any,
        "off" selects none.
      seconds: limit of compiling, and of running, one implementation.
      chosen: the selected implementation by key of the case, "" if none passed. Entries that exist are used without
        verification, so that a resumed run computes with the same implementations.
      share: function (key, choose) -> name that makes the processes of a run agree: one process calls `choose`, and all
        get its result. Without it, several processes select no kernel.
    """

    policy: Policy = "verify"
    seconds: float = SECONDS
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)
    share: Callable[[str, Callable[[], str]], str] | None = None


_SELECTION: ContextVar[Selection | None] = ContextVar("selection", default=None)
_CHOSEN: dict[str, dict[str, str]] = {}  # by kind of device, in code that is not inside `selecting`


def default_policy() -> Policy:
    """Return the policy that $DCVIT_KERNELS names, "verify" if it is not set. Raises ValueError for another word."""
    policy = os.environ.get(VARIABLE) or "verify"
    if policy not in ("verify", "trust", "off"):
        raise ValueError(f"{VARIABLE}={policy!r}: expected 'verify', 'trust' or 'off'")
    return cast(Policy, policy)


def current() -> Selection:
    """Return the selection of `selecting`, or else the one by `default_policy`, which may raise ValueError."""
    return _SELECTION.get() or Selection(default_policy(), chosen=_CHOSEN.setdefault(_device_kind(), {}))


@contextlib.contextmanager
def selecting(selection: Selection) -> Iterator[Selection]:
    """Select kernels as `selection` says, in functions that are traced inside."""
    token = _SELECTION.set(selection)
    try:
        yield selection
    finally:
        _SELECTION.reset(token)


def verify(function: Callable[..., object], *args: object, seconds: float = SECONDS) -> dict[str, str]:
    """Verify and time the implementations of attention for each call of attention in a function.

    Programs that are traced later, in this process and others, use the fastest implementations that passed.

    Args:
      function: a function that calls `dcvit.dcmha.attention` or contains layers with DCMHA, such as a training step. It
        is traced, not run. JAX remembers traces of compiled functions: call this before their first use.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`.
      seconds: limit of compiling, and of running, one implementation.

    Returns:
      The selected implementation of each case that has kernels.

    Raises:
      DeviceHungError: an implementation does not finish on the device.
    """
    with selecting(Selection("verify", seconds)) as selection:
        jax.eval_shape(lambda *x: function(*x), *args)  # a new function, which has no trace yet
    return selection.chosen


def order(case: Case) -> tuple[str, ...]:
    """Return the candidates to try for a case: the selected one, then those that need no verdict."""
    selection = current()
    if not case.kernels or selection.policy == "trust":
        return tuple(case.candidates)
    name = selection.chosen.get(case.key) if selection.policy != "off" else ""
    if name is None or (name and name not in case.candidates):
        name = selection.chosen[case.key] = _choose_together(case, selection)
    return tuple(dict.fromkeys([*[name] * bool(name), *[n for n in case.candidates if n not in case.kernels]]))


def _choose_together(case: Case, selection: Selection) -> str:
    """Return the same name as all other processes of the run; "" if no kernel is to be used."""
    if selection.share is not None:
        name = selection.share(case.key, lambda: _choose(case, selection))
        _warn_of_disagreement(case, name)
        return name
    if jax.process_count() > 1:
        _warn_once("several processes could select different kernels: none is used; see dcvit.dcmha.selection")
        return ""
    return _choose(case, selection)


def _choose(case: Case, selection: Selection) -> str:
    """Return the fastest implementation that passed; "" if no verdict is known and none is to be produced."""
    device = _device()
    if device is None:
        _warn_once("the devices of the mesh are not attached to this host, so that no kernel can be verified")
        return ""
    store = Verdicts(verdicts.environment(device))
    found = examine(case, store, selection.seconds) if selection.policy == "verify" else store.read(case.key)
    if any(name not in found or found[name].status == verdicts.STARTED for name in case.kernels):
        _warn_once(
            f"{' and '.join(sorted(case.kernels))} are not verified on {device.device_kind}: slower implementations"
            " are used; run `dcvit check-kernels` or dcvit.dcmha.verify"
        )
        return ""
    for name, verdict in found.items():
        if name in case.kernels and verdict.status not in (verdicts.PASSED, verdicts.UNSUPPORTED):
            _warn_once(f"{name} is not used for {case.label}: {verdict.status}: {verdict.reason}")
    if not found.keys() >= case.candidates.keys():  # plain implementations were not timed: no kernel has passed
        return ""
    return fastest({name: found[name] for name in case.candidates})


def _warn_of_disagreement(case: Case, name: str) -> None:
    """Warn if this process, by an earlier verdict on its device, would not use the kernel that all processes use."""
    device = _device()
    verdict = None if device is None else Verdicts(verdicts.environment(device)).read(case.key).get(name)
    if name in case.kernels and verdict is not None and verdict.status not in (verdicts.PASSED, verdicts.STARTED):
        _warn_once(
            f"{name} is used for {case.label}, as process 0 selected it, although an earlier verdict on a device of "
            f"process {jax.process_index()} is: {verdict.status}: {verdict.reason}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    LOG.warning("attention: %s", message)


def _device() -> jax.Device | None:
    """Return the first device of this process, or None if the current mesh is of devices of another kind."""
    device = jax.local_devices()[0]
    return device if device.device_kind == _device_kind() else None


def _device_kind() -> str:
    """Return the kind of the devices of the current mesh, or of this process's without one."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    kind: str = jax.local_devices()[0].device_kind if device is None else device.device_kind
    return kind
