"""Links of layers of PyTorch to those of the language models: linear layers, norms, embedding and head.

Letters as in `dcvit.interop.links`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.interop.links import Arrays, Link, linear, same
from dcvit.interop.tensors import Tensors


def block(layer: int) -> str:
    """Return the path of a decoder layer."""
    return f"Transformer/decoderblock_{layer}"


def attention(layer: int) -> str:
    """Return the path of the attention of a decoder layer."""
    return f"{block(layer)}/MultiHeadDotProductAttention_0"


def linear_layer(theirs: str, ours: str, inputs: Sequence[int], outputs: Sequence[int], bias: bool) -> list[Link]:
    """Link the parameters of a linear layer whose inputs and outputs have several dimensions here."""
    links = [linear(f"{theirs}.weight", f"{ours}/kernel", inputs, outputs)]
    if bias:
        links.append(same(f"{theirs}.bias", f"{ours}/bias", outputs, (int(np.prod(outputs)),)))
    return links


def norm_layer(theirs: str, ours: str, bias: bool) -> list[Link]:
    """Link the parameters of a LayerNorm, or of an RMSNorm, which has no bias."""
    return [same(f"{theirs}.weight", f"{ours}/scale")] + ([same(f"{theirs}.bias", f"{ours}/bias")] if bias else [])


def embedding_and_head(embedding: str, head: str, tied: bool, tensors: Tensors | None) -> list[Link]:
    """Link the embedding and the head, which is absent or a copy in the file of a model whose head is tied."""
    ours = "embedding/embedding"
    if not tied:
        return [same(embedding, ours), linear(head, "head/kernel")]
    if tensors is None or head not in tensors:
        return [same(embedding, ours)]

    def one_of(x: np.ndarray, copy: np.ndarray) -> Arrays:
        if not np.array_equal(x, copy):
            raise CheckpointError(f"{head} differs from {embedding}, but tie_word_embeddings is true")
        return (x,)

    return [Link((embedding, head), (ours,), one_of, lambda x: (x, x))]


def check_vocab_size(tensors: Tensors, embedding: str, expected: int) -> None:
    """Raise CheckpointError if the rows of the embedding are not the vocabulary of config.json."""
    shape = tensors[embedding].shape if embedding in tensors else None
    if shape is not None and (len(shape) != 2 or shape[0] != expected):
        raise CheckpointError(f"{embedding} has shape {shape}, but config.json says vocab_size={expected}")
