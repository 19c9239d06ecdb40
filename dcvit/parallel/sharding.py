"""Sharding of batches and parameters over a mesh of devices.

    data     splits the batch; parameters are replicated along this axis
    fsdp     splits the batch and every matrix; a matrix is gathered where it is used
    context  splits the tokens of a row of a language model; parameters are replicated along this axis
    tensor   splits attention heads and the hidden width of MLPs; the batch is replicated along this axis

The compiler (GSPMD) derives the communication from the shardings of parameters (`shardings`) and activations
(`dcvit.parallel.mesh.constrain`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcvit.dcmha.inputs import Composition
from dcvit.errors import ConfigError, check_regex, matches, nearest
from dcvit.parallel.mesh import AXES, BATCH, Axis, axis_size, divisible_axes
from dcvit.parallel.trees import names_of

if TYPE_CHECKING:
    from jaxtyping import PyTree

STRATEGIES = ("ddp", "fsdp", "tensor", "fsdp+tensor")
Spec = Sequence[Axis]  # the mesh axes that split each of the last dimensions of a parameter
Rule = str | Spec  # the name of a strategy, or a spec
Strategy = str | Sequence[tuple[str, Rule]]  # see `shardings`

# The dimension of a parameter that the axis "tensor" splits, by a regex on the end of its name: heads, groups of heads
# (a device composes its own groups), or hidden width. Embedding and head are split by width, which the axis divides.
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
STACKED = r"(.*/)?Transformer/(group|encodergroup|encoderblock)/.*"  # of a scan: the first dimension is the layer
MIB_IN_PARTS = "xla_jf_spmd_threshold_for_windowed_einsum_mib"  # smaller products gather their split matrix


@runtime_checkable
class ModelSizes(Protocol):
    """Interface of a model's config for sharding: the fields that limit how its parameters can be split."""

    width: int
    num_heads: int
    num_key_heads: int | None
    mlp_dim: int | None
    compose: str | None
    groups: int
    implementation: str | None

    def composition(self) -> Composition:
        """Return the composition of the layers."""
        ...


class DeviceCountError(ConfigError):
    """The sizes of the mesh axes do not multiply to the number of devices."""


def make_mesh(axes: Sequence[object], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh with all axes of `AXES`.

    Args:
      axes: pairs (name, size), from the slowest to the fastest links. An axis that is not given has size 1. One size
        may be -1, the number of devices divided by the other sizes.
      devices: by default all devices.

    Raises:
      DeviceCountError: the sizes do not multiply to the number of devices.
      ConfigError: an axis is unknown or given twice, or its size is invalid.
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
            raise ConfigError(
                f"config.mesh: {name} of size {size!r}; expected 1 or more, or -1 for the remaining devices"
            )
        sizes[name] = size
    shown = " × ".join(f"{name} {size}" for name, size in sizes.items()) or "no axis"
    product = math.prod(size for size in sizes.values() if size > 0)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"config.mesh: {shown}; only one size may be -1")
    if open_axes and count % product == 0:
        sizes[open_axes[0]] = count // product
    elif open_axes or product != count:
        needed = f"a multiple of {product}" if open_axes else f"{product}"
        raise DeviceCountError(f"config.mesh: {shown} needs {needed} devices, found {count}")
    sizes = {**{name: 1 for name in AXES if name not in sizes}, **sizes}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def data_mesh() -> Mesh:
    """Return a mesh of all devices along the axis "data"."""
    return make_mesh([("data", -1)])


def check_strategy(mesh: Mesh, axes: Sequence[Sequence[object]], strategy: str | Sequence[object]) -> None:
    """Raise ConfigError if a strategy is unknown or invalid, or does not fit the mesh of the given axes."""
    if not isinstance(strategy, str):
        for pair in strategy:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], str | list | tuple):
                raise ConfigError(
                    f"config.sharding_strategy: {pair!r} is not a pair of a regex and a strategy or a spec"
                )
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
            raise ConfigError(f"config.sharding_strategy={strategy!r}, but config.mesh has no axis {axis!r}")
    if mesh.shape["tensor"] > 1 and "tensor" not in strategy:
        raise ConfigError(
            f"config.mesh has tensor {mesh.shape['tensor']}: set config.sharding_strategy to 'tensor' or "
            f"'fsdp+tensor', not {strategy!r}"
        )


