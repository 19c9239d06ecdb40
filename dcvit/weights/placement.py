"""Loading of parameters onto devices from tensors that are read one at a time.

A scan stacks the parameters of its layers along a new first axis. Tensors and model may be of scanned or unrolled
layers: layers are matched by their number, so that any layout of a checkpoint fills any layout of a model.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
MAX_LAYERS = 1 << 12  # of a stack; a damaged file may announce any number


class Part(NamedTuple):
    """An array by its path; or, with `layer`, one layer of an array that a scan stacks."""

    path: str
    layer: int | None = None


def unrolled(shapes: Shapes) -> dict[str, Part]:
    """Map the path of each parameter in unrolled layers to its `Part` in arrays of scanned or unrolled layers.

    Raises:
      CheckpointError: two arrays hold the same parameter.
    """
    period = period_of(shapes)
    parts: dict[str, Part] = {}
    for path, shape in shapes.items():
        match = STACKED.fullmatch(path)
        if not match or not shape or shape[0] > MAX_LAYERS:
            names = {path: Part(path)}
        else:
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
    places: dict[str, dict[str, int | None]] = {}  # layers by name, of each array
    for name, (path, layer) in unrolled({path: tensor.shape for path, tensor in tensors.items()}).items():
        places.setdefault(path, {})[name] = layer
    found: dict[str, int] = {}
    for path, layers in places.items():
        array = np.ascontiguousarray(tensors[path].read(), np.float32)
        found |= {name: zlib.crc32((array if i is None else array[i]).tobytes()) for name, i in layers.items()}
    return found


def period_of(paths: Iterable[str]) -> int:
    """Return the number of layers in the body of a scan, from the paths of its parameters; 0 without a scan."""
    matches = filter(None, map(STACKED.fullmatch, paths))
    return max((1 + int(match["place"] or 0) for match in matches), default=0)


def in_layout(tensors: Tensors, model: Shapes) -> set[str]:
    """Return the names of tensors in the layout of `model`, where several layers may be stacked to one parameter.

    Raises:
      CheckpointError: two tensors hold the same parameter.
    """
    return {target.path for _, target in _pairs(tensors, model).values()}


def _pairs(tensors: Tensors, model: Shapes) -> dict[str, tuple[Part, Part]]:
    """Return, for each parameter of unrolled layers, its `Part` in the tensors and that in the layout of a model."""
    wanted, period = unrolled(model), period_of(model)
    sources = unrolled({path: tensor.shape for path, tensor in tensors.items()})
    return {name: (source, wanted.get(name) or _place(name, period)) for name, source in sources.items()}


def _place(name: str, period: int) -> Part:
    """Return a parameter of an unrolled layer as the `Part` of a scan over groups of `period` layers (0: no scan)."""
    match = SINGLE.fullmatch(name)
    if not match or not period:
        return Part(name)
    repeat, place = divmod(int(match["number"]), period)
    if match["kind"] == "encoder":
        group = "encoderblock" if period == 1 else f"encodergroup/layer_{place}"
    else:
        group = f"group/layer_{place}"
    return Part(f"Transformer/{group}/{match['rest']}", repeat)


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
    pairs = _pairs(tensors, model)
    names = model.keys() | {target.path for _, target in pairs.values()}
    kept = {path for pattern in dont_load for path in matches(pattern, names, "dont_load")}
    pairs = {name: (source, target) for name, (source, target) in pairs.items() if target.path not in kept}
    found = {name: tensors[source.path].shape[source.layer is not None :] for name, (source, _) in pairs.items()}
    wanted = {name: part for name, part in unrolled(model).items() if part.path not in kept}
    check_tree(found, {name: model[x.path][x.layer is not None :] for name, x in wanted.items()}, file)
    placed: dict[str, jax.Array] = {}
    parts: dict[str, list[tuple[Part, Part]]] = {}  # of each tensor, to read it once
    for source, target in pairs.values():
        parts.setdefault(source.path, []).append((source, target))
    for path, places in parts.items():
        value = _read(tensors[path], leaves[places[0][1].path].dtype, f"{file}: {path}")
        whole = value.shape == model.get(path) and all(source == target for source, target in places)
        for source, target in [(Part(path), Part(path))] if whole else places:
            part = value if source.layer is None else value[source.layer]
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
    _check_finite(value, what)
    return value


def _check_finite(value: np.ndarray, what: str) -> None:
    if not (finite := np.isfinite(value)).all():
        raise CheckpointError(
            f"{what} has numbers that are not finite in {value.dtype}, such as {value[~finite][0]}; "
            "give weights of a run that did not diverge"
        )


def _put(value: np.ndarray, index: int | None, leaf: Leaf, stack: jax.Array | None) -> jax.Array:
    """Place a value on devices as `leaf`; with an index, return `stack` with this layer replaced by the value."""
    sharding = _sharding(leaf)
    if index is None:
        return _transfer(value, sharding)
    if stack is None:
        stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(leaf.shape, leaf.dtype)
    if isinstance(sharding, NamedSharding):
        layer = _transfer(value, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])))
    else:
        layer = _transfer(value, sharding)
    return _setter(sharding)(stack, layer, index)


def _sharding(leaf: Leaf) -> Sharding | None:
    """Return the sharding of a committed array, or of a `jax.ShapeDtypeStruct` with a sharding; else None."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return None if isinstance(leaf, np.ndarray) else leaf.sharding


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
