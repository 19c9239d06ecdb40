"""Choice of the implementation of attention: the one with the given name, or the fastest one that supports the case."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol, TypedDict, Unpack

import jax

from dcvit.dcmha import blockwise, cudnn, decode, elementwise, folded, reference
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.partition import splits_arrays
from dcvit.dcmha.shapes import Array

LOG = logging.getLogger(__name__)
MAX_SCORES_FOR_PLAIN_XLA = 20_000  # scores of one head; below it, XLA's plain attention is the fastest one on CPUs


class Options(TypedDict):
    """Keyword arguments of every implementation."""

    causal: bool
    window: int | None
    mask: Array | None
    groups: int
    scale: float


class Implementation(Protocol):
    """A function that computes attention, or raises UnsupportedError with a reason."""

    def __call__(
        self, q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None,
        **options: Unpack[Options],
    ) -> Array: ...  # fmt: skip


# Pallas is imported on first use: the GPU part adds 0.1 to 0.2 s to `import dcvit.dcmha`, and a platform needs one
# backend at most.


def _pallas_tpu(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, **options: Unpack[Options]
) -> Array:
    from dcvit.dcmha.pallas_tpu import api

    return api.attention(q, k, v, pre, post, **options)


def _pallas_tpu_decode(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, **options: Unpack[Options]
) -> Array:
    from dcvit.dcmha.pallas_tpu import decode as tpu_decode

    return tpu_decode.attention(q, k, v, pre, post, **options)


def _pallas_gpu(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, **options: Unpack[Options]
) -> Array:
    from dcvit.dcmha.pallas_gpu import api

    return api.attention(q, k, v, pre, post, **options)


def _folded(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, **options: Unpack[Options]
) -> Array:
    groups = options["groups"]
    if (reason := folded.why_not_foldable(pre, post, key_heads=k.shape[2], groups=groups)) is not None:
        raise UnsupportedError(reason)
    q = folded.compose_heads(q, pre, groups=groups, combine=combine_heads)
    options["groups"] = 1
    out = attention(q, k, v, None, None, None, **options)
    return folded.compose_heads(out, post, groups=groups, combine=combine_heads)


def combine_heads(x: Array, w: Array) -> Array:
    """Combine the vectors of heads as the platform does it fastest; the compiler cannot split a kernel over devices."""
    if platform() == "cpu" and w.shape[-1] > 1:
        return folded.multiply_heads(x, w)
    if platform() == "tpu" and not splits_arrays():
        from dcvit.dcmha.pallas_tpu import combine

        with contextlib.suppress(UnsupportedError):
            return combine.combine_heads(x, w)
    return folded.combine_heads(x, w)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference.attention,
    "elementwise": elementwise.attention,
    "folded": _folded,
    "blockwise": blockwise.attention,
    "decode": decode.attention,
    "cudnn": cudnn.attention,
    "pallas_tpu": _pallas_tpu,
    "pallas_tpu_decode": _pallas_tpu_decode,
    "pallas_gpu": _pallas_gpu,
}
ONLY_ON = {"pallas_tpu": "tpu", "pallas_tpu_decode": "tpu", "pallas_gpu": "gpu", "cudnn": "gpu"}
SPLIT_BY_COMPILER = ("cudnn",)  # JAX tells the compiler how to split it over devices, unlike Pallas kernels
# Implementations in the order in which they are tried; `reference` follows. `pallas_gpu` must be selected by name until
# scripts/check_gpu.py and scripts/bench_dcmha.py have shown on a GPU that it is correct and faster.
BY_PLATFORM = {"cpu": ("blockwise",), "gpu": ("elementwise",), "tpu": ("pallas_tpu", "blockwise")}
PLAIN = BY_PLATFORM | {"gpu": ("cudnn",)}
ONE_QUERY = {"cpu": ("decode",), "gpu": ("decode",), "tpu": ("pallas_tpu_decode", "decode")}
# Implementations that keep the scores on the chip. `folded` is judged by the plain attention inside it, and a single
# query has no matrix of scores.
FUSED = ("pallas_tpu", "pallas_tpu_decode", "pallas_gpu", "cudnn", "folded")

_FUSED_ONLY: ContextVar[bool] = ContextVar("fused_only", default=False)


def platform() -> str:
    """Return "cpu", "gpu" or "tpu": the platform of the current mesh (`jax.set_mesh`), or JAX's default without one.

    The devices of a mesh may be those of a topology that is not attached to this host.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    name = jax.default_backend() if device is None or device.platform is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


@contextlib.contextmanager
def fused_only() -> Iterator[None]:
    """Make `attention` raise ValueError on GPUs and TPUs where its implementation is not fused."""
    token = _FUSED_ONLY.set(True)
    try:
        yield
    finally:
        _FUSED_ONLY.reset(token)


