"""Kernel that computes the mixing matrices of all keys, for the kernels with several tiles.

A block of keys meets several blocks of queries, so that its matrices (`dcvit.dcmha.pallas_tpu.mixing`) are computed
once in the forward pass, and once in the backward pass, with their transposes. They are in HBM in between: 4·H² bytes
for each key and matrix, if H·keys is a complete register.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from dcvit.dcmha.pallas_tpu import mixing
from dcvit.dcmha.pallas_tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.pallas_tpu.config import ComposeName, Interpret, KernelConfig
from dcvit.dcmha.pallas_tpu.weights import key_rows_scratch, transpose_key_weights

MATRICES = ("mix_pre", "mix_post", "mix_pre_back", "mix_post_back")  # of each compose, and of its transpose


def kernel(config: KernelConfig, refs: Refs) -> None:
    """Compute the matrices of a block of keys; grid index (b, j)."""
    if "wk" in refs:
        transpose_key_weights(refs["wk"], refs["wk_cur"])
    composes: tuple[ComposeName, ...] = ("pre", "post")
    for compose_name in composes:
        for suffix in ("", "_back"):
            if f"mix_{compose_name}{suffix}" in refs:
                static, out = refs.get(f"static_{compose_name}"), refs[f"mix_{compose_name}{suffix}"].at[0]
                mixing.build(config, compose_name, refs.get("wk_cur"), static, out, transposed=bool(suffix))


def with_matrices(
    config: KernelConfig, inputs: dict[str, Blocked], names: Sequence[str], interpret: Interpret
) -> dict[str, Blocked]:
    """Return the inputs of a kernel with some matrices, (B, S/keys, H, H·keys), instead of key-wise and static weights.

    Args:
      config: the sizes; nothing changes where vector units mix heads.
      inputs: arrays from `dcvit.dcmha.pallas_tpu.packing.pack`, by name.
      names: some of `MATRICES`.
      interpret: the argument of `pallas_call`.
    """
    if config.family != "matrix":
        return inputs
    kept = {name: x for name, x in inputs.items() if name != "wk" and not name.startswith("static")}
    return kept | matrices(config, inputs, names, interpret)


def matrices(
    config: KernelConfig, inputs: dict[str, Blocked], names: Sequence[str], interpret: Interpret
) -> dict[str, Blocked]:
    """Return the matrices of all composes that mix heads, by name."""
    layouts, batch = {"pre": config.pre, "post": config.post}, len(inputs["q"].array)
    names = [name for name in names if (layout := layouts[name.split("_")[1]]) is not None and layout.mixes]
    inputs = {name: inputs[name] for name in ("wk", "static_pre", "static_post") if name in inputs}
    block = mixing.rows_shape(config)
    shape = (batch, config.blocks_k * block.shape[0], *block.shape[1:])
    out = Blocked(jax.ShapeDtypeStruct(shape, block.dtype), (1, *block.shape), "BS..")
    call = KernelCall(
        name="dcmha_gradient_matrices" if any(name.endswith("_back") for name in names) else "dcmha_matrices",
        grid=(batch, config.blocks_k),
        index_maps={"B": lambda b, j: b, "S": lambda b, j: j},
        inputs=inputs,
        outputs=dict.fromkeys(names, out),
        scratch={"wk_cur": key_rows_scratch(inputs["wk"].array.shape[2])} if "wk" in inputs else {},
        vmem_bytes=config.vmem_bytes,
    )
    results = call.run(functools.partial(kernel, config), interpret)
    return {name: out._replace(array=x) for name, x in results.items()}