def _check_axes(spec: Sequence[object]) -> None:
    """Raise ConfigError if a spec has anything but mesh axes, or one of them twice."""
    flat = [name for axis in spec for name in (axis if isinstance(axis, list | tuple) else [axis])]
    named = [name for name in flat if name is not None]
    if any(not isinstance(name, str) or name not in AXES for name in named) or len(set(named)) < len(named):
        raise ConfigError(
            f"config.sharding_strategy: {spec!r}; expected axes of {', '.join(AXES)}, each at most once, or None"
        )


def _check_name(strategy: str) -> None:
    if strategy not in STRATEGIES:
        valid = f"expected {', '.join(STRATEGIES)}, or rules in a config file"
        raise ConfigError(f"config.sharding_strategy={strategy!r}; {valid}")


def check_model(mesh: Mesh, net: ModelSizes) -> None:
    """Raise ConfigError if the axis "tensor" does not divide the model's heads, groups, width or hidden width."""
    tensor = mesh.shape["tensor"]
    sizes = {"num_heads": net.num_heads, "mlp_dim": net.mlp_dim or 4 * net.width, "width": net.width}
    for name, size in sizes.items():
        if size % tensor:
            raise ConfigError(f"config.mesh: tensor {tensor} does not divide {name} {size}")
    if net.compose and net.groups > 1 and net.groups % tensor:
        raise ConfigError(
            f"config.model.groups={net.groups} is not a multiple of tensor {tensor}: each group is composed on one "
            f"device; groups=1 composes all {net.num_heads} heads across devices"
        )


def check_context(mesh: Mesh, net: ModelSizes, tokens: int | None) -> None:
    """Raise ConfigError if the axis "context" cannot split rows of `tokens` tokens; None: the model has no rows."""
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    if context == 1:
        return
    if tokens is None:
        raise ConfigError(f"config.mesh has context {context}, which splits the tokens of language models only")
    folds = net.implementation in (None, "folded") and net.composition().foldable(net.num_key_heads or net.num_heads)
    joint = tensor if net.compose and net.groups % tensor and not folds else 1  # then tokens are split, and not heads
    if tokens % (2 * context * joint):
        with_tensor = f" · tensor {joint}" if joint > 1 else ""
        raise ConfigError(
            f"config.mesh: rows of {tokens} tokens are not a multiple of 2 · context {context}{with_tensor} = "
            f"{2 * context * joint}: set the context of config.input.data"
        )


def shardings(tree: PyTree, mesh: Mesh, strategy: Strategy) -> PyTree[NamedSharding]:
    """Return the sharding of each array of a tree of parameters, or of the state of their optimizer.

    Args:
      tree: arrays or shapes, named by their path.
      mesh: a mesh of `make_mesh`.
      strategy: "ddp" replicates all parameters; "fsdp" splits the largest dimension of every matrix; "tensor" splits
        as in `TENSOR_RULES`; "fsdp+tensor" does both. Or pairs (regex, rule); the first regex that matches the whole
        name of a parameter counts. A rule is the name of a strategy, or a spec: for each of the last dimensions a mesh
        axis, several or None. Parameters without a match are replicated, and so are arrays in the optimizer's state
        whose shape differs from their parameter's.

    Raises:
      ConfigError: the axes of a spec do not divide a dimension.
    """
    names, rules = names_of(tree), dict[str, Rule]()
    for pattern, rule in () if isinstance(strategy, str) else strategy:
        found = matches(f"(.*/)?({pattern})", jax.tree.leaves(names), "config.sharding_strategy")
        rules = dict.fromkeys(found, rule) | rules
    default = strategy if isinstance(strategy, str) else "ddp"

    def sharding(name: str, leaf: Any) -> NamedSharding:
        rule = rules.get(name, default)
        if isinstance(rule, str):
            return NamedSharding(mesh, P(*_strategy_spec(name, leaf.shape, rule, mesh)))
        return NamedSharding(mesh, P(*_rule_spec(name, leaf.shape, rule, mesh)))

    return jax.tree.map(sharding, names, tree)


