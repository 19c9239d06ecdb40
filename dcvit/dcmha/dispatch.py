"""Choice of the implementation of attention: the one with the given name, or the fastest one that supports the case."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import jax
import jax.numpy as jnp

from dcvit.dcmha import blockwise, cudnn, decode, elementwise, folded, pallas_gpu, reference, selection
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.inputs import Composition, Inputs, Options
from dcvit.dcmha.partition import map_examples, splits_arrays
from dcvit.dcmha.reference import Dropout
from dcvit.dcmha.shapes import Array
from dcvit.dcmha.verification import Case, describe, shapes_of

LOG = logging.getLogger(__name__)
# Scores of one head; with fewer, `reference` computes plain attention on CPUs. Measured on two cores in float32, as
# processor time of `blockwise` divided by that of `reference`, for the output alone and with the gradients (batch ×
# tokens, heads of width; medians of 9 or 15 interleaved rounds):
#   256 × 4, 4 of 16:   composed 0.25, 0.26; plain 0.98, 1.30  2 × 32, 8 of 16:    composed 1.06, 0.84; plain 1.10, 1.36
#   64 × 16, 4 of 16:   composed 0.50, 0.57; plain 1.04, 1.01  8 × 64, 6 of 64:    composed 0.60, 0.47; plain 1.10, 1.30
#   64 × 16, 16 of 8:   composed 0.77, 0.68; plain 1.36, 1.33  8 × 64, 16 of 64:   composed 0.52, 0.28; plain 0.97, 1.18
#   128 × 16, 2 of 32:  composed 0.62, 0.52; plain 0.75, 1.05  16 × 128, 8 of 16:  composed 0.15, 0.19; plain 0.98, 1.16
#   1 × 16, 4 of 16:    composed 1.08, 0.65; plain 0.98, 1.09  4 × 128, 32 of 64:  composed 0.37, 0.30; plain 1.13, 0.93
#   8 × 196, 6 of 64:   composed 0.28, 0.24; plain 0.77, 0.89  1 × 256, 8 of 64:   composed 0.32, 0.18; plain 0.63, 0.78
# The rows of 128 and 256 tokens are causal. Composed attention therefore takes `blockwise` at every size.
MAX_SCORES_FOR_PLAIN_XLA = 20_000
MAX_SCORES_TO_HOLD = 256 * 256  # scores of one head; with more, `reference` may be fast but takes too much memory
# Scores of all heads and examples, 4 GiB in float32; with more, no candidate on a GPU holds them, unless for dropout.
MAX_GPU_SCORES = 2**30


# A function that computes attention, or raises UnsupportedError with a reason.
Implementation: TypeAlias = Callable[[Inputs, Options], Array]


def _on_first_use(module: str) -> Implementation:
    """Return the function `attention` of a module that is imported when it is called.

    Pallas' GPU part adds 0.1 to 0.2 s to `import dcvit.dcmha`, and a platform needs one backend at most.
    """

    def attention(inputs: Inputs, options: Options) -> Array:
        out: Array = importlib.import_module(f"dcvit.dcmha.{module}").attention(inputs, options)
        return out

    return attention


def fold(attend: Implementation, inputs: Inputs, options: Options) -> Array:
    """Fold the composition into queries and outputs of the plain attention that `attend` computes.

    Raises:
      UnsupportedError: the composition cannot be folded.
    """
    composition = Composition.of_weights(inputs.pre, inputs.post, options.groups)
    if (reason := composition.why_not_foldable(inputs.k.shape[2])) is not None:
        raise UnsupportedError(reason)
    q = folded.compose_heads(inputs.q, inputs.pre, groups=options.groups, combine=combine_heads)
    out = attend(inputs._replace(q=q, pre=None, post=None), dataclasses.replace(options, groups=1))
    return folded.compose_heads(out, inputs.post, groups=options.groups, combine=combine_heads)


def combine_heads(x: Array, w: Array) -> Array:
    """Combine the vectors of heads as the platform does it fastest; the compiler cannot split a kernel over devices.

    XLA fuses gates, which multiply the vector of each head by one number, with their neighbors on every platform.
    """
    if w.shape[-1] == 1:
        return folded.combine_heads(x, w)
    if platform() == "cpu":
        return folded.multiply_heads(x, w)
    if platform() == "tpu" and not splits_arrays() and _combines_by_kernel(x, w):
        from dcvit.dcmha.pallas_tpu import combine

        with contextlib.suppress(UnsupportedError):
            return combine.combine_heads(x, w)
    return folded.combine_heads(x, w)


def _combines_by_kernel(x: Array, w: Array) -> bool:
    """Return True if the TPU kernel that combines heads is verified and the fastest."""
    from dcvit.dcmha.pallas_tpu import combine

    def by(function: Callable[[Array, Array], Array]) -> Callable[[tuple[Array, Array]], Array]:
        return lambda arrays: function(*arrays)

    arrays = shapes_of((x, w))
    candidates = {"pallas_tpu": by(combine.combine_heads), "xla": by(folded.combine_heads)}
    key = f"combined heads: {describe(arrays)}, {_facts(_settings())}"
    case = Case("combined heads", key, arrays, candidates, frozenset({"pallas_tpu"}), candidates["xla"])
    return selection.order(case)[0] == "pallas_tpu"


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference.attention,
    "elementwise": elementwise.attention,
    "folded": lambda inputs, options: fold(attention, inputs, options),  # around the fastest plain attention
    "blockwise": blockwise.attention,
    "decode": decode.attention,
    "cudnn": cudnn.attention,
    "pallas_tpu": _on_first_use("pallas_tpu.api"),
    "pallas_tpu_decode": _on_first_use("pallas_tpu.decode"),
    "pallas_gpu": _on_first_use("pallas_gpu.api"),
}
ONLY_ON = {"pallas_tpu": "tpu", "pallas_tpu_decode": "tpu", "pallas_gpu": "gpu", "cudnn": "gpu"}
SPLIT_BY_COMPILER = ("cudnn",)  # JAX tells the compiler how to split it over devices, unlike Pallas kernels
KERNELS = ("pallas_tpu", "pallas_tpu_decode", "pallas_gpu")  # need a verdict; see `dcvit.dcmha.selection`
# Implementations in the order in which they are tried; `reference` follows.
BY_PLATFORM = {"cpu": ("blockwise",), "gpu": ("pallas_gpu", "elementwise"), "tpu": ("pallas_tpu", "blockwise")}
PLAIN = BY_PLATFORM | {"gpu": ("cudnn",)}
HOLDS_SCORES = ("elementwise", "reference")
ONE_QUERY = {"cpu": ("decode",), "gpu": ("decode",), "tpu": ("pallas_tpu_decode", "decode")}
# Implementations that keep the scores on the chip. `folded` is judged by the plain attention inside it, and a single
# query has no matrix of scores.
FUSED = ("pallas_tpu", "pallas_tpu_decode", "pallas_gpu", "cudnn", "folded")

_FUSED_ONLY: ContextVar[bool] = ContextVar("fused_only", default=False)


class NotFusedError(ValueError):
    """The implementation of a call of attention inside `fused_only` is not fused."""


def platform() -> str:
    """Return "cpu", "gpu" or "tpu": the platform of the current mesh (`jax.set_mesh`), or of JAX's default device.

    The devices of a mesh may be those of a topology that is not attached to this host.
    """
    mesh = jax.sharding.get_abstract_mesh()
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # of `jax.default_device`
    device = default if mesh.empty else mesh.abstract_device
    name = device if isinstance(device, str) else getattr(device, "platform", None) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


@contextlib.contextmanager
def fused_only() -> Iterator[None]:
    """Make `attention` raise ValueError on GPUs and TPUs where its implementation is not fused."""
    token = _FUSED_ONLY.set(True)
    try:
        yield
    finally:
        _FUSED_ONLY.reset(token)


def attention(inputs: Inputs, options: Options, implementation: str | None = None, dropout: object = None) -> Array:
    """Compute attention with the named implementation, or with the first candidate that supports the case.

    The implementation and the reasons against those tried before it are logged.

    Args:
      inputs, options: returned by `dcvit.dcmha.inputs.checked`.
      implementation: a name from `IMPLEMENTATIONS`, or None.
      dropout: see `dcvit.dcmha.attention`.

    Raises:
      ValueError: the named implementation does not exist, does not support the case, or is not fused inside
        `fused_only`; or the dropout or the environment variable DCVIT_KERNELS is invalid.
    """
    dropout = checked_dropout(dropout)
    selection.current()  # an invalid environment variable is an error also where no kernel exists
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    if inputs.q.size == 0:
        return jnp.zeros_like(inputs.q)
    names: Sequence[str] = candidates(inputs, options) if implementation is None else (implementation,)
    reasons: list[str] = []
    if implementation is None and dropout is None:
        names, reasons = _verified(names, inputs, options)
    for name in names:
        try:
            out = _attend(name, inputs, options, dropout, is_named=implementation is not None)
        except UnsupportedError as error:
            if implementation is not None:
                raise ValueError(f"implementation {name} does not support this case: {error}") from error
            reasons.append(f"; not {name}: {error}")
            continue
        note = "".join(reasons) if implementation is None else ", as requested"
        case = _describe(inputs, options)
        if _FUSED_ONLY.get() and platform() != "cpu" and inputs.q.shape[1] > 1 and name not in FUSED:
            raise NotFusedError(f"attention is not fused: {name} on {platform()} for {case}{note}")
        LOG.info("attention: %s on %s for %s%s", name, platform(), case, note)
        return out
    raise AssertionError(f"none of {names} supports the case")  # `reference` supports every case


def _verified(names: Sequence[str], inputs: Inputs, options: Options) -> tuple[Sequence[str], list[str]]:
    """Return the candidates in the order of their verdicts, and the reasons against kernels that are not used."""
    kernels = [name for name in names if name in KERNELS and _runs_here(name)]
    if not kernels:
        return names, []
    scores = inputs.q.shape[1] * inputs.k.shape[1]
    plain = [name for name in names if name not in KERNELS and (name != "reference" or scores <= MAX_SCORES_TO_HOLD)]
    found = selection.order(make_case([*kernels, *plain], inputs, options))
    reasons = [f"; not {name}: it is not selected (see dcvit check-kernels)" for name in kernels if name not in found]
    return [*found, *[name for name in names if name not in (*kernels, *found)]], reasons


def make_case(names: Sequence[str], inputs: Inputs, options: Options) -> Case:
    """Return the case that determines which of these implementations a call uses."""
    arrays = shapes_of(inputs)

    def of_arrays(implementation: Callable[..., Array]) -> Callable[[Inputs], Array]:
        return lambda inputs: implementation(inputs, options)

    functions = {name: of_arrays(IMPLEMENTATIONS[name]) for name in names}
    key = f"{describe(arrays._asdict())}, {_facts({**dataclasses.asdict(options), **_settings()})}"
    return Case(
        _describe(inputs, options), key, arrays, functions,
        frozenset(names) & {*KERNELS}, of_arrays(_by_example), is_inference=inputs.q.shape[1] == 1,
    )  # fmt: skip


def _settings() -> dict[str, object]:
    """Return the settings of JAX by which the same call is computed in another way, or not supported."""
    return {
        "precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
    }


def _facts(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())


def _by_example(inputs: Inputs, options: Options) -> Array:
    """Compute `reference` for one example after the other: it holds the scores of one."""
    static = [None if w is None else w.static for w in (inputs.pre, inputs.post)]
    mask = inputs.mask
    if mask is not None:
        mask = jnp.broadcast_to(mask, (len(inputs.q), *mask.shape[1:]))

    def attend(options: Options, x: Inputs) -> Array:
        one = jax.tree.map(lambda array: array[None], x)
        pre, post = (w and w._replace(static=s) for w, s in zip((one.pre, one.post), static, strict=True))
        out: Array = reference.attention(one._replace(pre=pre, post=post), options)[0]
        return out

    pre, post = (w and w._replace(static=None) for w in (inputs.pre, inputs.post))
    mapped = inputs._replace(pre=pre, post=post, mask=mask)
    out: Array = map_examples(jax.checkpoint(attend, static_argnums=0), options, mapped)
    return out


def _runs_here(name: str) -> bool:
    """Return True if an implementation runs on the current platform and mesh."""
    try:
        check_platform(name, is_named=False)
    except UnsupportedError:
        return False
    return True


def _attend(name: str, inputs: Inputs, options: Options, dropout: Dropout | None, *, is_named: bool) -> Array:
    """Compute attention with one implementation, or raise UnsupportedError."""
    check_platform(name, is_named=is_named)
    if dropout is None:
        return IMPLEMENTATIONS[name](inputs, options)
    if name != "reference":
        raise UnsupportedError("only reference has dropout")
    return reference.attention(inputs, options, dropout=dropout)


def candidates(inputs: Inputs, options: Options, head_devices: int = 1) -> tuple[str, ...]:
    """Return the names of implementations for these shapes on the current platform, fastest first.

    `head_devices` is the number of devices that share the heads. If heads are composed with heads of another device,
    the compiler splits the reference implementation, which exchanges the least.

    A composition that can be folded into plain attention is, because that holds no scores; with small models on CPUs it
    may not be the fastest.

    On CPUs, composed attention takes `blockwise`, and small plain attention takes `reference`, by the measurements at
    `MAX_SCORES_FOR_PLAIN_XLA`. Attention of one query, as in decoding or in a pooling head, is a matrix-vector product:
    `decode` does not copy the keys, and the gradient of a pooling head over 64 × 196 tokens takes half of `reference`'s
    time. On TPUs, `decode` and its kernel are preferred because they read less memory in fewer, larger products; this
    has not been measured. On an H200, `elementwise` takes 0.38 to 0.67 of the time of `reference`, and `pallas_gpu`
    0.15 to 0.36 (docs/performance.md); `decode` takes 0.12 and 0.15 ms where `reference` takes 0.13 and 0.15 (a layer
    of 405M, batch 1 and 8). `pallas_gpu` is a candidate on Hopper GPUs only, and for all queries; a part of them
    (`Options.first_query`) takes `blockwise`, which holds no scores either. `cudnn` computes plain attention, also that
    inside `folded`, and holds no scores in memory. Where it does not support the arguments, so is `pallas_gpu`,
    which takes 0.58 and 0.65 of the time of `reference` for plain layers of 405M and 6.9B. With more than
    `MAX_GPU_SCORES` scores, `blockwise` replaces the implementations that hold them on GPUs.
    """
    queries, keys, key_heads = inputs.q.shape[1], *inputs.k.shape[1:3]
    here = platform()
    composition = Composition.of_weights(inputs.pre, inputs.post, options.groups)
    if composition.foldable(key_heads):
        return ("folded", "reference")  # `folded` does not support dropout
    plain = composition.compose is None
    if not plain and options.groups % head_devices:
        return ("reference",)
    if queries > 1 and plain and here == "cpu" and queries * keys < MAX_SCORES_FOR_PLAIN_XLA:
        return ("reference",)
    names = (ONE_QUERY if queries == 1 else PLAIN if plain else BY_PLATFORM).get(here, ())
    if names == ("cudnn",) and not _supports_cudnn(inputs, options):
        names = ("cudnn", "pallas_gpu")
    if here == "gpu" and options.first_query:
        names = ("blockwise",)
    if here == "gpu" and pallas_gpu.compute_capability() != pallas_gpu.HOPPER:
        names = tuple(name for name in names if name != "pallas_gpu")
    names = (*names, "reference")
    if here == "gpu" and inputs.q.shape[0] * inputs.q.shape[2] * queries * keys > MAX_GPU_SCORES:
        names = (*[name for name in names if name not in HOLDS_SCORES], "blockwise", "reference")  # with dropout only
    return tuple(dict.fromkeys(names))


def _supports_cudnn(inputs: Inputs, options: Options) -> bool:
    try:
        cudnn.check_supported(inputs, options)
    except UnsupportedError:
        return False
    return True


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
        "axes data, fsdp, context or tensor, use jax.shard_map, or name the implementation in a program for one device",
        devices,
    )


def checked_dropout(dropout: object) -> Dropout | None:
    """Return the dropout, or raise ValueError if it is of another type or its rate is not a fraction."""
    if not isinstance(dropout, Dropout | None):
        raise ValueError(f"dropout is a {type(dropout).__name__}, expected dcvit.dcmha.Dropout(key, rate)")
    if dropout is not None and not 0 <= dropout.rate <= 1:
        raise ValueError(f"dropout rate {dropout.rate}: expected a number from 0 to 1")
    return dropout


def _describe(inputs: Inputs, options: Options) -> str:
    """Return the shapes and branches of a case for the log."""
    composes = " and ".join(Composition.of_weights(inputs.pre, inputs.post).names) or "plain"
    suffix = f", window {options.window}" if options.window is not None else ""
    suffix += ", segments" if inputs.segments is not None else ""
    return f"{inputs.q.dtype}{list(inputs.q.shape)}, {inputs.k.shape[1]} keys, {composes}{suffix}"
