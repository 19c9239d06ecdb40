"""The GPU kernels as sums and products of whole arrays, for tests of what calls them, in seconds.

They also take float32 arrays, which the kernels do not, and then give W and dS in float32: what calls the kernels is
compared with the reference without the errors of bfloat16.
"""

import jax
import jax.numpy as jnp

from dcvit.dcmha.backends.gpu.config import MIN_ROW_MAX, QUERIES
from dcvit.dcmha.backends.gpu.launch import Results, output_shapes
from dcvit.dcmha.numerics import MASKED_SCORE


class Rectangle:
    """One rectangle of queries and keys: the operands of a kernel as float32, per pair of tokens."""

    def __init__(self, config, operands):
        self.config, self.operands = config, operands
        visited = jnp.repeat(jnp.repeat(operands.visited, QUERIES, axis=1), config.block_keys, axis=2)
        self.attended = ((visited == 1) & (operands.mask == -1))[:, None]

    def product(self, pair):
        left, right = (x.astype(jnp.float32) for x in self.operands.pairs[pair])
        right = jnp.repeat(right, self.config.heads_per_key_head, axis=2)
        return jnp.einsum("bthd,bshd->bhts", left, right, precision="highest")

    def row(self, channel):
        return self.operands.rows[:, :, channel, :, None]

    def weights(self, which, up):
        ranks, found = self.config.ranks(which), []
        for side, rank, array in (("q", ranks.q, self.operands.rows), ("k", ranks.k, self.operands.cols)):
            first = self.config.channel(side, which) + 1 + up * rank
            axis = -1 if side == "q" else -2
            found += [jnp.expand_dims(array[:, :, first + n], axis) for n in range(rank)]
        return found

    def down(self, which, a, transposed=False):
        shape = (len(a), self.config.groups, -1, *a.shape[2:])
        return [(a * w).reshape(shape).sum(2) for w in self.weights(which, up=transposed)]

    def up(self, which, planes, a, transposed=False):
        c = self.config
        gate = self.row(c.channel("q", which)) + self.operands.cols[:, :, c.channel("k", which), None]
        weights = self.weights(which, up=not transposed)
        return a * gate + sum(jnp.repeat(p, c.group_heads, 1) * w for p, w in zip(planes, weights, strict=True))

    def logits(self, pre):
        return jnp.where(self.attended, self.up("pre", pre, self.product(0)), MASKED_SCORE)

    def probabilities(self, pre):
        return jnp.exp2(self.logits(pre) - self.row(self.config.lse_channel))

    def by_tile(self, x):
        return x.reshape(*x.shape[:3], -1, self.config.tile_keys)

    def row_sums(self, products):  # (B H tiles channels T)
        return jnp.moveaxis(jnp.stack([self.by_tile(x).sum(-1) for x in products]), (0, 4), (3, 2))

    def col_sums(self, products):  # (B G T/64 64 [tiles channels keys]); row j belongs to head j of a group
        c, found = self.config, jnp.stack([self.by_tile(x) for x in products], axis=4)  # B H T tiles channels keys
        found = found.reshape(c.batch, c.groups, c.group_heads, -1, QUERIES, *found.shape[3:]).sum(4)
        found = jnp.moveaxis(found, 2, 3).reshape(c.batch, c.groups, -1, c.group_heads, found[0, 0, 0, 0].size)
        return jnp.pad(found, [(0, 0)] * 3 + [(0, QUERIES - c.group_heads), (0, 0)])

    def gradients(self, which, a, g, hidden, back):
        q = self.config.ranks(which).q
        for part in (slice(q), slice(q, None)):
            yield [a * g, *[a * x for x in back[part]], *[g * x for x in hidden[part]]]


def launch(kind, config, operands):
    """`launch.run` without Pallas."""
    r, c = Rectangle(config, operands), config
    spread = lambda planes: [jnp.repeat(x, c.group_heads, axis=1) for x in planes]  # noqa: E731
    saved = [] if operands.planes is None else list(jnp.moveaxis(operands.planes, 2, 0))
    pre = saved[: c.pre.planes] if kind in ("weights", "pre_grad") else r.down("pre", r.product(0))
    found = {}
    if kind == "statistics":
        logits = r.by_tile(r.logits(pre))
        largest = jnp.maximum(logits.max(-1), MIN_ROW_MAX)
        total = jnp.exp2(logits - largest[..., None]).sum(-1)
        found = {"row_sums": jnp.moveaxis(jnp.stack([largest, total]), (0, 4), (3, 2)), "planes": pre}
    elif kind == "weights":
        p = r.probabilities(pre)
        found = {"tile": r.up("post", r.down("post", p), p)}
    elif kind == "post_grad":
        p, dw = r.probabilities(pre), r.product(1)
        post, back = r.down("post", p), r.down("post", dw, transposed=True)
        rows, cols = r.gradients("post", p, dw, spread(post), spread(back))
        delta = p * r.up("post", back, dw, transposed=True)
        found = {"tile": r.up("post", post, p), "row_sums": r.row_sums([*rows, delta]), "col_sums": r.col_sums(cols)}
        found["planes"] = pre + back
    else:
        p, scores = r.probabilities(pre), r.product(0)
        dl = p * (r.up("post", saved[c.pre.planes :], r.product(1), transposed=True) - r.row(c.delta_channel))
        back = r.down("pre", dl, transposed=True)
        rows, cols = r.gradients("pre", scores, dl, spread(pre), spread(back))
        found = {
            "tile": r.up("pre", back, dl, transposed=True),
            "row_sums": r.row_sums(rows),
            "col_sums": r.col_sums(cols),
        }
    if "planes" in found:
        found["planes"] = jnp.stack(found["planes"], axis=2) if found["planes"] else None
    shapes = output_shapes(c, kind)
    found = {name: found[name] for name in shapes}  # some have no column sums
    assert jax.tree.map(jnp.shape, found) == {name: x.shape for name, x in shapes.items()}
    if "tile" in found:
        found["tile"] = found["tile"].astype(operands.pairs[0][0].dtype)
    return Results(**found)