def with_shardings(shapes: PyTree, mesh: Mesh | None = None, strategy: Strategy = "ddp") -> PyTree:
    """Return a `ShapeDtypeStruct` with its sharding for each shape; without a mesh, all on the first local device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.map(lambda _: device, shapes) if mesh is None else shardings(shapes, mesh, strategy)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def _rule_spec(name: str, shape: tuple[int, ...], rule: Spec, mesh: Mesh) -> list[Axis]:
    """Return the mesh axes that split each dimension, by a rule for the last ones. Raise ConfigError if it cannot."""
    if re.match(r"opt_state/|step$|skipped$|nonfinite$", name):
        fitting = shape[max(0, len(shape) - len(rule)) :]
        if len(fitting) < len(rule) or divisible_axes(fitting, rule, mesh) != list(rule):
            return [None] * len(shape)
    if len(rule) > len(shape):
        raise ConfigError(f"config.sharding_strategy: {list(rule)} is longer than {name} of shape {shape}")
    last = [tuple(axis) if isinstance(axis, list) else axis for axis in rule]
    spec: list[Axis] = [*[None] * (len(shape) - len(rule)), *last]
    for size, axis in zip(shape, spec, strict=True):
        if size % axis_size(mesh, axis):
            split = f"{axis} {axis_size(mesh, axis)} does not divide {size} of {name} {shape}"
            raise ConfigError(f"config.sharding_strategy: {split}")
    return spec


def _strategy_spec(name: str, shape: tuple[int, ...], strategy: str, mesh: Mesh) -> list[Axis]:
    """Return the mesh axes that split each dimension of a parameter by a named strategy; None: no axis."""
    first = int(re.fullmatch(STACKED, name) is not None)
    spec: list[Axis] = [None] * len(shape)
    if "tensor" in strategy:
        axes = next((axes for end, axes in TENSOR_RULES if re.fullmatch(f"(.*/)?{end}", name)), ())
        if len(axes) == len(shape) - first:
            spec[first:] = divisible_axes(shape[first:], axes, mesh)
    if "fsdp" in strategy and len(shape) - first > 1:
        fits = [i for i in range(first, len(shape)) if shape[i] % (mesh.shape["fsdp"] * axis_size(mesh, spec[i])) == 0]
        chosen = max(fits, key=lambda i: (spec[i] is None, shape[i]), default=None)
        if chosen is not None:
            spec[chosen] = "fsdp" if spec[chosen] is None else ("tensor", "fsdp")
    return spec


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding with the same values on every device."""
    return NamedSharding(mesh, P())


def compiler_options(mesh: Mesh) -> dict[str, int] | None:
    """Return options of `jax.jit` for programs on a mesh: on TPUs, a split matrix is gathered before its product.

    The compiler would multiply by one part after the other, in 3.2 times the cycles of a step of 405M on v5e:4x4 (its
    estimate, without the time of exchanges). `LIBTPU_INIT_ARGS` with the same option takes precedence.
    """
    is_split = mesh.size > 1 and mesh.devices.flat[0].platform == "tpu"
    is_chosen = MIB_IN_PARTS in os.environ.get("LIBTPU_INIT_ARGS", "")
    return {MIB_IN_PARTS: 1_000_000} if is_split and not is_chosen else None


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding whose first dimension is split over the axes of `BATCH`."""
    return NamedSharding(mesh, P(BATCH))


def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts into which a batch is split."""
    return axis_size(mesh, BATCH)


def local_rows(mesh: Mesh, batch_size: int) -> list[int]:
    """Return the rows of a batch that the devices of this process hold, in order; other processes may hold them."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in indices if index for row in range(batch_size)[index[0]]})


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """Transfer a batch to the devices, and return it as arrays of `batch_size` rows with the `batch_sharding`.

    Args:
      batch: arrays with the `local_rows` of this process.
      mesh: a mesh of `make_mesh`.
      batch_size: rows of all processes, a multiple of `batch_shards`.
    """
    at = {row: i for i, row in enumerate(local_rows(mesh, batch_size))}

    def put(local: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index
            rows = range(batch_size)[index[0]]
            return local[at[rows[0]] : at[rows[0]] + len(rows)]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), batch_sharding(mesh), part)

    return {key: put(value) for key, value in batch.items()}


def prefetch(
    batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    """Yield batches after `put_batch`, called one batch in advance to overlap transfers with computation."""
    sent: list[dict[str, jax.Array]] = []
    try:
        for batch in batches:
            sent.append(put_batch(batch, mesh, batch_size))
            if len(sent) > 1:
                yield sent.pop(0)
    except Exception:  # the batch before an error is used first
        yield from sent
        raise
    yield from sent
