"""Weights of another library as a model of this project: recognized, described and read.

Each family is a module with the functions of `dcvit.interop.family.Family`; `FAMILIES` holds them by name, and the
first whose `matches` is true reads a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.traverse_util
import numpy as np

from dcvit.errors import CheckpointError
from dcvit.interop import dcformer, gpt2, gpt_neox, llama, preprocessing, timm_vit
from dcvit.interop import links as linking
from dcvit.interop.family import Description, Family
from dcvit.interop.links import Link
from dcvit.interop.tensors import Tensors, open_file

FAMILIES: dict[str, Family] = {
    "timm": timm_vit,
    "gpt2": gpt2,
    "llama": llama,
    "gpt_neox": gpt_neox,
    "dcformer": dcformer,
}


class Weights(NamedTuple):
    """A recognized file."""

    path: Path
    family: str
    description: Description
    links: list[Link]
    tensors: Tensors

    def params(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the path in the tree of unrolled layers, and the value, of each parameter."""
        return linking.read(self.links, self.tensors)

    def folded(self) -> Weights:
        """Return the weights of an image model with mean and standard deviation folded into its first layer.

        Raises:
          CheckpointError: the preprocessing has no mean and standard deviation.
        """
        links, pp = preprocessing.fold(self.links, self.description.pp)
        return self._replace(links=links, description=self.description._replace(pp=pp))

    def tree(self) -> dict[str, Any]:
        """Return all parameters as a nested dict of arrays."""
        tree: dict[str, Any] = flax.traverse_util.unflatten_dict(dict(self.params()), sep="/")
        return tree


def open_weights(path: str | Path) -> Weights:
    """Open a file or a folder of another library.

    Raises:
      CheckpointError: see `dcvit.interop.tensors.open_file`; the tensors are those of no known family, or do not fit
        the model that they describe.
    """
    path = Path(path)
    file = open_file(path)
    for name, family in FAMILIES.items():
        if family.matches(file.tensors, file.config):
            try:
                description = family.describe(file.tensors, file.config)
                links = family.links(description, file.tensors)
            except CheckpointError as e:
                raise CheckpointError(f"{path} ({name}): {e}") from None
            linking.check_names(links, file.tensors, f"{path} ({name})", family.unused)
            linking.check_shapes(links, file.tensors, f"{path} ({name})")
            return Weights(path, name, description, links, file.tensors)
    some = ", ".join(list(file.tensors)[: linking.MAX_NAMED])
    raise CheckpointError(f"{path}: its tensors are those of no known model ({', '.join(FAMILIES)}), found {some}")