def attention(
    q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None, implementation: str | None,
    dropout: reference.Dropout | None = None, **options: Unpack[Options],
) -> Array:  # fmt: skip
    """Compute attention with the named implementation, or with the first candidate that supports the case.

    The implementation and the reasons against those tried before it are logged.

    Raises:
      ValueError: the named implementation does not support the case, or is not fused inside `fused_only`.
    """
    names = candidates(q, k, pre, post, options["groups"]) if implementation is None else (implementation,)
    reasons: list[str] = []
    for name in names:
        try:
            check_platform(name, is_named=implementation is not None)
            attend: Callable[..., Array] = IMPLEMENTATIONS[name]
            if dropout is not None:
                check_dropout(name)
                attend = functools.partial(attend, dropout=dropout)
            out = attend(q, k, v, pre, post, **options)
        except UnsupportedError as error:
            if implementation is not None:
                raise ValueError(f"implementation {name} does not support this case: {error}") from error
            reasons.append(f"; not {name}: {error}")
            continue
        note = "".join(reasons) if implementation is None else ", as requested"
        case = _describe(q, k, pre, post, options["window"])
        if _FUSED_ONLY.get() and platform() != "cpu" and q.shape[1] > 1 and name not in FUSED:
            raise ValueError(f"attention is not fused: {name} on {platform()} for {case}{note}")
        LOG.info("attention: %s on %s for %s%s", name, platform(), case, note)
        return out
    raise AssertionError(f"none of {names} supports the case")  # `reference` supports every case


def candidates(
    q: Array, k: Array, pre: ComposeWeights | None, post: ComposeWeights | None, groups: int = 1
) -> tuple[str, ...]:
    """Return the names of implementations for these shapes on the current platform, fastest first.

    A composition that can be folded into plain attention is, because that holds no scores; with small models on CPUs it
    may not be the fastest.

    On two CPU cores, gradients of composed attention take `blockwise` 10 to 20 % of `reference`'s time at the sizes in
    docs/performance.md, and `reference` is faster for small plain attention (scripts/bench_dcmha.py). Attention of one
    query, as in decoding or in a pooling head, is a matrix-vector product: `decode` does not copy the keys, and the
    gradient of a pooling head over 64 × 196 tokens takes half of `reference`'s time. On GPUs and TPUs, `decode` and its
    kernel are preferred because they read less memory in fewer, larger products; this has not been measured. Nor has
    `elementwise` been on a GPU: it is preferred there because the compiled program reads and writes the fewest bytes.
    `cudnn` holds no scores in memory.
    """
    queries, keys = q.shape[1], k.shape[1]
    here = platform()
    if folded.why_not_foldable(pre, post, key_heads=k.shape[2], groups=groups) is None:
        return ("folded", "reference")  # `folded` does not support dropout
    plain = pre is None and post is None
    if queries > 1 and plain and here == "cpu" and queries * keys < MAX_SCORES_FOR_PLAIN_XLA:
        return ("reference",)
    return (*(ONE_QUERY if queries == 1 else PLAIN if plain else BY_PLATFORM).get(here, ()), "reference")


def check_platform(name: str, *, is_named: bool) -> None:
    """Raise UnsupportedError if an implementation does not run on the current platform or mesh.

    Without a mesh, the program is known to run on one device only if the process sees no other. `is_named` says that
    the caller named it: skip the multi-device check.
    """
    required, here = ONLY_ON.get(name), platform()
    if required is not None and required != here:
        raise UnsupportedError(f"it needs a {required.upper()}, found a {here.upper()}")
    if required is None or name in SPLIT_BY_COMPILER or not splits_arrays():
        return
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        axes = ", ".join(mesh.axis_names)
        raise UnsupportedError(f"the compiler cannot split a kernel over the mesh axes {axes}; use jax.shard_map")
    if not is_named:
        warn_of_missing_mesh(jax.device_count())
        raise UnsupportedError("the compiler cannot split a kernel over several devices, and no mesh is set")


@functools.cache
def warn_of_missing_mesh(devices: int) -> None:
    """Say once how to get the kernels on several devices."""
    LOG.warning(
        "attention: no fused kernels, because there are %d devices and no mesh: call jax.set_mesh with a mesh of the "
        "axes data, fsdp or tensor, use jax.shard_map, or name the implementation in a program for one device",
        devices,
    )


def check_dropout(name: str) -> None:
    """Raise UnsupportedError if an implementation has no dropout."""
    if name != "reference":
        raise UnsupportedError("only reference has dropout")


def _describe(q: Array, k: Array, pre: ComposeWeights | None, post: ComposeWeights | None, window: int | None) -> str:
    """Return the shapes and branches of a case for the log."""
    composes = " and ".join(name for name, w in (("pre", pre), ("post", post)) if w is not None) or "plain"
    suffix = f", window {window}" if window is not None else ""
    return f"{q.dtype}{list(q.shape)}, {k.shape[1]} keys, {composes}{suffix}"
