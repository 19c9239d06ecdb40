"""Where arrays live: a mesh of devices, the batch split over two of its axes, parameters and heads over the others.

    data     each index has its own examples and, but for the other axes, all parameters
    fsdp     the same, and each keeps a part of every matrix; the matrix is put together where it is used
    tensor   the same examples; each has its own attention heads and its own part of the MLPs' hidden width

What is replicated, split and exchanged follows from the sharding of parameters (`shardings`) and activations
(`dcvit.parallel.mesh.constrain`): JAX's compiler, GSPMD, inserts the communication.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcvit.config import check_regex
from dcvit.errors import ConfigError, nearest
from dcvit.parallel.mesh import AXES, BATCH, axis_size, divisible_axes

STRATEGIES = ("ddp", "fsdp", "tensor", "fsdp+tensor")
Rule = str | Sequence[Any]  # the name of a strategy, or one mesh axis, several or None for each of the last dimensions
Strategy = str | Sequence[tuple[str, Rule]]  # see `shardings`

# Which dimension of a parameter is split over the axis "tensor", by the end of its name: heads, groups of heads where
# every device composes its own, hidden width. Embedding and head are split by width, which the axis always divides.
TENSOR_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(query|key|value)/kernel", (None, "tensor", None)),
    (r"(query|key|value)/bias", ("tensor", None)),
    (r"MultiHeadDotProductAttention_0/out/kernel", ("tensor", None, None)),
    (r"(pre|post)/w_[qk]1", (None, "tensor", None)),
    (r"(pre|post)/w_[qk]2", ("tensor", None, None)),
    (r"(pre|post)/w_[qk]g", (None, "tensor")),
    (r"(pre|post)/w_b", ("tensor", None, None)),
    (r"MlpBlock_0/(in|gate|Dense_0)/kernel", (None, "tensor")),
    (r"MlpBlock_0/(in|gate|Dense_0)/bias", ("tensor",)),
    (r"MlpBlock_0/(out|Dense_1)/kernel", ("tensor", None)),
    (r"embedding/embedding", (None, "tensor")),
    (r"head/kernel", ("tensor", None)),
)
STACKED = r"(.*/)?Transformer/(group|encoderblock)/.*"  # parameters of a scan, whose first dimension counts layers


class DeviceCountError(ConfigError):
    """A mesh for another number of devices."""


def make_mesh(axes: Sequence[Any], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes of `AXES`, each of the size that `axes` gives it, 1 where it gives none.

    Args:
      axes: pairs (name, size), from the slowest to the fastest links; one size may be -1, what the others leave.
      devices: all of JAX's by default.

    Raises:
      DeviceCountError: sizes that do not make the number of devices.
      ConfigError: a name that is none of `AXES` or comes twice, or a size that is none.
    """
    count = len(jax.devices() if devices is None else devices)
    sizes: dict[str, int] = {}
    for pair in axes:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or str(pair[0]) in sizes:
            raise ConfigError(f"config.mesh={axes!r}: expected pairs (axis, size), each axis once")
        name, size = pair
        if not isinstance(name, str) or name not in AXES:
            raise ConfigError(f"config.mesh has no axis {name!r}; {nearest(str(name), AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ConfigError(f"config.mesh: {name} of size {size!r}; expected 1 or more, or -1 for what is left")
        sizes[name] = size
    shown = " × ".join(f"{name} {size}" for name, size in sizes.items()) or "no axis"
    known = math.prod(size for size in sizes.values() if size > 0)
    left = [name for name, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise ConfigError(f"config.mesh: {shown}; only one size may be -1")
    if left and count % known == 0:
        sizes[left[0]] = count // known
    elif left or known != count:
        much = f"no multiple of {known}" if left else f"not {known}"
        raise DeviceCountError(f"config.mesh: {shown} on {count} devices, which is {much}")
    sizes = {**{name: 1 for name in AXES if name not in sizes}, **sizes}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def data_mesh() -> Mesh:
    """All devices along the axis "data"."""
    return make_mesh([("data", -1)])


def check_strategy(mesh: Mesh, axes: Sequence[Any], strategy: str | Sequence[Any]) -> None:
    """Raises ConfigError for an unknown strategy, or a named one that does not fit the mesh."""
    if not isinstance(strategy, str):
        for pair in strategy:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], str | list | tuple):
                raise ConfigError(f"config.sharding_strategy: {pair!r} is no pair of a regex and a strategy or a spec")
            check_regex(f"(.*/)?({pair[0]})", "config.sharding_strategy")
            if isinstance(pair[1], str):
                _check_name(pair[1])
            else:
                _check_axes(pair[1])
        return
    _check_name(strategy)
    named = {name for name, _ in axes}
    for axis in strategy.split("+"):
        if axis != "ddp" and axis not in named:
            raise ConfigError(f"config.sharding_strategy={strategy!r}, but config.mesh names no axis {axis!r}")
    if mesh.shape["tensor"] > 1 and "tensor" not in strategy:
        raise ConfigError(
            f"config.mesh splits over tensor {mesh.shape['tensor']}: give config.sharding_strategy='tensor' or "
            f"'fsdp+tensor', not {strategy!r}"
        )


def _check_axes(spec: Sequence[Any]) -> None:
    """Raises ConfigError where a spec is not of axes, each at most once."""
    flat = [name for axis in spec for name in (axis if isinstance(axis, list | tuple) else [axis])]
    named = [name for name in flat if name is not None]
    if any(not isinstance(name, str) or name not in AXES for name in named) or len(set(named)) < len(named):
        raise ConfigError(
            f"config.sharding_strategy: {spec!r} should name axes of {', '.join(AXES)}, each once, or None"
        )


