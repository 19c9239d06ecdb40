"""DCMHA in TPU kernels, one forward and one or two backward: nothing of the size H×T×S leaves the chip.

A tile is H planes of Bk keys (in sublanes) by Bq queries (in lanes), in VMEM; `pallas_tpu_tiles` is the work on one.
The forward kernel goes over the key blocks that a query block sees, in phase 0 for the row statistics and in phase 1
for the output. It keeps the scores in VMEM in between where they fit into half of it, as those of a window do, and
computes them again otherwise. One tile holds all of an image of up to 256 patches; then both phases are one step, and
the images are the grid. Blocks that no query sees are neither fetched nor computed.

Saved for the backward pass: the inputs and the log-sum-exp. Where a tile does not hold whole rows, a first kernel
computes delta = Σ_s P·dP. The kernel of the gradients goes over key blocks, and inside over query blocks: gradients of
a key block gather in VMEM, those of the queries stay there for all blocks (4·T·M bytes; parts of the queries where
that is too much).

Scores are in units of log 2, and the packed weights of the first compose carry the factor scale·log2(e). With bfloat16
inputs, key-wise weights are packed in pairs, rounded to bfloat16, and matrix products take bfloat16; all else is
float32. Float32 inputs stay float32, also in products.

Measured with scripts/tpu_bundles.py on jax 0.10.2 and libtpu 0.0.42 (bundles are about cycles; H 6, 196 tokens, D 64,
bfloat16, one image; forward, gradients):
v5e 6,003 and 15,072, v6e 5,462 and 12,864; without composition 2,816 and 4,436, 2,329 and 3,511. docs/performance.md
says what they go to, and what was tried.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.pallas_tpu import backward, forward
from dcvit.dcmha.pallas_tpu.case import Case, Form, Side, hidden_planes, round_up
from dcvit.dcmha.pallas_tpu.tiling import LOG2_E
from dcvit.dcmha.shapes import Array, Bool, Float

STRIP = 8  # keys of a strip: one register
# What a kernel may take of the 128 MiB of VMEM that a v5e or v6e has, or of the 64 MiB of a v5p: those that the kernels
# have been compiled for.
VMEM = {"TPU v5 lite": 120 * 2**20, "TPU v5e": 120 * 2**20, "TPU v6": 120 * 2**20, "TPU v5": 60 * 2**20}


def refuses(
    q: Any, k: Any, v: Any, pre: Any, post: Any, *, causal: Any, window: Any, mask: Any, groups: Any
) -> str | None:
    """One line why these arguments cannot be taken, or None. Only shapes and dtypes are read."""
    if reason := refuses_all():
        return reason
    for x in (q, k, v):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"the TPU kernel takes float32 and bfloat16, found {x.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return f"the TPU kernel takes q, k and v of one dtype, found {q.dtype}, {k.dtype} and {v.dtype}"
    options = dict(causal=causal, window=window, masked=mask is not None, groups=groups, scale=1.0, vmem=vmem_limit())
    if plan(q, k, pre, post, **options) is None:
        return f"{q.shape[2]} heads of width {q.shape[3]} do not fit into a TPU's VMEM"
    return None


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    causal: bool,
    window: int | None,
    mask: Bool[Array, "#B 1 #T #S"] | None,
    groups: int,
    scale: float,
    interpret: Any = None,
) -> Float[Array, "B T H D"]:
    """See `dcvit.dcmha.attention`, which checks the arguments.

    `interpret` is that of `pallas_call`; None compiles the kernels where the program is lowered for TPUs, also on a
    host without one, and interprets them elsewhere.

    Raises:
      ValueError: what `refuses` says.
    """
    reason = refuses(q, k, v, pre, post, causal=causal, window=window, mask=mask, groups=groups)
    if reason:
        raise ValueError(reason)
    case = plan(
        q, k, pre, post, causal=causal, window=window, masked=mask is not None, groups=groups, scale=scale,
        vmem=vmem_limit(),
    )  # fmt: skip
    assert case is not None  # `refuses` has seen to it
    if mask is not None:  # keys in sublanes, as the scores; strips of a byte each would not be aligned
        mask = jnp.broadcast_to(mask[:, 0], (mask.shape[0], q.shape[1], k.shape[1])).swapaxes(1, 2)
        mask = mask.astype(jnp.bfloat16)
    out: Array = _attention(case, interpret, q, k, v, pre, post, mask)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(case: Case, interpret: Any, q: Array, k: Array, v: Array, pre: Any, post: Any, mask: Any) -> Array:
    return _forward(case, interpret, q, k, v, pre, post, mask)[0]


def _forward(
    case: Case, interpret: Any, q: Array, k: Array, v: Array, pre: Any, post: Any, mask: Any
) -> tuple[Array, Any]:
    inputs = pack(case, q, k, v, pre, post, mask)
    out, lse = by_platform(forward.forward, case, inputs, interpret)
    return out[:, : case.queries].reshape(q.shape), (q, k, v, pre, post, mask, lse)


def _backward(case: Case, interpret: Any, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    q, k, v, pre, post, mask, lse = saved
    inputs = pack(case, q, k, v, pre, post, mask)
    inputs |= {"do": planes(case, cotangent.astype(q.dtype), case.blocks_q * case.block_q), "lse": lse}
    grads = by_platform(backward.backward, case, inputs, interpret)
    dq, dk, dv = (
        grads[f"d{name}"][:, : x.shape[1]].reshape(x.shape).astype(x.dtype)
        for name, x in zip("qkv", (q, k, v), strict=True)
    )
    dmask = None if mask is None else jnp.zeros_like(mask)
    dpre, dpost = unpack(case, grads, pre, post)
    return dq, dk, dv, dpre, dpost, dmask


_attention.defvjp(_forward, _backward)


def by_platform(function: Any, case: Case, inputs: dict[str, Array], interpret: Any) -> Any:
    """The kernel on a TPU, interpreted elsewhere: decided where the program is lowered, by what it is lowered for."""
    rolled = case._replace(unroll=1)  # an interpreter gains nothing from unrolled strips
    if interpret is not None:
        return function(rolled if interpret else case, inputs, interpret=interpret)
    return jax.lax.platform_dependent(
        inputs,
        tpu=functools.partial(function, case, interpret=False),
        default=functools.partial(function, rolled, interpret=True),
    )


def planes(case: Case, x: Array, length: int) -> Array:
    """B N H D as B N' H·D, zeros after the last token."""
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)))


