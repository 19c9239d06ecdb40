"""Kernel that computes the mixing matrices of all keys, for the kernels with several tiles.

A block of keys meets several blocks of queries, so that its matrices (`dcvit.dcmha.pallas_tpu.mixing`) are computed
once in the forward pass, and once in the backward pass, with their transposes. They are in HBM in between: 4·H² bytes
for each key and matrix, if H·keys is a complete register.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu import mixing
from dcvit.dcmha.pallas_tpu.config import Interpret, KernelConfig, Which, key_spec
from dcvit.dcmha.pallas_tpu.weights import key_rows_scratch, transpose_key_weights
from dcvit.dcmha.shapes import Array, Ref, not_none


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixRefs:
    """References of the kernel; those of absent weights and composes are None."""

    wk: Ref | None = None  # key-wise weights, (1, Bk, columns)
    static_pre: Ref | None = None
    static_post: Ref | None = None
    mix_pre: Ref | None = None
    mix_post: Ref | None = None
    mix_pre_back: Ref | None = None
    mix_post_back: Ref | None = None
    wk_cur: Ref | None = None  # key-wise weights, (columns + 8, keys)


def kernel(config: KernelConfig, names: tuple[str, ...], *arguments: Ref) -> None:
    """Compute the matrices of a block of keys; grid index (b, j)."""
    refs = MatrixRefs(**dict(zip(names, arguments, strict=True)))
    if refs.wk is not None:
        transpose_key_weights(refs.wk, not_none(refs.wk_cur))
    composes: tuple[Which, ...] = ("pre", "post")
    for which in composes:
        for suffix in ("", "_back"):
            out = getattr(refs, f"mix_{which}{suffix}")
            if out is not None:
                static = refs.static_pre if which == "pre" else refs.static_post
                mixing.build(config, which, refs.wk_cur, static, out.at[0], transposed=bool(suffix))


def with_matrices(
    config: KernelConfig, inputs: dict[str, Array], names: Sequence[str], interpret: Interpret
) -> dict[str, Array]:
    """Return the inputs of a kernel with some matrices, (B, S/keys, H, H·keys), instead of key-wise and static weights.

    Args:
      config: the sizes; nothing changes where vector units mix heads.
      inputs: arrays from `dcvit.dcmha.pallas_tpu.packing.pack`, by name.
      names: some of `MATRICES`.
      interpret: the argument of `pallas_call`.
    """
    if not config.mix_keys:
        return inputs
    kept = {name: x for name, x in inputs.items() if name != "wk" and not name.startswith("static")}
    return kept | matrices(config, inputs, names, interpret)


def matrices(
    config: KernelConfig, inputs: dict[str, Array], names: Sequence[str], interpret: Interpret
) -> dict[str, Array]:
    """Return the matrices of all composes that mix heads, by name."""
    layouts, batch = {"pre": config.pre, "post": config.post}, len(inputs["q"])
    names = [name for name in names if (layout := layouts[name.split("_")[1]]) is not None and layout.mixes]
    inputs = {name: inputs[name] for name in ("wk", "static_pre", "static_post") if name in inputs}
    specs = {name: pl.BlockSpec(memory_space=pltpu.SMEM) for name in inputs}
    scratch = {}
    if "wk" in inputs:
        columns = inputs["wk"].shape[2]
        specs["wk"] = key_spec(config, columns, lambda j: j)
        scratch["wk_cur"] = key_rows_scratch(columns)
    block = mixing.rows_shape(config)
    shape = (batch, config.blocks_k * block.shape[0], *block.shape[1:])
    results = pl.pallas_call(
        functools.partial(kernel, config, (*inputs, *names, *scratch)),
        grid=(batch, config.blocks_k),
        in_specs=list(specs.values()),
        out_specs=[pl.BlockSpec((1, *block.shape), lambda b, j: (b, j, 0, 0))] * len(names),
        out_shape=[jax.ShapeDtypeStruct(shape, block.dtype)] * len(names),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=config.vmem_bytes
        ),
        interpret=interpret,
        name="dcmha_gradient_matrices" if any(name.endswith("_back") for name in names) else "dcmha_matrices",
    )(*inputs.values())
    return dict(zip(names, results, strict=True))
