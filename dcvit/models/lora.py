"""Low-rank adaptation (LoRA; Hu et al., 2021, arXiv 2106.09685), as a transform of parameters.

A matrix W is replaced by W + (alpha/rank)·A·B, with A: inputs×rank and B: rank×outputs. Only A and B are trained, plus
selected parameters as a whole. Trained parameters are a tree with the names of the model's parameters, in which an
adapted matrix has the two leaves `lora_a` and `lora_b`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from dcvit.dcmha.shapes import Array
from dcvit.errors import matches
from dcvit.models import Params
from dcvit.models.trees import matrix_axes
from dcvit.parallel.trees import by_name, nested

A, B = "lora_a", "lora_b"


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """The parameters of a model that are adapted, and those that are trained as a whole.

    Fields:
      rank: number of columns of A.
      targets: regex of the whole names of adapted matrices: kernels of attention's projections and of MLPs.
      alpha: factor of A·B, which is also divided by `rank`; None means `rank`.
      whole: regexes of the names of parameters that are trained as a whole.
    """

    rank: int
    targets: str
    alpha: float | None = None
    whole: tuple[str, ...] = ()

    def trained(self, params: Params, key: jax.Array) -> Params:
        """Return the initial values of the parameters that are trained.

        A is uniform in ±1/√inputs, and B is zero, so that the model starts as it is.

        Args:
          params: all parameters of the model.
          key: random key of A.

        Raises:
          ValueError: `targets` matches nothing, or a parameter that cannot be adapted, or `rank` is out of range.
        """
        found: dict[str, Array] = {}
        adapted = 0
        flat = by_name(params)
        whole, targets = self.whole_names(flat), matches(self.targets, flat, "targets")
        for number, (name, leaf) in enumerate(flat.items()):
            if name in whole:
                found[name] = leaf
            elif name in targets:
                lead, inputs, outputs = self._sides(name, leaf.shape)
                low = jax.random.uniform(jax.random.fold_in(key, number), (*lead, inputs, self.rank), minval=-1)
                found[f"{name}/{A}"] = low / math.sqrt(inputs)
                found[f"{name}/{B}"] = jnp.zeros((*lead, self.rank, outputs))
                adapted += 1
        if not adapted:
            raise ValueError(f"targets={self.targets!r} matches no parameter")
        return nested(found)

    def whole_names(self, names: Collection[str]) -> set[str]:
        """Return those of `names` that match `whole`: parameters that are trained as a whole."""
        return {name for pattern in self.whole for name in matches(pattern, names, "dont_load")}

    def merged(self, base: Params, trained: Params) -> Params:
        """Return all parameters of the adapted model: those of `base`, with A·B added or replaced as `trained` says."""
        changed: dict[str, Array] = by_name(trained)

        def value(name: str, leaf: Array) -> Array:
            if f"{name}/{A}" not in changed:
                return changed.get(name, leaf)
            update: Array = changed[f"{name}/{A}"] @ changed[f"{name}/{B}"]
            return leaf + self.factor * update.reshape(leaf.shape)

        return nested({name: value(name, leaf) for name, leaf in by_name(base).items()})

    @property
    def factor(self) -> float:
        """The factor alpha/rank of A·B."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def _sides(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
        """Return a stack's leading sizes, () for one matrix, and a matrix's numbers of inputs and outputs."""
        axes = matrix_axes(name)
        if axes is None:
            raise ValueError(f"targets={self.targets!r} matches {name}, which is no projection of attention or an MLP")
        last = shape[-sum(axes) :]
        inputs, outputs = math.prod(last[: axes[0]]), math.prod(last[axes[0] :])
        if not 1 <= self.rank <= min(inputs, outputs):
            raise ValueError(f"rank={self.rank} should be in 1 … {min(inputs, outputs)}, a side of {name}")
        return tuple(shape[: -sum(axes)]), inputs, outputs


def is_adapter(names: Mapping[str, object]) -> bool:
    """Return True if names of parameters include those of an adapted matrix."""
    return any(name.endswith(f"/{A}") for name in names)