def weight_parts(w: Any, side: str) -> list[str]:
    """The weights of one side of a compose in the order in which they are packed."""
    return [] if w is None else [f for f in (f"{side}1", f"{side}2", f"{side}g") if getattr(w, f) is not None]


def forms(pre: Any, post: Any, scale: float) -> tuple[Form | None, Form | None]:
    """Where each weight begins among the packed columns of its side."""
    starts: dict[tuple[int, str], int] = {}
    first, columns = [0, 0], [0, 0]
    for side in "qk":
        at = 0
        for c, w in enumerate((pre, post)):
            at += at % 2
            begin = at
            for field in weight_parts(w, side):
                starts[c, field] = at
                at += int(np.prod(getattr(w, field).shape[2:]))
            if side == "k":
                first[c], columns[c] = begin, at + at % 2 - begin
    found: list[Form | None] = []
    for c, w in enumerate((pre, post)):
        if w is None:
            found.append(None)
            continue
        sides = [Side(*(starts.get((c, f"{side}{n}")) for n in "12g")) for side in "qk"]
        ranks = [0 if x is None else x.shape[2] for x in (w.q1, w.k1)]
        skip = 1.0 if c else scale * LOG2_E
        found.append(Form(sides[0], sides[1], ranks[0], ranks[1], w.static is not None, skip, first[c], columns[c]))
    return found[0], found[1]


