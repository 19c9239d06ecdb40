"""Links of the parameters of a Vision Transformer to tensors of PyTorch, for the families that differ in names only.

Letters: M width, H heads, D head width, F MLP width, P height and width of a patch, N patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights.family import Description, defaults
from dcvit.weights.links import Arrays, Link, Shape, linear
from dcvit.weights.tensors import Json, Tensors

ATTENTION = "MultiHeadDotProductAttention_0"
DEFAULTS = defaults("vit", (
    "width", "depth", "num_heads", "mlp_dim", "patch_size", "posemb", "pool_type", "registers", "rep_size", "mlp",
    "norm_epsilon", "layer_scale", "compose", "heads", "qk_norm", "branches", "projection", "gate", "static", "rank",
    "groups", "qkv_bias", "pre_norm", "pool_norm",
))  # fmt: skip


class BlockNames(NamedTuple):
    """Names of the modules of a layer, after the name of the layer.

    Fields:
      norms: of attention and MLP.
      attention: the fused projection (q, k, v) and the output; or query, key, value and output.
      mlp: the first layer and the last; for SwiGLU the first is fused (gate, up), or gate, up and down.
      scales: tensors of LayerScale.
    """

    norms: tuple[str, str]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    scales: tuple[str, str] = ("", "")


class TokenNames(NamedTuple):
    """Names of the position embeddings and of the tokens before the patches.

    Fields:
      positions: the tensor of position embeddings; "" for a model without one.
      tokens: pairs (tensor, number of tokens), in their order.
      embedded: how many of these tokens have a position embedding, which precede those of the patches.
      batched: the position embeddings have a first axis of length 1.
    """

    positions: str
    tokens: tuple[tuple[str, int], ...] = ()
    embedded: int = 0
    batched: bool = True


class Names(NamedTuple):
    """Names of the modules of a model; `block` of a layer has "{}" for its number. An empty head is absent.

    `second_head` is that of the first register, with `pool_type="tok+reg"`; `norm_before` and `norm_after` are those of
    `pre_norm` and `pool_norm`.
    """

    patches: str
    tokens: TokenNames
    block: str
    in_block: BlockNames
    norm: str
    head: str = ""
    second_head: str = ""
    norm_before: str = ""
    norm_after: str = ""


def settings(description: Description) -> Json:
    """Return the fields that links and exports read, with the defaults of `dcvit.models.vit.ViT`, and `mlp_dim`."""
    fields = {**DEFAULTS, **description.fields}
    fields["mlp_dim"] = fields["mlp_dim"] or 4 * fields["width"]
    return fields


def tensor(theirs: str, ours: str, shape: Shape, our_shape: Sequence[int] = ()) -> Link:
    """Link a tensor of a shape to a parameter with the same numbers in the same order."""
    their_shape = tuple(-1 if size is None else size for size in shape)
    return Link(
        (theirs,), (ours,), lambda x: (x.reshape(our_shape or x.shape),), lambda x: (x.reshape(their_shape),), (shape,)
    )


def norm(theirs: str, ours: str, width: int) -> list[Link]:
    """Link a LayerNorm."""
    return [
        tensor(f"{theirs}.weight", f"{ours}/scale", (width,)),
        tensor(f"{theirs}.bias", f"{ours}/bias", (width,)),
    ]


def dense(theirs: str, ours: str, inputs: Sequence[int], outputs: Sequence[int]) -> list[Link]:
    """Link a linear layer with a bias."""
    size = int(np.prod(outputs))
    bias = tensor(f"{theirs}.bias", f"{ours}/bias", (size,), outputs)
    return [linear(f"{theirs}.weight", f"{ours}/kernel", inputs, outputs), bias]


def fused(theirs: Sequence[str], ours: Sequence[str], inputs: int, outputs: Sequence[int]) -> list[Link]:
    """Link a linear layer, given by its tensors of weight and bias, that computes the outputs of several layers."""
    count, size = len(ours), int(np.prod(outputs))
    weight, bias = theirs

    def kernels(x: np.ndarray) -> Arrays:
        return [part.T.reshape(inputs, *outputs) for part in np.split(x, count)]

    def weights(*parts: np.ndarray) -> Arrays:
        return (np.concatenate([part.reshape(inputs, size).T for part in parts]),)

    return [
        Link((weight,), tuple(f"{name}/kernel" for name in ours), kernels, weights, ((count * size, inputs),)),
        Link(
            (bias,), tuple(f"{name}/bias" for name in ours),
            lambda x: [part.reshape(outputs) for part in np.split(x, count)],
            lambda *parts: (np.concatenate([part.reshape(-1) for part in parts]),),
            ((count * size,),),
        ),
    ]  # fmt: skip


def averaged(theirs: Sequence[str], ours: str, inputs: int, outputs: int) -> list[Link]:
    """Link two linear layers, whose outputs are averaged, to one layer of their inputs one after the other."""
    weights, biases = (tuple(f"{name}.{end}" for name in theirs) for end in ("weight", "bias"))
    return [
        Link(
            weights, (f"{ours}/kernel",),
            lambda *arrays: (np.concatenate([x.T / np.array(2, x.dtype) for x in arrays]),),
            lambda x: [part.T * np.array(2, x.dtype) for part in np.split(x, 2)], ((outputs, inputs),) * 2,
        ),
        Link(
            biases, (f"{ours}/bias",), lambda *arrays: (np.asarray(np.mean(arrays, axis=0, dtype=np.float32)),),
            lambda x: (x, x), ((outputs,),) * 2,
        ),
    ]  # fmt: skip


def patches(theirs: str, width: int, patch: Sequence[int], bias: bool = True) -> list[Link]:
    """Link the convolution of the patches, "M channels P P"."""
    kernel = Link(
        (f"{theirs}.weight",), ("embedding/kernel",),
        lambda x: (x.transpose(2, 3, 1, 0),), lambda x: (x.transpose(3, 2, 0, 1),), ((width, None, *patch),),
    )  # fmt: skip
    return [kernel] + ([tensor(f"{theirs}.bias", "embedding/bias", (width,))] if bias else [])


def tokens(names: TokenNames, width: int, has_cls: bool) -> Link:
    """Link the tokens before the patches, and the position embeddings, which this project has for patches only.

    An embedding of a token is added to the token: the model is the same. In the other direction it becomes zero.

    Args:
      names: the names.
      width: M.
      has_cls: the first token is the class token; the others are registers.
    """
    counts = [count for _, count in names.tokens]
    count, embedded = sum(counts), names.embedded
    ours = ["cls"] * has_cls + ["registers"] * (count > has_cls)

    def to_ours(*arrays: np.ndarray) -> Arrays:
        table = arrays[-1].reshape(1, -1, width)
        values: list[np.ndarray] = []
        if count:
            before = np.concatenate([array.reshape(1, -1, width) for array in arrays[:-1]], axis=1, dtype=np.float32)
            before[:, :embedded] += table[:, :embedded]
            values = [before[:, :1]] * has_cls + [before[:, has_cls:]] * (count > has_cls)
        return [*values, table[:, embedded:]]

    def to_theirs(*arrays: np.ndarray) -> Arrays:
        table = np.concatenate([np.zeros((1, embedded, width), arrays[-1].dtype), arrays[-1]], axis=1)
        before = np.concatenate(arrays[:-1], axis=1) if count else table[:, :0]
        parts = np.split(before, np.cumsum(counts), axis=1)[:-1]
        return [*parts, table if names.batched else table[0]]

    table_shape: Shape = (1, None, width) if names.batched else (None, width)
    return Link(
        (*(name for name, _ in names.tokens), names.positions), (*ours, "pos_embedding"), to_ours, to_theirs,
        (*((1, size, width) for size in counts), table_shape),
    )  # fmt: skip


def zeros(theirs: str, shape: Sequence[int]) -> Link:
    """Link a tensor that has no effect but must exist: not read, and written as zeros."""
    return Link((theirs,), (), lambda *_: (), lambda: (np.zeros(shape, np.float32),), (tuple(shape),))


def attention(theirs: Sequence[str], ours: str, fields: Json) -> list[Link]:
    """Link the projections of attention: fused projection and output, or query, key, value and output."""
    width, heads, biases = fields["width"], fields["num_heads"], fields["qkv_bias"]
    inner = (heads, width // heads)
    qkv = [f"{ours}/{name}" for name in ("query", "key", "value")]
    if len(theirs) == 2:
        kernels, bias = fused((f"{theirs[0]}.weight", f"{theirs[0]}.bias"), qkv, width, inner)
        links = [kernels, bias] if biases else [kernels]
    else:
        links = []
        for initial, name, our_name in zip("qkv", theirs, qkv, strict=False):
            kernel, bias = dense(name, our_name, (width,), inner)
            links += [kernel, bias] if initial in biases else [kernel]
    return [*links, *dense(theirs[-1], f"{ours}/out", inner, (width,))]


def mlp(theirs: Sequence[str], ours: str, width: int, mlp_dim: int, gated: bool) -> list[Link]:
    """Link an MLP; `gated` as with SwiGLU."""
    first, gate, last = (f"{ours}/{name}" for name in ("Dense_0", "gate", "Dense_1"))
    links = dense(theirs[-1], last, (mlp_dim,), (width,))
    if gated and len(theirs) == 2:
        return fused((f"{theirs[0]}.weight", f"{theirs[0]}.bias"), (first, gate), width, (mlp_dim,)) + links
    if gated:
        links += dense(theirs[1], gate, (width,), (mlp_dim,))
    return dense(theirs[0], first, (width,), (mlp_dim,)) + links


def model_links(description: Description, names: Names) -> list[Link]:
    """Return the links of a model, except those of a pooling head."""
    fields = settings(description)
    width, mlp_dim, gated = fields["width"], fields["mlp_dim"], fields["mlp"] == "swiglu"
    has_cls = fields["pool_type"].startswith("tok")
    links = patches(names.patches, width, fields["patch_size"], not fields["pre_norm"])
    if fields["pre_norm"]:
        links += norm(names.norm_before, "pre_norm", width)
    if names.tokens.positions:
        links.append(tokens(names.tokens, width, has_cls))
    else:
        pairs = zip(names.tokens.tokens, ("cls", "registers"), strict=False)
        links += [tensor(token, our_token, (1, count, width)) for (token, count), our_token in pairs]
    for layer in range(fields["depth"]):
        theirs, ours = names.block.format(layer), f"Transformer/encoderblock_{layer}"
        for i, (name, scale) in enumerate(zip(names.in_block.norms, names.in_block.scales, strict=True)):
            links += norm(f"{theirs}.{name}", f"{ours}/LayerNorm_{i}", width)
            if fields["layer_scale"] is not None:
                links.append(tensor(f"{theirs}.{scale}", f"{ours}/layer_scale_{i}", (width,)))
        in_attention = [f"{theirs}.{name}" for name in names.in_block.attention]
        links += attention(in_attention, f"{ours}/{ATTENTION}", fields)
        links += mlp([f"{theirs}.{name}" for name in names.in_block.mlp], f"{ours}/MlpBlock_0", width, mlp_dim, gated)
    last = (names.norm_after, "pool_norm") if fields["pool_norm"] else (names.norm, "Transformer/encoder_norm")
    links += norm(*last, width)
    if names.head and description.num_outputs:
        pooled = width * (2 if "+" in fields["pool_type"] else 1)
        if fields["pool_type"] == "tok+reg":
            return links + averaged((names.head, names.second_head), "head", width, description.num_outputs)
        links += dense(names.head, "head", (pooled,), (description.num_outputs,))
    return links


def depth_of(tensors: Tensors, block: str) -> int:
    """Return the number of layers whose names begin as `block`, which has "{}" for the number of a layer."""
    before = block.partition("{}")[0]
    numbers = {name.removeprefix(before).split(".")[0] for name in tensors if name.startswith(before)}
    return len([number for number in numbers if number.isdigit()])


def shape_of(tensors: Tensors, name: str, what: str, axes: int = 2) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
      CheckpointError: the tensor is missing or has another number of axes.
    """
    if name not in tensors:
        raise CheckpointError(f"{what} has no {name}")
    shape = tensors[name].shape
    if len(shape) != axes or 0 in shape:
        raise CheckpointError(f"{what}: {name} has shape {shape}, expected {axes} axes")
    return shape


