"""Links of layers of PyTorch to those of the language models: linear layers, norms, embedding and head.

Letters as in `dcvit.weights.links`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights.family import Description
from dcvit.weights.links import Link, linear, same
from dcvit.weights.lm_fields import LMFields
from dcvit.weights.tensors import Tensors


def block(layer: int) -> str:
    """Return the path of a decoder layer."""
    return f"Transformer/decoderblock_{layer}"


def attention(layer: int) -> str:
    """Return the path of the attention of a decoder layer."""
    return f"{block(layer)}/MultiHeadDotProductAttention_0"


def checked(link: Link, *shape: int) -> Link:
    """Return a link of one tensor, whose shape is checked before it is read."""
    return link._replace(shapes=(shape,))


def linear_layer(theirs: str, ours: str, inputs: Sequence[int], outputs: Sequence[int], bias: bool) -> list[Link]:
    """Link the parameters of a linear layer whose inputs and outputs have several dimensions here."""
    links = [linear(f"{theirs}.weight", f"{ours}/kernel", inputs, outputs)]
    if bias:
        size = int(np.prod(outputs))
        links.append(checked(same(f"{theirs}.bias", f"{ours}/bias", outputs, (size,)), size))
    return links


def norm_layer(theirs: str, ours: str, width: int, bias: bool) -> list[Link]:
    """Link the parameters of a LayerNorm, or of an RMSNorm, which has no bias."""
    ends = [("weight", "scale")] + ([("bias", "bias")] if bias else [])
    return [checked(same(f"{theirs}.{their_end}", f"{ours}/{our_end}"), width) for their_end, our_end in ends]


def embedding_and_head(
    embedding: str, head: str, description: Description, tensors: Tensors | None = None
) -> list[Link]:
    """Link the embedding and the head, which is absent or a copy in the file of a model whose head is tied."""
    fields, vocab = LMFields.of(description), description.num_outputs or 0
    first = checked(same(embedding, "embedding/embedding"), vocab, fields.width)
    if not fields.tied:
        return [first, linear(head, "head/kernel", (fields.width,), (vocab,))]
    if tensors is None or head not in tensors:
        return [first]

    def check_equal(x: np.ndarray, copy: np.ndarray) -> None:
        if not np.array_equal(x, copy):
            raise CheckpointError(f"{head} differs from {embedding}, but tie_word_embeddings is true")

    return [Link((embedding, head), first.ours, lambda x, _: (x,), lambda x: (x, x), first.shapes * 2, check_equal)]
