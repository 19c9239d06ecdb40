"""DCFormer checkpoints of the authors' JAX code (github.com/Caiyun-AI/DCFormer, jax/MaxText), written by Orbax.

Sublayers of a block have names, and a scan stacks the blocks along the second axis: with sublayers 0 and 1, layer i is
sublayer i % 2 of block i // 2. The checkpoint does not hold the config. These are assumed, as in the authors'
config of 405M: norms with epsilon 1e-5, windows of 256 in the first layer of each block and in all but the second,
and both compositions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights.dcformer import compositions
from dcvit.weights.family import Description
from dcvit.weights.links import Arrays, Link, same
from dcvit.weights.lm_fields import LMFields, vocab_size
from dcvit.weights.tensors import Json, Tensors
from dcvit.weights.torch_layers import attention, block, checked

ROOTS = ("params.", "params.params.", "")
EMBEDDING = "token_embedder.embedding"
OPTIMIZER = ("opt_state.", "step")
EPSILON = 1e-5
PATTERNS = {1: "none", 2: "1:1", 4: "3:1", 8: "7:1"}  # by the number of sublayers


def matches(tensors: Tensors, config: Json) -> bool:
    return any(f"{root}{_sublayer(0)}.AttentionOp_0.dyn_w_proj.qkw" in tensors for root in ROOTS)


def describe(tensors: Tensors, config: Json) -> Description:
    root = _root(tensors)

    def shape(name: str, axes: int) -> tuple[int, ...]:
        found = tensors[root + name].shape if root + name in tensors else None
        if found is None or len(found) != axes:
            raise CheckpointError(f"{root}{name} has shape {found}, expected {axes} dimensions")
        return found

    vocab, width = shape(EMBEDDING, 2)
    _, blocks, heads, head_dim = shape(f"{_sublayer(0)}.query.kernel", 4)
    if heads * head_dim != width:
        raise CheckpointError(f"{heads} heads of width {head_dim} are not supported, only of {width}/{heads}")
    period = next(s for s in range(1 << 16) if f"{root}{_sublayer(s)}.query.kernel" not in tensors)
    if period not in PATTERNS:
        raise CheckpointError(
            f"blocks of {period} layers are not supported; supported: {', '.join(map(str, PATTERNS))}"
        )
    fields = LMFields(
        width=width, depth=blocks * period, num_heads=heads, mlp_dim=shape(f"{_mlp(0)}.wi_0.kernel", 3)[2],
        norm_epsilon=EPSILON, window_pattern=PATTERNS[period], compose="both",
        qk_norm="rmsnorm" if f"{root}{_sublayer(0)}.q_norm.scale" in tensors else None, qk_norm_epsilon=EPSILON,
        static=f"{root}{_sublayer(0)}.AttentionOp_0.pre_proj.w" in tensors,
    )  # fmt: skip
    return fields.canonical().describe(vocab)


def unused(name: str) -> bool:
    return name.startswith(OPTIMIZER)


def links(description: Description, tensors: Tensors | None = None) -> list[Link]:
    fields, root = LMFields.of(description), _root(tensors)
    period = next(p for p, pattern in PATTERNS.items() if pattern == fields.window_pattern)
    width, vocab = fields.width, vocab_size(description)
    found = [
        checked(same(f"{root}{EMBEDDING}", "embedding/embedding"), vocab, width),
        checked(same(f"{root}decoder.decoder_norm.scale", "Transformer/decoder_norm/scale"), width),
        checked(same(f"{root}decoder.logits_dense.kernel", "head/kernel"), width, vocab),
    ]
    for sublayer in range(period):
        layers = [_layer(root, sublayer, i, fields) for i in range(sublayer, fields.depth, period)]
        found += [_stacked(of_layers) for of_layers in zip(*layers, strict=True)]
    return found


def _layer(root: str, sublayer: int, layer: int, fields: LMFields) -> list[Link]:
    """Link the tensors of a sublayer, without the axis of the blocks, to the parameters of one layer."""
    theirs, mlp, ours = f"{root}{_sublayer(sublayer)}", f"{root}{_mlp(sublayer)}", attention(layer)
    width, split, hidden = fields.width, (fields.num_heads, fields.head_dim), fields.hidden
    found = [
        checked(same(f"{theirs}.{name}.kernel", f"{ours}/{name}/kernel"), width, *split)
        for name in ("query", "key", "value")
    ]
    found.append(checked(same(f"{theirs}.out.kernel", f"{ours}/out/kernel"), *split, width))
    op = f"{theirs}.AttentionOp_0"
    names = [f"{op}.dyn_w_proj.{name}" for name in ("dw1.kernel", "qkw", "dd.kernel")]
    found += compositions(names, ours, fields)
    if fields.static:
        square = (1, fields.num_heads, fields.num_heads)
        found += [checked(same(f"{op}.{where}_proj.w", f"{ours}/{where}/w_b"), *square) for where in ("pre", "post")]
    if fields.qk_norm:
        found += [
            checked(same(f"{theirs}.{name[0]}_norm.scale", f"{ours}/{name}_norm/scale"), fields.head_dim)
            for name in ("query", "key")
        ]
    for their_name, our_name in (("pre", "attention"), ("post", "mlp")):
        name = f"{root}decoder.layers.{their_name}_self_attention_layer_norm_{sublayer}.scale"
        found.append(checked(same(name, f"{block(layer)}/{our_name}_norm/scale"), width))
    up, down = (width, hidden), (hidden, width)
    for their_name, our_name, shape in (("wi_0", "in", up), ("wi_1", "gate", up), ("wo", "out", down)):
        path = f"{block(layer)}/MlpBlock_0/{our_name}/kernel"
        found.append(checked(same(f"{mlp}.{their_name}.kernel", path), *shape))
    return found


def _stacked(links: Sequence[Link]) -> Link:
    """Link a tensor with the second axis of blocks to the parameters of a layer of each."""
    per_layer = len(links[0].ours)

    def to_ours(x: np.ndarray) -> Arrays:
        return [value for i, link in enumerate(links) for value in link.to_ours(x[:, i])]

    def to_theirs(*values: np.ndarray) -> Arrays:
        parts = (values[i : i + per_layer] for i in range(0, len(values), per_layer))
        return (np.stack([link.to_theirs(*some)[0] for link, some in zip(links, parts, strict=True)], axis=1),)

    ((first, *others),) = links[0].shapes
    paths = tuple(path for link in links for path in link.ours)
    return Link(links[0].theirs, paths, to_ours, to_theirs, ((first, len(links), *others),))


def _sublayer(index: int) -> str:
    return f"decoder.layers.self_attention_{index}"


def _mlp(index: int) -> str:
    return f"decoder.layers.mlp_{index}"


def _root(tensors: Tensors | None) -> str:
    return next((root for root in ROOTS if tensors is not None and root + EMBEDDING in tensors), ROOTS[0])
