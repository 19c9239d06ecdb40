"""Loading of parameters onto devices from tensors that are read one at a time.

A scan stacks the parameters of its layers along a new first axis. Tensors and model may be of scanned or unrolled
layers: layers are matched by their number, so that any layout of a checkpoint fills any layout of a model.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from dcvit.errors import CheckpointError, matches
from dcvit.parallel.trees import Shapes, Tensor, Tensors, by_name, check_tree, nested, shapes_of

STACKED = re.compile(r"Transformer/(?:encoderblock|(?P<group>(?:encoder)?group)/layer_(?P<place>\d+))/(?P<rest>.+)")
SINGLE = re.compile(r"Transformer/(?P<kind>encoder|decoder)block_(?P<number>\d+)/(?P<rest>.+)")
Leaf: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class Part(NamedTuple):
    """An array by its path; or, with `layer`, one layer of an array that a scan stacks."""

    path: str
    layer: int | None = None


def unrolled(shapes: Shapes) -> dict[str, Part]:
    """Map the path of each parameter in unrolled layers to its `Part` in arrays of scanned or unrolled layers.

    The parts of an array follow each other.

    Raises:
      CheckpointError: two arrays hold the same parameter.
    """
    stacks = {path: match for path in shapes if (match := STACKED.fullmatch(path)) and shapes[path]}
    period = max((1 + int(match["place"] or 0) for match in stacks.values()), default=0)  # layers in the scan's body
    parts: dict[str, Part] = {}
    for path, shape in shapes.items():
        names = {path: Part(path)}
        if match := stacks.get(path):
            block, first = "decoderblock" if match["group"] == "group" else "encoderblock", int(match["place"] or 0)
            names = {
                f"Transformer/{block}_{first + i * period}/{match['rest']}": Part(path, i) for i in range(shape[0])
            }
        if both := names.keys() & parts.keys():
            raise CheckpointError(f"{path} and {parts[min(both)].path} hold the same parameter {min(both)}")
        parts |= names
    return parts


def layer_checksums(tensors: Tensors) -> dict[str, int]:
    """Return the CRC-32 of each parameter, as float32, in unrolled layers; an array of several is read once."""
    found: dict[str, int] = {}
    held: dict[str, np.ndarray] = {}
    for name, (path, layer) in unrolled({path: tensor.shape for path, tensor in tensors.items()}).items():
        if path not in held:
            held = {path: np.ascontiguousarray(tensors[path].read(), np.float32)}
        array = held[path] if layer is None else held[path][layer]
        found[name] = zlib.crc32(array.tobytes())
    return found


def in_layout(tensors: Tensors, model: Shapes) -> set[str]:
    """Return the names of tensors in the layout of `model`, where several layers may be stacked to one parameter.

    Raises:
      CheckpointError: two tensors hold the same parameter.
    """
    wanted = unrolled(model)
    return {wanted.get(name, Part(name)).path for name in unrolled({path: x.shape for path, x in tensors.items()})}


def place_params(
    tensors: Tensors, like: Mapping[str, PyTree], file: str, dont_load: Sequence[str] = ()
) -> dict[str, PyTree]:
    """Load tensors into a model's parameters; one tensor at a time is in the host's memory.

    Args:
      tensors: the parameters by path, of scanned or unrolled layers.
      like: the model's parameters as arrays or `jax.ShapeDtypeStruct`. The result has their dtypes and shardings; of a
        sharded array, each process holds its own part.
      file: the name of the tensors' file in messages.
      dont_load: regexes; parameters whose whole name matches one keep their value from `like`.

    Raises:
      CheckpointError: a name or shape occurs on one side only (both sides are listed, and nothing is read), or a tensor
        is damaged or not finite.
      ConfigError: a pattern of `dont_load` is not a regular expression.
    """
    leaves: dict[str, Leaf] = by_name(like)
    model = shapes_of(leaves)
    names = model.keys() | in_layout(tensors, model)
    kept = {path for pattern in dont_load for path in matches(pattern, names, "dont_load")}
    wanted = unrolled(model)
    sources = unrolled({path: tensor.shape for path, tensor in tensors.items()})
    sources = {name: part for name, part in sources.items() if wanted.get(name, Part(name)).path not in kept}
    wanted = {name: part for name, part in wanted.items() if part.path not in kept}
    found = {name: tensors[path].shape[layer is not None :] for name, (path, layer) in sources.items()}
    check_tree(found, {name: model[path][layer is not None :] for name, (path, layer) in wanted.items()}, file)
    placed: dict[str, jax.Array] = {}
    parts: dict[str, list[str]] = {}  # names of each tensor's parameters, to read it once
    for name, source in sources.items():
        parts.setdefault(source.path, []).append(name)
    for path, inside in parts.items():
        value = _read(tensors[path], leaves[wanted[inside[0]].path].dtype, f"{file}: {path}")
        if value.shape == model.get(path):
            placed[path] = _put(value, None, leaves[path], None)
            continue
        for name in inside:
            target, layer = wanted[name], sources[name].layer
            part = value if layer is None else value[layer]
            placed[target.path] = _put(part, target.layer, leaves[target.path], placed.get(target.path))
    return nested({path: placed.get(path, leaf) for path, leaf in leaves.items()})


def _read(tensor: Tensor, dtype: DTypeLike, what: str) -> np.ndarray:
    """Read a tensor, and return it in `dtype`; `what` is its name in messages.

    Raises:
      CheckpointError: its values are not finite numbers, or its shape is not the announced one.
    """
    array = tensor.read()
    if array.shape != tensor.shape or not (jnp.issubdtype(array.dtype, np.floating) or array.dtype.kind in "iu"):
        raise CheckpointError(f"{what} is {array.dtype} of {array.shape}; expected numbers of {tensor.shape}")
    with np.errstate(over="ignore"):  # the check of the result reports it
        value = np.asarray(array, dtype)
    if not (finite := np.isfinite(value)).all():
        raise CheckpointError(
            f"{what} has numbers that are not finite in {value.dtype}, such as {value[~finite][0]}; "
            "give weights of a run that did not diverge"
        )
    return value


def _put(value: np.ndarray, index: int | None, leaf: Leaf, stack: jax.Array | None) -> jax.Array:
    """Place a value on devices as `leaf`; with an index, return `stack` with this layer replaced by the value."""
    sharding = None if isinstance(leaf, np.ndarray) else leaf.sharding
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None
    if index is None:
        return _transfer(value, sharding)
    if stack is None:
        stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(leaf.shape, leaf.dtype)
    of_layer = sharding
    if isinstance(sharding, NamedSharding):
        of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return _setter(sharding)(stack, _transfer(value, of_layer), index)


def _transfer(value: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])


@functools.lru_cache
def _setter(sharding: Sharding | None) -> Callable[..., jax.Array]:
    """Return the compiled function that replaces one layer of a stack in place (its buffer is donated)."""
    return jax.jit(
        lambda stack, layer, index: jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0),
        donate_argnums=0, out_shardings=sharding,
    )  # fmt: skip