def check_heads(fields: Json) -> None:
    """Raise CheckpointError if the heads do not divide the width."""
    if fields["width"] % fields["num_heads"]:
        raise CheckpointError(f"{fields['num_heads']} heads do not divide the width {fields['width']}")


def check_positions(tensors: Tensors, name: str, fields: Json, image_size: tuple[int, int], before: int) -> None:
    """Raise CheckpointError if position embeddings do not fit the image.

    Args:
      tensors: the tensors.
      name: that of the position embeddings.
      fields: fields of the model.
      image_size: height and width.
      before: number of rows for tokens before the patches.
    """
    rows = shape_of(tensors, name, "the file", axes=len(tensors[name].shape) if name in tensors else 3)[-2]
    (height, width), (p_h, p_w) = image_size, fields["patch_size"]
    count = (height // p_h) * (width // p_w)
    if rows != count + before:
        raise CheckpointError(
            f"{name} has {rows} rows, expected {before} + {count}, for patches of {p_h}x{p_w} of images of "
            f"{height}x{width}"
        )


def check_expressible(description: Description, what: str, **values: tuple[object, ...]) -> None:
    """Raise CheckpointError if a field of a model has another value than the only ones that a library has.

    Args:
      description: the model.
      what: the library.
      **values: by field, the tuple of possible values.
    """
    if description.model_name != "vit":
        raise CheckpointError(f"{what} is for model 'vit', found {description.model_name!r}")
    fields = settings(description)
    possible: dict[str, tuple[object, ...]] = {
        "compose": (None,), "heads": (None,), "qk_norm": (None,), "posemb": ("learn",), "qkv_bias": ("qkv",),
        "rep_size": (False, 0), "pre_norm": (False,), "pool_norm": (False,), **values,
    }  # fmt: skip
    for name, known in possible.items():
        if fields[name] not in known:
            shown = " or ".join(map(repr, known))
            raise CheckpointError(f"{what} cannot express {name}={fields[name]!r}, only {shown}")
