"""Calls of TPU kernels. A kernel gets its references in a record, and the call declares them in one of the same class.

A record is a dataclass whose fields are of the type `Memory`: declarations in a `KernelCall`, references in a kernel.
Absent weights, masks and buffers are None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu.config import Index, IndexMap, Interpret
from dcvit.dcmha.shapes import Array, Ref

Memory = TypeVar("Memory")
Declared: TypeAlias = Any  # the `Memory` of a record of declarations: `Blocked`, a MemoryRef or an array
Pair: TypeAlias = tuple[Memory | None, Memory | None]  # of the pre-compose and the post-compose


class Blocked(NamedTuple):
    """An array in HBM, or its type, and the block of it that one step of a kernel's grid reads or writes."""

    array: Array | jax.ShapeDtypeStruct
    block: tuple[int, ...] | None = None  # shape of a block; None for a small array that is read from SMEM as a whole
    axes: str = ""  # for each axis, the letter of the index map that selects the block; "." for an axis in one block

    def like(self, dtype: DTypeLike) -> Blocked:
        """Return the declaration of another array with this shape and these blocks, an output."""
        return self._replace(array=jax.ShapeDtypeStruct(self.array.shape, dtype))

    def read_by(self, letter: str) -> Blocked:
        """Return the declaration with the index map `letter` for its blocks of keys."""
        return self._replace(axes=self.axes.replace("S", letter))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed(Generic[Memory]):
    """Inputs of the kernels of attention, see `dcvit.dcmha.backends.tpu.packing.pack`, or the gradients of these."""

    q: Memory
    k: Memory
    v: Memory
    wq: Memory | None = None  # query-wise weights, one example in tiles
    wk: Memory | None = None  # key-wise weights, one example in tiles
    weights: Memory | None = None  # weights of both sides, interleaved examples
    static: Pair[Memory] = (None, None)
    mask: Memory | None = None
    ids_q: Memory | None = None  # segment ids
    ids_k: Memory | None = None
    d_out: Memory | None = None  # gradient of the output, in the backward pass
    lse: Memory | None = None  # log-sum-exp of each query
    delta: Memory | None = None  # Σ_s P·dP of each query, one example in tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ComposeRefs(Generic[Memory]):
    """Arrays and buffers of one compose, see `dcvit.dcmha.backends.tpu.mixing` and `…stages`."""

    matrices: Memory | None = None  # of key-wise and static weights
    transposed: Memory | None = None  # matrices of the transposed compose
    d_matrices: Memory | None = None  # gradients of `matrices`
    static_sums: Memory | None = None  # gradients of static weights, not yet summed over a register
    hidden: Memory | None = None  # hidden planes of the query-wise projection


ComposePair: TypeAlias = tuple[ComposeRefs[Memory], ComposeRefs[Memory]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of a kernel.

    `refs` is a record of declarations: `Blocked` for an input, or for an output if its array is a ShapeDtypeStruct; a
    MemoryRef for a buffer in VMEM; and an array for one that is prefetched to SMEM, which index maps get too.
    """

    name: str
    grid: tuple[int, ...]
    index_maps: Mapping[str, IndexMap]  # by the letters of `Blocked.axes`, from all grid indices to a block's index
    refs: Any
    vmem_bytes: int  # limit
    parallel_axes: int = 1  # number of leading axes of the grid that may be split over cores
    metadata: dict[str, str] | None = None  # see `dcvit.dcmha.backends.tpu.config.conditions`

    def run(self, kernel: Callable[[Any], None], interpret: Interpret) -> Any:
        """Call `kernel` in each step of the grid with the references of the step, and return the record of outputs."""
        leaves, tree = jax.tree.flatten(self.refs, is_leaf=lambda x: isinstance(x, Blocked))
        places = sorted(range(len(leaves)), key=lambda n: _kind(leaves[n]))
        prefetched, inputs, outputs, scratch = ([x for x in leaves if _kind(x) == kind] for kind in range(4))

        def record(values: Sequence[object]) -> Any:
            by_place = dict(zip(places, values, strict=True))
            return jax.tree.unflatten(tree, [by_place[n] for n in range(len(leaves))])

        semantics: tuple[Literal["parallel", "arbitrary"], ...] = tuple(
            "parallel" if n < self.parallel_axes else "arbitrary" for n in range(len(self.grid))
        )
        results = pl.pallas_call(
            lambda *references: kernel(record(references)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetched),
                grid=self.grid,
                in_specs=[self.spec(x) for x in inputs],
                out_specs=[self.spec(x) for x in outputs],
                scratch_shapes=scratch,
            ),
            out_shape=[x.array for x in outputs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=self.vmem_bytes),
            interpret=interpret,
            name=self.name,
            metadata=self.metadata,
        )(*prefetched, *(x.array for x in inputs))
        return record([*[None] * len([*prefetched, *inputs]), *results, *[None] * len(scratch)])

    def spec(self, x: Blocked) -> pl.BlockSpec:
        """Return Pallas' specification of the blocks of an array; one without blocks is in SMEM."""
        if x.block is None:
            return pl.BlockSpec(memory_space=pltpu.SMEM)

        def index(*grid_and_prefetched: Index | Ref) -> tuple[Index, ...]:
            return tuple(0 if letter == "." else self.index_maps[letter](*grid_and_prefetched) for letter in x.axes)

        return pl.BlockSpec(x.block, index)


def _kind(declared: object) -> int:
    """Return the place of a declaration among the arguments: prefetched, inputs, outputs, buffers."""
    if isinstance(declared, Blocked):
        return 2 if isinstance(declared.array, jax.ShapeDtypeStruct) else 1
    return 3 if isinstance(declared, pl.MemoryRef) else 0


def vmem(shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> pl.MemoryRef:
    """Return the declaration of a buffer in VMEM."""
    found: pl.MemoryRef = pltpu.VMEM(shape, jnp.dtype(dtype))
    return found
