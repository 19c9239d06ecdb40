"""Selection of attention kernels in a run: all processes, and a resumed run on the same devices, use the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax

from dcvit.dcmha import verdicts
from dcvit.dcmha.selection import VARIABLE, Policy, Selection, default_policy
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.runs.identity import Facts, Record

SECONDS = 1500  # limit of the verification of one call of attention, for the processes that wait for the first


def select(policy: Policy | None, about: Facts) -> Selection:
    """Return the object that selects the kernel of each attention call in a run.

    Args:
      policy: `config.kernels`; None means the environment variable DCVIT_KERNELS, or else "verify".
      about: description of the checkpoint to resume from; empty for a new run. Its selection is reused if it was made
        on devices of the same kind by the same software.

    Raises:
      ConfigError: the processes of the run have different policies.
    """
    policy, before = policy or default_policy(), about.get("kernels", {})
    environment = verdicts.environment(jax.local_devices()[0])
    found = multihost.gather("kernels", {"policy": policy, "same": before.get("environment") == environment})
    if len(policies := {each["policy"] for each in found}) > 1:
        raise ConfigError(f"processes differ in {VARIABLE}: {' and '.join(sorted(policies))}; expected one for all")
    chosen = dict(before["chosen"]) if found[0]["same"] else {}
    return Selection(policy, chosen=chosen, share=_share)


def record(selection: Selection) -> Record:
    """Return a checkpoint's entry, from which a resumed run restores the selection; later choices are added to it."""
    return {"environment": verdicts.environment(jax.local_devices()[0]), "chosen": selection.chosen}


def _share(key: str, choose: Callable[[], str]) -> str:
    """Return, in every process, the result of `choose` in process 0; the other processes do not call theirs."""
    name = f"kernel {hashlib.sha256(key.encode()).hexdigest()}"
    found: str = multihost.gather(name, choose() if multihost.is_first() else "", SECONDS)[0]
    return found