def pack(case: Case, q: Array, k: Array, v: Array, pre: Any, post: Any, mask: Any) -> dict[str, Array]:
    """The kernels' inputs: tokens padded to whole blocks, the weights of each side in one array of float32.

    The weights of the first compose carry the factor scale·log2(e), since C(c·a) = c·C(a) and the softmax is in base 2;
    the skip connection is part of a gate.
    """
    padded_q, padded_k = case.blocks_q * case.block_q, case.blocks_k * case.block_k
    inputs = {"q": planes(case, q, padded_q), "k": planes(case, k, padded_k), "v": planes(case, v, padded_k)}
    factor = case.scale * LOG2_E
    for side, length in (("q", padded_q), ("k", padded_k)):
        columns: list[Array] = []
        for c, w in enumerate((pre, post)):
            for field in weight_parts(w, side):
                x = getattr(w, field).astype(jnp.float32)
                if field[1] == "g" and not (side == "k" and w.qg is not None):
                    x = 1 + x
                if c == 0 and field[1] != "1":
                    x = x * factor
                columns.append(x.reshape(*x.shape[:2], -1))
            if sum(x.shape[2] for x in columns) % 2:
                columns.append(jnp.zeros((*columns[-1].shape[:2], 1), jnp.float32))
        if columns:
            x = jnp.concatenate(columns, axis=-1)
            x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)))
            if side == "k" and case.packed:
                x = x.astype(jnp.bfloat16).reshape(*x.shape[:2], -1, 2)
                x = jax.lax.bitcast_convert_type(x, jnp.int32)
            if side == "q":
                x = x.reshape(x.shape[0], -1, 128, x.shape[2]).swapaxes(2, 3)
            inputs[f"w{side}"] = x
    for name, w in (("pre", pre), ("post", post)):
        if w is not None and w.static is not None:
            x = w.static.astype(jnp.float32).reshape(case.heads, -1)
            inputs[f"static_{name}"] = x * factor if name == "pre" else x
    if mask is not None:
        inputs["mask"] = jnp.pad(mask, ((0, 0), (0, padded_k - mask.shape[1]), (0, padded_q - mask.shape[2])))
    return inputs


def unpack(case: Case, grads: dict[str, Array], pre: Any, post: Any) -> tuple[Any, Any]:
    """Gradients of the composes' weights from those of the packed ones.

    The kernel's a of the first compose lacks the factor scale, and its weights have scale·log2(e) in them.
    """
    fields: list[dict[str, Array]] = [{}, {}]
    for side in "qk":
        at = 0
        for c, w in enumerate((pre, post)):
            for field in weight_parts(w, side):
                x = getattr(w, field)
                size = int(np.prod(x.shape[2:]))
                part = slice(at, at + size)
                grad = grads["dwq"][:, part].swapaxes(1, 2) if side == "q" else grads["dwk"][..., part]
                grad = grad[:, : x.shape[1]].reshape(x.shape)
                if c == 0:
                    grad = grad * (1 / LOG2_E if field[1] == "1" else case.scale)
                fields[c][field] = grad.astype(x.dtype)
                at += size
            at += at % 2
    for c, name in enumerate(("pre", "post")):
        if f"dstatic_{name}" in grads:
            w = (pre, post)[c].static
            grad = jnp.sum(grads[f"dstatic_{name}"], axis=(0, 2, 3)).reshape(w.shape)
            fields[c]["static"] = (grad * case.scale if c == 0 else grad).astype(w.dtype)
    dpre, dpost = (w and ComposeWeights(**fields[c]) for c, w in enumerate((pre, post)))
    return dpre, dpost


