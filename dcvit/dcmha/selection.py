"""Automatic selection of kernels: the fastest candidate that was verified on this device, and policies for it.

A verdict is the result of verifying an implementation on the device. Without one, an implementation that needs it is
not selected. `dcvit.dcmha.verification` produces verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, TypeAlias, cast, get_args

import jax

from dcvit.dcmha import device, verdicts
from dcvit.dcmha.verdicts import Verdicts, fastest
from dcvit.dcmha.verification import Case, examine, warn_once

Policy: TypeAlias = Literal["verify", "trust", "off"]
VARIABLE = "DCVIT_KERNELS"  # environment variable with the policy of code outside of `selecting`, and of training


@dataclasses.dataclass
class Selection:
    """Policy and choices by which kernels are selected in the code inside `selecting`.

    Fields:
      policy: "verify" produces missing verdicts, "trust" selects kernels without verdicts, "off" selects no kernels.
      chosen: the name of the selected implementation by `Case.key`; "" if none passed. Existing entries are used
        without verification, so that a resumed run computes with the same implementations.
      share: function (key, choose) -> name that makes the processes of a run agree: one process calls `choose`, and all
        get its result. Without it, several processes select no kernel.
      forward_only: the programs compute no gradients, so that the fastest output counts, and not output and gradients.
    """

    policy: Policy = "verify"
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)
    share: Callable[[str, Callable[[], str]], str] | None = None
    forward_only: bool = False


_SELECTION: ContextVar[Selection | None] = ContextVar("selection", default=None)
_DEFAULT = Selection()  # of code that is not inside `selecting`


def set_forward_only(forward_only: bool) -> None:
    """Set whether the programs of this process, outside of `selecting`, compute no gradients."""
    _DEFAULT.forward_only = forward_only


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
    return _SELECTION.get() or dataclasses.replace(_DEFAULT, policy=default_policy())


@contextlib.contextmanager
def selecting(selection: Selection) -> Iterator[Selection]:
    """Context manager: select kernels by `selection` in functions that are traced inside it."""
    token = _SELECTION.set(selection)
    try:
        yield selection
    finally:
        _SELECTION.reset(token)


def select(case: Case) -> str:
    """Return the name of the candidate that the verdicts select; "" stands for the first that needs no verdict."""
    selection = current()
    if selection.policy == "trust":
        return next(iter(case.candidates))
    if selection.policy == "off":
        return ""
    chip = device.attached()
    if chip is None:
        warn_once("the devices of the mesh are not attached to this host, so that no kernel can be verified")
        return ""
    key = case.key + (", output only" if selection.forward_only else "")
    name = selection.chosen.get(key)
    if name is not None and (not name or name in case.candidates):
        return name
    store = Verdicts(verdicts.environment(chip))
    if selection.share is not None:
        name = selection.share(key, lambda: _fastest(case, store, selection.forward_only))
        verdict = store.read(case.key).get(name)
        if verdict is not None and verdict.status in verdicts.BAD:
            warn_once(
                f"{name} is used for {case.label}, as process 0 selected it, although an earlier verdict on a device "
                f"of process {jax.process_index()} is: {verdict.status}: {verdict.reason}"
            )
    elif jax.process_count() > 1:
        warn_once("several processes could select different kernels: none is used; see dcvit.dcmha.selection")
        name = ""
    else:
        name = _fastest(case, store, selection.forward_only)
    selection.chosen[key] = name
    return name


def _fastest(case: Case, store: Verdicts, forward_only: bool) -> str:
    """Return the name of the fastest candidate that passed; "" if none passed, or `Case.default` has no verdict."""
    found = examine(case, store)
    found = {name: found[name] for name in case.candidates if name in found and found[name].status != verdicts.STARTED}
    for name in case.kernels & found.keys():
        if found[name].status in verdicts.BAD:
            warn_once(f"{name} is not used for {case.label}: {found[name].status}: {found[name].reason}")
    if case.default not in (None, *found):  # a kernel is not known to be faster than what is used without it
        return ""
    return fastest(found, forward_only=forward_only)
