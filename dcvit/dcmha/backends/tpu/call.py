"""Calls of TPU kernels with named arrays: each is declared once, and the kernel gets its reference by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from dcvit.dcmha.backends.tpu.config import Index, IndexMap, Interpret
from dcvit.dcmha.shapes import Array, Ref

Refs: TypeAlias = Mapping[str, Ref]  # references of a kernel by name; absent weights, masks and buffers have none


class Blocked(NamedTuple):
    """An array in HBM, or its type, and the block of it that one step of a kernel's grid reads or writes."""

    array: Array | jax.ShapeDtypeStruct
    block: tuple[int, ...] | None = None  # shape of a block; None for a small array that is read from SMEM as a whole
    axes: str = ""  # for each axis, the letter of the index map that selects the block; "." for an axis in one block

    def like(self, dtype: DTypeLike) -> Blocked:
        """Return the declaration of another array with this shape and these blocks."""
        return self._replace(array=jax.ShapeDtypeStruct(self.array.shape, dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of a kernel: its grid, and all its arrays by name."""

    name: str
    grid: tuple[int, ...]
    index_maps: Mapping[str, IndexMap]  # by the letters of `Blocked.axes`, from all grid indices to a block's index
    inputs: Mapping[str, Blocked]
    prefetched: Mapping[str, Array] = dataclasses.field(default_factory=dict)  # in SMEM; index maps get references too
    outputs: Mapping[str, Blocked]
    scratch: Mapping[str, pl.MemoryRef]  # buffers in VMEM
    vmem_bytes: int  # limit
    parallel_axes: int = 1  # number of leading axes of the grid that may be split over cores
    metadata: dict[str, str] | None = None  # see `dcvit.dcmha.backends.tpu.config.conditions`

    def run(self, kernel: Callable[[Refs], None], interpret: Interpret) -> dict[str, Array]:
        """Call `kernel` in each step of the grid with the references of the step, and return the outputs by name."""
        names = (*self.prefetched, *self.inputs, *self.outputs, *self.scratch)
        semantics: tuple[Literal["parallel", "arbitrary"], ...] = tuple(
            "parallel" if n < self.parallel_axes else "arbitrary" for n in range(len(self.grid))
        )
        results = pl.pallas_call(
            lambda *references: kernel(dict(zip(names, references, strict=True))),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.prefetched),
                grid=self.grid,
                in_specs=[self.spec(x) for x in self.inputs.values()],
                out_specs=[self.spec(x) for x in self.outputs.values()],
                scratch_shapes=list(self.scratch.values()),
            ),
            out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in self.outputs.values()],
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=self.vmem_bytes),
            interpret=interpret,
            name=self.name,
            metadata=self.metadata,
        )(*self.prefetched.values(), *(x.array for x in self.inputs.values()))
        return dict(zip(self.outputs, results, strict=True))

    def spec(self, x: Blocked) -> pl.BlockSpec:
        """Return Pallas' specification of the blocks of an array; one without blocks is in SMEM."""
        if x.block is None:
            return pl.BlockSpec(memory_space=pltpu.SMEM)

        def index(*grid_and_prefetched: Index | Ref) -> tuple[Index, ...]:
            return tuple(0 if letter == "." else self.index_maps[letter](*grid_and_prefetched) for letter in x.axes)

        return pl.BlockSpec(x.block, index)