def refuses_all() -> str | None:
    """Why no TPU kernel of this package can be used here, or None."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return "the TPU kernels are not for 64-bit mode (jax_enable_x64)"
    kind = device_kind()
    if kind.startswith("TPU") and not kind.startswith(tuple(VMEM)):
        return f"the TPU kernels have been compiled for v5e, v5p and v6e, and this is a {kind}"
    return None


def device_kind() -> str:
    """Of the chips of the mesh in force, or of this host's."""
    mesh = jax.sharding.get_abstract_mesh()
    device = getattr(mesh, "abstract_device", None) or jax.devices()[0]
    kind: str = device.device_kind
    return kind


def vmem_limit() -> int:
    """How much VMEM a kernel may use; enough for any chip on a host without TPUs."""
    kind = device_kind()
    return next((size for known, size in VMEM.items() if kind.startswith(known)), min(VMEM.values()))


def unrolled(heads: int, keys: int) -> int:
    """How many strips one step of a loop takes: few heads make short strips, and their latencies would show.

    Of the numbers near 30 heads in all, the one that pads the keys least.
    """
    counts = [n for n in (5, 4, 3, 2, 1) if n * heads <= 32] or [1]
    return min(counts[:3], key=lambda n: (round_up(keys, STRIP * n), -n))


def memory(case: Case, itemsize: int) -> int:
    """About how many bytes of VMEM the kernel of the gradients takes, which takes the most."""
    plane = case.heads * case.block_k * case.block_q
    wide, narrow = case.heads * case.width, case.key_heads * case.width
    forms = [form for form in (case.pre, case.post) if form is not None]
    rows = sum(case.heads * (2 * form.rank_q + 1) for form in forms)
    columns = sum(form.columns for form in forms)
    hidden = [hidden_planes(case, form) for form in forms] or [0]
    queries = round_up(min(case.part, case.queries), case.block_q)
    windows = 3 * case.block_q * wide * itemsize + case.block_k * narrow * 4 * max(itemsize, 3)
    windows += 2 * rows * case.block_q * 4 + case.block_k * (columns + 256) * 4
    spread = columns * 2 * case.strip * 128 * (2 if case.packed else 4)
    scratch = (
        plane * (16 + 2 * itemsize)
        + (sum(hidden) + max(hidden)) * case.block_k * case.block_q * 4
        + queries * wide * 4
        + case.block_k * (2 * narrow + columns + 128) * 4
    )
    scratch += rows * (16 * case.block_q + queries) * 4 + spread
    return 2 * windows + scratch


def plan(
    q: Any, k: Any, pre: Any, post: Any, *, causal: bool, window: int | None, masked: bool, groups: int, scale: float,
    vmem: int,
) -> Case | None:  # fmt: skip
    """The static case with the largest blocks that fit into `vmem` bytes, or None where none does.

    One tile, if it can hold all scores of an example; else 256 queries by 128 keys or less. Where the gradients of all
    queries do not fit, the backward pass takes the queries in parts.
    """
    queries, heads, width = q.shape[1:]
    keys, key_heads = k.shape[1:3]
    form_pre, form_post = forms(pre, post, float(scale))
    unroll = unrolled(heads, keys)
    blocks = [(256, 128), (128, 128), (128, 64)]
    if queries <= 256 and keys <= 512:
        blocks.insert(0, (round_up(queries, 128), round_up(keys, STRIP * unroll)))
    for block_q, block_k in blocks:
        block_q, block_k = min(block_q, round_up(queries, 128)), min(block_k, round_up(keys, 4 * STRIP))
        together = unroll if block_k % (STRIP * unroll) == 0 else min(unroll, 2)
        for part in (queries, 4096, 2048, 1024, 512):
            case = Case(
                heads=heads, key_heads=key_heads, width=width, groups=groups, first_query=0, queries=queries, keys=keys,
                block_q=block_q, block_k=block_k, part=part, strip=STRIP,
                unroll=together, causal=causal, window=window, masked=masked,
                scale=float(scale), pre=form_pre, post=form_post, vmem=vmem, packed=q.dtype == jnp.bfloat16,
            )  # fmt: skip
            if part <= queries and memory(case, q.dtype.itemsize) <= vmem:
                return case
    return None
