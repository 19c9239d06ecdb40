"""Links between a Vision Transformer's parameters and PyTorch's tensors, for families that differ in names only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights.family import Description, Shape, defaults
from dcvit.weights.links import Arrays, Link, Table, from_table
from dcvit.weights.tensors import Json

BLOCK = "Transformer/encoderblock_{}"
ATTENTION = "MultiHeadDotProductAttention_0"
NORM = "Transformer/encoder_norm"
DEFAULTS = defaults("vit")


def attention_modules(attention: str) -> tuple[list[str], str]:
    """Return the paths of the modules of the attention at a path: those of query, key and value, and of the output."""
    return [f"{attention}/{name}" for name in ("query", "key", "value")], f"{attention}/out"


MAP_QKV, MAP_OUT = attention_modules(f"MAPHead_0/{ATTENTION}")


class Tokens(NamedTuple):
    """Names of the position embeddings and of the tokens before the patches.

    Fields:
      positions: the tensor of position embeddings.
      before: pairs (tensor, number of tokens), in their order.
      embedded: number of these tokens with a position embedding; their rows precede those of the patches.
      batched: the position embeddings have a first axis of length 1.
    """

    positions: str
    before: tuple[tuple[str, int], ...] = ()
    embedded: int = 0
    batched: bool = True


def layer(
    at: str,
    norms: Sequence[str],
    attention: Sequence[str],
    mlp: Sequence[str],
    scales: Sequence[str] = (),
    *,
    gated: bool = False,
) -> Table:
    """Return the table of a layer, see `dcvit.weights.links.from_table`, from names in the other library.

    Args:
      at: the name of a layer, with "{}" for its number.
      norms: the norms of attention and MLP.
      attention: query, key, value and output; or the fused projection of the first three, and the output.
      mlp: the first and the last layer; or the first, the gate of SwiGLU and the last.
      scales: tensors of LayerScale.
      gated: the MLP is SwiGLU; of two layers, the first is fused (hidden, gate).
    """
    qkv, out = attention_modules(f"{BLOCK}/{ATTENTION}")
    first, gate, last = (f"{BLOCK}/MlpBlock_0/{name}" for name in ("Dense_0", "gate", "Dense_1"))
    entries: list[tuple[str, str | Sequence[str]]] = [
        *zip(norms, (f"{BLOCK}/LayerNorm_0", f"{BLOCK}/LayerNorm_1"), strict=True),
        *zip(attention, (qkv, out) if len(attention) == 2 else (*qkv, out), strict=True),
        *zip(mlp, (first, gate, last) if len(mlp) == 3 else ((first, gate) if gated else first, last), strict=True),
        *zip(scales, (f"{BLOCK}/layer_scale_0", f"{BLOCK}/layer_scale_1"), strict=False),
    ]
    return {f"{at}.{theirs}": ours for theirs, ours in entries}


def settings(description: Description) -> Json:
    """Return the fields of a model that links and exports read, with defaults filled in and `mlp_dim` as a number."""
    fields = {**DEFAULTS, **description.fields}
    fields["mlp_dim"] = fields["mlp_dim"] or 4 * fields["width"]
    return fields


def model_links(description: Description, table: Table, tokens: Tokens | None, heads: Sequence[str] = ()) -> list[Link]:
    """Return the links of a model.

    Args:
      description: the model.
      table: its modules, except the head.
      tokens: position embeddings and the tokens before the patches, unless they are in `table`.
      heads: the classifier, and for `pool_type="tok+reg"` that of the first register.
    """
    fields, outputs = settings(description), description.num_outputs
    width, pool_type = fields["width"], fields["pool_type"]
    found = [_token_link(tokens, width, pool_type.startswith("tok"))] if tokens else []
    found += from_table(table, description)
    if not heads or not outputs:
        return found
    if pool_type == "tok+reg":
        return found + _averaged(heads, "head", width, outputs)
    return found + from_table({heads[0]: "head"}, description)


def _averaged(theirs: Sequence[str], ours: str, inputs: int, outputs: int) -> list[Link]:
    """Link two linear layers, whose outputs are averaged, to one linear layer here of their concatenated inputs."""
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


def _token_link(names: Tokens, width: int, has_cls: bool) -> Link:
    """Link the tokens before the patches, and the position embeddings, which this project has for patches only.

    A token's position embedding is added to the token, which gives the same model; when writing, it is zero.

    Args:
      names: the names in the other library.
      width: M.
      has_cls: the first token is the class token; the others are registers.
    """
    counts = [count for _, count in names.before]
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
        (*(name for name, _ in names.before), names.positions), (*ours, "pos_embedding"), to_ours, to_theirs,
        (*((1, size, width) for size in counts), table_shape),
    )  # fmt: skip


def check_expressible(description: Description, what: str, **values: tuple[object, ...]) -> None:
    """Raise CheckpointError if a field of a model has a value that a library does not support.

    Args:
      description: the model.
      what: the library.
      **values: by field, the tuple of supported values, instead of those in the code.
    """
    if description.model_name != "vit":
        raise CheckpointError(f"{what} is for model 'vit', found {description.model_name!r}")
    fields = settings(description)
    possible: dict[str, tuple[object, ...]] = {
        "compose": (None,), "qk_norm": (None,), "posemb": ("learn",), "qkv_bias": ("qkv",),
        "rep_size": (False, 0), "pre_norm": (False,), "pool_norm": (False,), **values,
    }  # fmt: skip
    for name, known in possible.items():
        if fields[name] not in known:
            shown = " or ".join(map(repr, known))
            raise CheckpointError(f"{what} cannot express {name}={fields[name]!r}, only {shown}")