def _check_name(strategy: str) -> None:
    if strategy not in STRATEGIES:
        known = f"known: {', '.join(STRATEGIES)}, and in a config file rules"
        raise ConfigError(f"config.sharding_strategy={strategy!r}; {known}")


def check_model(mesh: Mesh, net: Any) -> None:
    """Raises ConfigError where the axis "tensor" divides the model's heads, groups or hidden width not evenly."""
    tensor = mesh.shape["tensor"]
    sizes = {"num_heads": net.num_heads, "mlp_dim": net.mlp_dim or 4 * net.width, "width": net.width}
    for name, size in sizes.items():
        if size % tensor:
            raise ConfigError(f"config.mesh: tensor {tensor} does not divide {name} {size}")
    if net.compose and net.groups > 1 and net.groups % tensor:
        raise ConfigError(
            f"config.model.groups={net.groups} is no multiple of tensor {tensor}: groups are composed inside a device; "
            f"groups=1 composes all {net.num_heads} heads across devices"
        )


def shardings(tree: Any, mesh: Mesh, strategy: Strategy) -> Any:
    """The sharding of each array of a tree of parameters, or of an optimiser's state, which follows its parameters.

    Args:
      tree: arrays or shapes, named by their path.
      mesh: of `make_mesh`.
      strategy: "ddp", every device keeps all; "fsdp", every matrix split by its largest dimension; "tensor", as in
        `TENSOR_RULES`; "fsdp+tensor", both. Or pairs (regex on the parameter's whole name, strategy or spec), of
        which the first match counts; a spec gives for each of the last dimensions a mesh axis, several or None.
        What matches none is kept whole, and so is what an optimiser keeps in another shape than the parameter's.

    Raises:
      ConfigError: a spec splits a dimension that its axes do not divide.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(strategy, str):
            rule: Rule = strategy
        else:
            rule = next((rule for pattern, rule in strategy if re.fullmatch(f"(.*/)?({pattern})", name)), "ddp")
        return NamedSharding(mesh, P(*_spec(name, leaf.shape, rule, mesh)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _spec(name: str, shape: tuple[int, ...], rule: Rule, mesh: Mesh) -> list[Any]:
    """For each dimension of a parameter, the mesh axes that split it."""
    if not isinstance(rule, str):
        if re.match(r"opt_state/|step$|skipped$|nonfinite$", name) and not _fits(shape, rule, mesh):
            return [None] * len(shape)
        if len(rule) > len(shape):
            raise ConfigError(f"config.sharding_strategy: {list(rule)} is longer than {name} of shape {shape}")
        spec = [None] * (len(shape) - len(rule)) + [tuple(axis) if isinstance(axis, list) else axis for axis in rule]
        for size, axis in zip(shape, spec, strict=True):
            if size % axis_size(mesh, axis):
                split = f"{axis} {axis_size(mesh, axis)} does not divide {size} of {name} {shape}"
                raise ConfigError(f"config.sharding_strategy: {split}")
        return spec
    first = int(re.fullmatch(STACKED, name) is not None)
    spec = [None] * len(shape)
    if "tensor" in rule:
        axes = next((axes for end, axes in TENSOR_RULES if re.fullmatch(f"(.*/)?{end}", name)), ())
        if len(axes) == len(shape) - first:
            spec[first:] = divisible_axes(shape[first:], axes, mesh)
    if "fsdp" in rule and len(shape) - first > 1:
        fits = [i for i in range(first, len(shape)) if shape[i] % (mesh.shape["fsdp"] * axis_size(mesh, spec[i])) == 0]
        chosen = max(fits, key=lambda i: (spec[i] is None, shape[i]), default=None)
        if chosen is not None:
            spec[chosen] = "fsdp" if spec[chosen] is None else ("tensor", "fsdp")
    return spec


def _fits(shape: tuple[int, ...], rule: Sequence[Any], mesh: Mesh) -> bool:
    """Whether a spec has no more dimensions than an array, and its axes divide them."""
    last = shape[max(0, len(shape) - len(rule)) :]
    return len(last) == len(rule) and divisible_axes(last, rule, mesh) == list(rule)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same values on every device."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first dimension split over the axes that share a batch."""
    return NamedSharding(mesh, P(BATCH))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is split."""
    return axis_size(mesh, BATCH)


def local_rows(mesh: Mesh, batch_size: int) -> list[int]:
    """The rows of a batch that the devices of this process hold, in order; processes may hold the same ones."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in indices if index for row in range(batch_size)[index[0]]})


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """A batch on the devices, of which each process gives its `local_rows`; `batch_shards` divides `batch_size`."""
    at = {row: i for i, row in enumerate(local_rows(mesh, batch_size))}

    def put(local: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            rows = range(batch_size)[index[0]]
            return local[at[rows[0]] : at[rows[0]] + len(rows)]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), batch_sharding(mesh), part)

    return {key: put(value) for key, value in batch.items()}


def prefetch(
    batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, batch_size: int, ahead: int = 1
) -> Iterator[dict[str, jax.Array]]:
    """Each batch as `put_batch` sends it, `ahead` batches before it is asked for: transfers overlap steps."""
    sent: deque[dict[str, jax.Array]] = deque()
    try:
        for batch in batches:
            sent.append(put_batch(batch, mesh, batch_size))
            if len(sent) > ahead:
                yield sent.popleft()
    except Exception:  # what was sent before an error is still served
        yield from sent
        raise
    yield from sent
