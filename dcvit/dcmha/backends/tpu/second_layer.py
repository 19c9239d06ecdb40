"""TPU kernels of the second layer of the dynamic weights and its gradient (Eqn 5).

XLA needs several passes over the weights for the norm of the down projections and its gradient. These kernels read
x·W_1 and x·W_g (`dcvit.dcmha.compose.HiddenWeights`), and write the packed weights, in one pass; the backward kernel
also reads the gradients of the packed weights.

The columns of an array are those of the packed weights: down projections w_1, which are divided by their root mean
square over heads, up projections w_2, gates, and padding. Constants of columns take the place of masks: the term of a
mean square is ε for w_1, and 1 for the other columns, whose mean is 0, so that they are multiplied by 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu.call import Blocked, Declared, KernelCall, Memory
from dcvit.dcmha.backends.tpu.config import SUBLANES, IndexMap, Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.interleaved import TILE_ROWS
from dcvit.dcmha.backends.tpu.packing import corrections
from dcvit.dcmha.backends.tpu.tile import dot
from dcvit.dcmha.compose import RMS_EPSILON, HiddenWeights, mean_matrix
from dcvit.dcmha.shapes import Array, Float, Ref, not_none

PART, PARTS = 256, 8  # largest numbers of tokens that are processed at once, and of such parts of a block
VMEM_BYTES = 16 * 2**20  # limit of a kernel: XLA keeps activations of other operations in the rest of VMEM
GELU_SCALE, GELU_CUBE = float(np.sqrt(2 / np.pi)), 0.044715  # of GELU's approximation by tanh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(Generic[Memory]):
    """References of the kernels."""

    before: Memory  # x·W_1 and x·W_g, (tokens, C)
    layers: Memory  # W_2 and the matrix of means over heads, (2 C C)
    constants: Memory  # rows: term of the mean square, 1 for gates, factor of the gradient, (8 C)
    weights: Memory | None = None  # the result, or its gradient in the backward kernel
    d_before: Memory | None = None
    d_second: Memory | None = None


class Activations(NamedTuple):
    """Arrays that the second layer computes, (tokens, C)."""

    hidden: Array  # GELU(x·W_1), an operand
    slope: Array  # derivative of the GELU
    projections: Array  # w_1 after its norm, and w_2; 0 for gates
    scale: Array  # factor of w_1 in its norm; 1 for others
    gates: Array  # tanh(x·W_g); 0 for others


def supports(hidden: HiddenWeights) -> bool:
    """Return True if the kernels compute these weights."""
    batch, tokens, _ = hidden.before.shape
    return hidden.layout.gelu == "tanh" and (batch % TILE_ROWS == 0 or tokens % TILE_ROWS == 0)


def weights(config: KernelConfig, hidden: HiddenWeights, interpret: Interpret) -> Float[Array, "B N C"]:
    """Return the packed weights in float32."""
    refs = _refs(hidden, config)
    refs = dataclasses.replace(refs, weights=refs.before.like(jnp.float32))
    found = _call("dcmha_weights", refs, _weights_kernel, interpret)
    return _by_example(not_none(found.weights), hidden)


def gradients(
    config: KernelConfig, hidden: HiddenWeights, d_weights: Float[Array, "B N C"], interpret: Interpret
) -> HiddenWeights:
    """Return the gradients of `hidden` from those of the packed weights that the kernels of attention return."""
    refs, count = _refs(hidden, config), hidden.before.shape[2]
    cores = _grid(refs)[0]
    d_second = Blocked(jax.ShapeDtypeStruct((cores, count, count), jnp.float32), (1, count, count), "C..")
    refs = dataclasses.replace(
        refs, weights=Blocked(_by_token(d_weights), refs.before.block, "N."), d_second=d_second,
        d_before=refs.before.like(hidden.before.dtype),
    )  # fmt: skip
    found = _call("dcmha_weight_gradients", refs, _gradient_kernel, interpret)
    second = jnp.where(_is_projection(hidden), jnp.sum(not_none(found.d_second), axis=0), 0)
    before = _by_example(not_none(found.d_before), hidden)
    return hidden._replace(before=before, second=second.astype(hidden.second.dtype))


def _by_token(x: Float[Array, "B N C"]) -> Float[Array, "tokens C"]:
    """Return an array with a row for each token, in the order in which XLA keeps activations on a TPU."""
    ordered = x.swapaxes(0, 1) if _has_examples_inside(x) else x
    return ordered.reshape(-1, x.shape[2])


def _by_example(x: Float[Array, "tokens C"], like: HiddenWeights) -> Float[Array, "B N C"]:
    """Return the array from which `_by_token` returned `x`."""
    batch, tokens, count = like.before.shape
    if _has_examples_inside(like.before):
        return x.reshape(tokens, batch, count).swapaxes(0, 1)
    return x.reshape(batch, tokens, count)


def _has_examples_inside(x: Array) -> bool:
    """Return True if the examples of a token lie together, as they do if tokens do not fill registers."""
    return x.shape[1] % TILE_ROWS > 0


def _refs(hidden: HiddenWeights, config: KernelConfig) -> Refs[Declared]:
    """Return the declarations of what both kernels read."""
    operand, count, layout = config.operand_dtype, hidden.before.shape[2], hidden.layout
    ends = layout.ends(count)
    is_down = ends == "1"
    means = mean_matrix(is_down, layout.heads // layout.groups)
    second = hidden.second * _is_projection(hidden).astype(hidden.second.dtype)
    layers = jnp.stack([second.astype(operand), jnp.asarray(means, operand)])
    constants = np.zeros((SUBLANES, count), np.float32)
    constants[:3] = np.where(is_down, RMS_EPSILON, 1.0), ends == "g", corrections(config, ("q", "k"), count)
    x = _by_token(hidden.before)
    return Refs(
        Blocked(x, (_block(len(x)), count), "N."), Blocked(layers, layers.shape, "..."),
        Blocked(jnp.asarray(constants), constants.shape, ".."),
    )  # fmt: skip


def _is_projection(hidden: HiddenWeights) -> np.ndarray:
    """Return True for the columns of W_2 that are used, (1, C)."""
    found: np.ndarray = np.isin(hidden.layout.ends(hidden.before.shape[2]), ("1", "2"))[None]
    return found


def _block(tokens: int) -> int:
    """Return the tokens of a block, which divide all tokens and are at most `PARTS` parts."""
    part = _part(tokens)
    return part * max(n for n in range(1, PARTS + 1) if tokens // part % n == 0)


def _part(tokens: int) -> int:
    """Return the tokens that are processed at once."""
    return math.gcd(tokens, PART)


def _grid(refs: Refs[Declared]) -> tuple[int, int]:
    """Return the grid: equal parts of the blocks, which two cores of a chip may process, by blocks of a part."""
    blocks = len(refs.before.array) // refs.before.block[0]
    cores = 1 + (blocks % 2 == 0)
    return cores, blocks // cores


def _call(
    name: str, refs: Refs[Declared], kernel: Callable[[Refs[Ref], slice], None], interpret: Interpret
) -> Refs[Array]:
    """Call `kernel` for all parts of all blocks."""
    grid = _grid(refs)
    maps: dict[str, IndexMap] = {"N": lambda core, n: core * grid[1] + n, "C": lambda core, n: core}

    def of_block(refs: Refs[Ref]) -> None:
        part = _part(refs.before.shape[0])
        for start in range(0, refs.before.shape[0], part):  # unrolled, so that products overlap with vector operations
            kernel(refs, slice(start, start + part))

    call = KernelCall(name=name, grid=grid, index_maps=maps, refs=refs, vmem_bytes=VMEM_BYTES)
    found: Refs[Array] = call.run(of_block, interpret)
    return found


def _activations(refs: Refs[Ref], rows: slice) -> Activations:
    """Return the weights of some tokens, and what they are computed from."""
    before, operand = refs.before[rows].astype(jnp.float32), refs.layers.dtype
    square = before * before
    t = jnp.tanh(GELU_SCALE * before * (1 + GELU_CUBE * square))
    slope = 0.5 * (1 + t) + 0.5 * before * (1 - t * t) * (GELU_SCALE * (1 + 3 * GELU_CUBE * square))
    hidden = (0.5 * before * (1 + t)).astype(operand)
    both = dot(hidden, refs.layers[0], (1, 0))
    scale = jax.lax.rsqrt(dot((both * both).astype(operand), refs.layers[1], (1, 0)) + refs.constants[0:1])
    return Activations(hidden, slope, both * scale, scale, jnp.tanh(before) * refs.constants[1:2])


def _weights_kernel(refs: Refs[Ref], rows: slice) -> None:
    x = _activations(refs, rows)
    not_none(refs.weights)[rows] = x.projections + x.gates


def _gradient_kernel(refs: Refs[Ref], rows: slice) -> None:
    """Compute gradients: that of w = s·b for b, with s = (mean b² + ε)^(-1/2), is s·(d - w·mean(w·d))."""
    out, operand = not_none(refs.d_second), refs.layers.dtype
    is_gate, factor = refs.constants[1:2], refs.constants[2:3]
    x, d = _activations(refs, rows), not_none(refs.weights)[rows] * factor
    means = dot((x.projections * d).astype(operand), refs.layers[1], (1, 0))
    d_both = (x.scale * (d - x.projections * means)).astype(operand)
    d_before = dot(d_both, refs.layers[0], (1, 1)) * x.slope + d * (is_gate - x.gates * x.gates)
    not_none(refs.d_before)[rows] = d_before.astype(not_none(refs.d_before).dtype)
    earlier = out[0] if rows.start else jnp.where(pl.program_id(1) == 0, 0.0, out[0])
    out[0] = earlier + dot(x.hidden, d_both, (0, 0))
