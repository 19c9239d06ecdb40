"""Fields that several modules share: the composition of attention, and the size and computation of a transformer.

Each field is declared, documented and checked here once. Modules inherit the fields and keep their flat names, which
are also the keys of `config.model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax

from dcvit.dcmha.gradients import RESULTS
from dcvit.dcmha.inputs import Composition

Layer = TypeVar("Layer", bound=nn.Module)
COMPOSE = ("both", "pre", "post", None)
BRANCHES = ("qk", "q", "k")
QK_NORMS = ("layernorm", "rmsnorm", None)
QKV_BIASES = ("qkv", "qv", "")
COMPOSE_GELUS = ("tanh", "exact")
DTYPES = ("float32", "bfloat16")
# Local layers (L), which attend to a window, and global layers (G) of a repeated group: Section 4, Table 10, in the
# order of the released code; and local layers alone, as in Mistral.
WINDOW_PATTERNS = {"none": "G", "1:0": "L", "1:1": "LG", "3:1": "LGLL", "7:1": "LGLLLLLL"}
# The policies of `jax.checkpoint_policies`; its other functions build a policy from arguments.
JAX_POLICIES = (
    "checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "dots_saveable", "dots_with_no_batch_dims_saveable",
    "everything_saveable", "nothing_saveable",
)  # fmt: skip
# What a rematerialized layer keeps for the backward pass. "attention" rematerializes inside the attention module.
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "full_but_attention": jax.checkpoint_policies.save_only_these_names(RESULTS),
    **{name: getattr(jax.checkpoint_policies, name) for name in JAX_POLICIES},
}
REMATS = ("none", "attention", *REMAT_POLICIES)
# Fields that change the training of a model or the way it is computed. Given the parameters, they do not change its
# function.
TRAINING_ONLY_FIELDS = (
    "dropout", "stochastic_depth", "head_zeroinit", "head_bias_init", "init_std", "out_init_std", "scan", "remat",
    "implementation", "dtype_mm",
)  # fmt: skip


class AttentionFields(nn.Module, kw_only=True):
    """The composition (Section 3, Table 9) and the normalization of attention.

    Fields:
      branches: the inputs that the dynamic weights depend on: "qk", "q" (queries) or "k" (keys).
      projection: the dynamic projections exist.
      gate: the dynamic gates exist.
      static: the static projection W_b exists.
      rank: R of the dynamic projections.
      groups: number of equal groups; heads are composed inside each group (Section 3.2). With branches "q" and one key
        head in each group, composition adds almost no operations (`dcvit.dcmha.folded`).
      compose_gelu: the GELU of the dynamic projections: "tanh", its approximation, as in the authors' JAX code, or
        "exact", as in their PyTorch models.
      compose_window: in causal layers, the latest keys, a query's own included, whose scores and weights are composed;
        attention to older keys is plain. None: all keys.
      compose: the attention matrices that are composed: "both", "pre" (scores), "post" (weights) or None.
      qk_norm: "layernorm" or "rmsnorm" over D on queries and keys (with scale, without bias), or None.
      qk_norm_epsilon: epsilon of these norms.
      implementation: see `dcvit.dcmha.attention`. Implementations for a single query cannot train a model.
    """

    branches: str = "qk"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = 2
    groups: int = 1
    compose_gelu: str = "tanh"
    compose_window: int | None = None
    compose: str | None = None
    qk_norm: str | None = None
    qk_norm_epsilon: float = 1e-6
    implementation: str | None = None

    @nn.nowrap
    def composition(self) -> Composition:
        """Return the composition that the fields describe."""
        return Composition(
            self.compose, branches=self.branches, projection=self.projection, gate=self.gate, static=self.static,
            rank=self.rank, groups=self.groups, gelu=self.compose_gelu,
            compose_window=self.compose_window,
        )  # fmt: skip


class TransformerFields(AttentionFields, kw_only=True):
    """Size and computation of a transformer.

    Fields:
      width: M.
      depth: L, the number of layers.
      mlp_dim: F, the width of the MLPs; None means 4·M.
      num_heads: H; divides `width`.
      num_key_heads: K, for grouped-query attention; None means `num_heads`.
      compose_layers: indices of the layers that compose, from 0; negative ones count from the end. The others have
        plain attention. None means all layers.
      scan: scan over one layer, or a group of layers, instead of unrolling all: compiles faster, same result. See
        `scan_layout`.
      remat: what the backward pass recomputes: "none", "attention" (arrays as large as T×T), "dots" (everything but
        matrix products), "full" (whole layers), "full_but_attention" (whole layers, but not the fused attention, whose
        output and softmax statistics are stored), or the name of a policy in `jax.checkpoint_policies`.
      dtype_mm: dtype of the computation, "float32" or "bfloat16"; parameters and logits are float32.
    """

    width: int = 768
    depth: int = 12
    mlp_dim: int | None = None
    num_heads: int = 12
    num_key_heads: int | None = None
    compose_layers: Sequence[int] | None = None
    scan: bool = False
    remat: str = "none"
    dtype_mm: str = "float32"

    @nn.nowrap
    def composition_of(self, layer: int) -> Composition:
        """Return the composition of a layer; outside of `compose_layers`, that of plain attention."""
        composition, chosen = self.composition(), self.compose_layers
        if chosen is None or layer in {number % self.depth for number in chosen}:
            return composition
        return dataclasses.replace(composition, compose=None, compose_window=None)

    @nn.nowrap
    def scan_layout(self, pattern: int = 1) -> tuple[int, int]:
        """Return the number of layers in the body of the scan, and the number of its repetitions; 0 without `scan`.

        The scan covers the first layers; the rest is unrolled. The body consists of complete window patterns, and all
        repetitions have the same composed layers. It is chosen so that body and rest have the fewest layers to compile.

        Args:
          pattern: number of layers of the window pattern.
        """
        composes = [self.composition_of(layer).compose for layer in range(self.depth)]

        def repeats(period: int) -> int:
            different = (i for i, compose in enumerate(composes) if compose != composes[i % period])
            return next(different, self.depth) // period

        longest = pattern if self.compose_layers is None else self.depth // 2  # a longer group does not repeat
        periods = range(pattern, longest + 1, pattern)
        period = min(periods, key=lambda period: self.depth - period * (repeats(period) - 1), default=pattern)
        return period, repeats(period) if self.scan else 0

    @nn.nowrap
    def in_layers(self, attention: Callable[..., Layer]) -> Callable[..., Layer]:
        """Return a constructor of attention that takes `layer`; outside of `compose_layers`, its `compose` is None."""
        compositions = [self.composition_of(layer) for layer in range(self.depth)]

        def make(*, layer: int, **fields: object) -> Layer:
            found = compositions[layer]
            return attention(compose=found.compose, compose_window=found.compose_window, **fields)

        return make


def values_of(module: nn.Module, fields: type[nn.Module]) -> dict[str, Any]:
    """Return the values, by name, that `module` has in the fields of the class `fields` and its base classes."""
    names = [field.name for field in dataclasses.fields(fields) if field.name not in ("parent", "name")]
    return {name: getattr(module, name) for name in names}


def rematerialized(block_class: Callable[..., Layer], remat: str, *, scanned: bool) -> Callable[..., Layer]:
    """Wrap the class of a layer by `nn.remat` as the field `remat` says; `scanned`: for the body of a scan."""
    if remat not in REMAT_POLICIES:
        return block_class
    # A scan's body is safe from common-subexpression elimination, which would undo the recomputation.
    return nn.remat(block_class, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)


def check_choices(module: nn.Module, **choices: Iterable[str | None]) -> None:
    """Raise ValueError if a field named in `choices` has a value that is not one of the valid ones given there."""
    for name, valid in choices.items():
        value = getattr(module, name)
        if value not in valid:
            raise ValueError(f"{name}={value!r}; known: {', '.join(map(repr, valid))}")


def check_positive(module: nn.Module, *names: str) -> None:
    """Raise ValueError if one of the integer fields `names` is below 1."""
    for name in names:
        if getattr(module, name) < 1:
            raise ValueError(f"{name}={getattr(module, name)} should be 1 or more")


def check_not_negative(module: nn.Module, *names: str) -> None:
    """Raise ValueError if one of the fields `names` is below 0. None is valid."""
    for name in names:
        if (getattr(module, name) or 0) < 0:
            raise ValueError(f"{name}={getattr(module, name)} should not be negative")


def check_attention(module: AttentionFields, num_heads: int) -> None:
    """Raise ValueError if the fields of `AttentionFields` are invalid for a number of heads."""
    check_choices(module, compose=COMPOSE, branches=BRANCHES, qk_norm=QK_NORMS, compose_gelu=COMPOSE_GELUS)
    if module.qk_norm_epsilon <= 0:
        raise ValueError(f"qk_norm_epsilon={module.qk_norm_epsilon} should be above 0")
    if module.compose is None:
        if module.compose_window is not None:
            raise ValueError(f"compose_window={module.compose_window} has no effect without a composition: set compose")
        return
    if module.groups < 1 or num_heads % module.groups:
        raise ValueError(f"groups={module.groups} does not divide num_heads={num_heads}")
    if module.rank < 1:
        raise ValueError(f"rank={module.rank}: the dynamic projections need at least rank 1")
    if not (module.projection or module.gate or module.static):
        raise ValueError("compose without projection, gate or static composes nothing; use compose=None")


def check_transformer(module: TransformerFields) -> None:
    """Raise ValueError if fields of `TransformerFields` are invalid; `Attention` checks those of `AttentionFields`."""
    check_choices(module, remat=REMATS, dtype_mm=DTYPES)
    check_positive(module, "width", "num_heads")
    check_not_negative(module, "depth", "mlp_dim", "num_key_heads")
    if module.width % module.num_heads:
        raise ValueError(f"num_heads={module.num_heads} does not divide width={module.width}")
    check_compose_layers(module)


def check_compose_layers(module: TransformerFields) -> None:
    """Raise ValueError if `compose_layers` has an index that is not a layer, or does not fit the other fields."""
    chosen, depth = module.compose_layers, module.depth
    if chosen is None:
        return
    shown = f"compose_layers={tuple(chosen)}"
    if module.compose is None:
        raise ValueError(f"{shown} has no effect without a composition: set compose, or heads to the name of one")
    wrong = [number for number in chosen if not -depth <= number < depth]
    if wrong or not chosen or len({number % depth for number in chosen}) < len(chosen):
        raise ValueError(f"{shown}: expected different numbers of the {depth} layers")
