"""Which implementation attends: by name, or the fastest that takes the case on the platform at hand."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import jax

# Each is a module of this package with `attention`, and `refuses` where it does not take every case.
IMPLEMENTATIONS = ("reference", "blockwise", "decode", "pallas_tpu", "pallas_tpu_decode", "pallas_gpu")
# What is chosen, best first; the reference where there is none. `pallas_gpu` is for those who ask for it by name, until
# it has been run on a GPU: scripts/check_gpu.py and scripts/bench_dcmha.py are to say whether it is right and faster.
BY_PLATFORM = {"cpu": ("blockwise",), "tpu": ("pallas_tpu", "blockwise")}
ONE_QUERY = {"cpu": ("decode",), "gpu": ("decode",), "tpu": ("pallas_tpu_decode", "decode")}
LOG = logging.getLogger(__name__)
SMALL = 20_000  # scores of a head; on CPUs XLA's own plain attention is the faster below


def platform() -> str:
    """ "cpu", "gpu" or "tpu": of the mesh in force (`jax.set_mesh`), whose devices need not be here, or else of JAX."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    name = jax.default_backend() if device is None or device.platform is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def load(name: str) -> Any:
    """The module of an implementation."""
    paths = {"pallas_tpu": "pallas_tpu.api", "pallas_tpu_decode": "pallas_tpu.decode", "pallas_gpu": "pallas_gpu.api"}
    return importlib.import_module(f"dcvit.dcmha.{paths.get(name, name)}")


def refusal(name: str, *args: Any, **case: Any) -> str | None:
    """Why an implementation does not take the case here, or None where it does. Arguments: as of
    `dcvit.dcmha.attention`."""
    here = platform()
    if name.startswith("pallas_") and not name.startswith(f"pallas_{here}"):
        return f"it is for {name.split('_')[1].upper()}s, and this is a {here.upper()}"
    refuses = getattr(load(name), "refuses", None)
    reason: str | None = refuses(*args, **case) if refuses else None
    return reason


def choose(q: Any, k: Any, v: Any, pre: Any, post: Any, **case: Any) -> str:
    """The implementation for arguments of these shapes and dtypes; the log says which.

    On two CPU cores, gradients of composed attention take `blockwise` a tenth to a fifth of `reference`'s time at the
    sizes of docs/performance.md, plain attention does best with the latter where it is small: scripts/bench_dcmha.py.
    One query alone (decoding, a pooling head) is a product with a matrix: `decode` copies nothing of the keys, and a
    pooling head's gradient over 64 × 196 tokens takes half of `reference`'s time. On GPUs and TPUs, that it reads less
    and has fewer and larger products is the reason to take it and its kernel: not measured.
    """
    queries, keys = q.shape[1], k.shape[1]
    here = platform()
    names = (ONE_QUERY if queries == 1 else BY_PLATFORM).get(here, ())
    if queries > 1 and pre is None and post is None and here == "cpu" and queries * keys < SMALL:
        names = ()
    reasons = {name: refusal(name, q, k, v, pre, post, **case) for name in names}
    chosen = next((name for name, reason in reasons.items() if reason is None), "reference")
    refused = "".join(f"; not {name}: {reason}" for name, reason in reasons.items() if reason)
    log(chosen, q, k, pre, post, case["window"], refused)
    return chosen


def log(name: str, q: Any, k: Any, pre: Any, post: Any, window: int | None, why: str) -> None:
    """One line of which implementation attends to what, and `why`."""
    composed = " and ".join(side for side, w in (("pre", pre), ("post", post)) if w is not None) or "plain"
    seen = f", window {window}" if window is not None else ""
    LOG.info(
        f"attention: {name} on {platform()} for {q.dtype}{list(q.shape)}, {k.shape[1]} keys, {composed}{seen}{why}"
    )
