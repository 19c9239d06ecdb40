"""Call of attention: its arrays, its options, and the composition of a layer."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer

from dcvit.dcmha.compose import (
    ComposeWeights,
    HiddenWeights,
    check_floating,
    check_weights,
    gate_init,
    hidden_init,
    projection_init,
    static_init,
)
from dcvit.dcmha.segments import NO_ID, Segments
from dcvit.dcmha.shapes import Array, Bool, Float


class Inputs(NamedTuple):
    """Arrays of one call of attention, as `dcvit.dcmha.attention` takes them, or the gradients of these arrays.

    `hidden` has the dynamic weights of `pre` and `post` once more, for kernels that compute their second layer.
    `composed` is True for the pairs that are composed, where that is not known when the program is traced: in decoding
    with a `Composition.compose_window`. None: the options define the pairs.

    Implementations may arrange the axes in another order; they document it.
    """

    q: Float[Array, "B T H D"]
    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]
    pre: ComposeWeights | None = None
    post: ComposeWeights | None = None
    mask: Bool[Array, "#B 1 #T #S"] | None = None
    segments: Segments | None = None
    hidden: HiddenWeights | None = None
    composed: Bool[Array, "#B 1 #T #S"] | None = None

    def once(self) -> Inputs:
        """Return the inputs with the dynamic weights in `hidden` alone, if it is present."""
        if self.hidden is None:
            return self
        pre, post = (w and ComposeWeights(static=w.static) for w in (self.pre, self.post))
        return self._replace(pre=pre, post=post)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a call of attention; see `dcvit.dcmha.attention`. All fields are known at trace time.

    Fields:
      causal: query i attends only to keys 0 … i.
      window: query i attends only to keys i-window+1 … i; implies `causal`.
      groups: number of equal groups of heads; each group is composed separately.
      scale: factor of q·k.
      first_query: position of query 0 among the keys, for `causal` and the windows; not 0 for a part of the queries.
      compose_window: query i's scores and weights are composed for keys above i-compose_window only; None: for all.
    """

    causal: bool = False
    window: int | None = None
    groups: int = 1
    scale: float = 1.0
    first_query: int = 0
    compose_window: int | None = None


def make_call(
    inputs: Inputs,
    composition: Composition | None = None,
    *,
    causal: bool = False,
    window: Any = None,
    groups: Any = 1,
    scale: object = None,
    compose_window: Any = None,
) -> Call:
    """Return the `Call` with these arrays and options after checking them; a compose without weights becomes None.

    Args:
      inputs: the arrays.
      composition: the layer's composition, which the arrays must fit; None derives it from the arrays and `groups`.
      causal, window, groups, scale, compose_window: see `dcvit.dcmha.attention`. `groups` and `compose_window` are
        unused if the composition is given.

    Raises:
      ValueError: as `dcvit.dcmha.attention`.
    """
    if composition is not None:
        groups, compose_window = composition.groups, composition.compose_window
    given = {"window": window, "compose_window": compose_window}
    windows = {name: number for name, number in given.items() if number is not None}
    for name, number in {"groups": groups, **windows}.items():
        if not isinstance(number, int | np.integer):
            raise ValueError(f"{name}={number!r}: expected an integer that is known at trace time")
    check_arrays(inputs)
    batch, queries, heads, head_dim = inputs.q.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"groups={groups} does not divide {heads} heads")
    for name, number in windows.items():
        if number < 1:
            raise ValueError(f"{name}={number}: expected at least 1, because a query attends to its own position")
    for weights in (inputs.pre, inputs.post):
        if weights is not None:
            check_weights(
                weights, batch=batch, heads=heads, queries=queries, keys=inputs.k.shape[1], groups=groups
            )  # fmt: skip
    pre, post = (None if w is None or all(x is None for x in w) else w for w in (inputs.pre, inputs.post))
    found = dataclasses.replace(Composition.of_weights(pre, post, groups), compose_window=compose_window)
    if compose_window is not None:
        if inputs.composed is None and not causal and window is None:
            raise ValueError(f"compose_window={compose_window} needs causal attention; ViTs have none")
        reach = queries if window is None else min(queries, window)  # of a query, in keys
        if found.compose is None or inputs.composed is not None or compose_window >= reach:
            compose_window = None
    options = Options(causal, window, groups, checked_scale(scale, head_dim), compose_window=compose_window)
    if composition is not None and composition.branch_kinds != found.branch_kinds:
        raise ValueError(f"the weights have the composition {found}, expected {composition}")
    return Call(inputs._replace(pre=pre, post=post), options, composition or found)


def check_arrays(inputs: Inputs) -> None:
    """Raise ValueError if queries, keys, values, mask and segments do not fit each other."""
    q, k, v, _, _, mask, segments, *_ = inputs
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"expected q (B T H D) and k, v (B S K D), found {q.shape}, {k.shape}, {v.shape}")
    check_floating({"q": q, "k": k, "v": v})
    batch, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1:3]
    if not (heads and keys and head_dim and key_heads):
        raise ValueError(f"expected at least one head, key and dimension, found q {q.shape} and k {k.shape}")
    if heads % key_heads:
        raise ValueError(f"the number of query heads ({heads}) is not a multiple of the key heads ({key_heads})")
    if segments is not None:
        for name, ids, length in zip(Segments._fields, segments, (queries, keys), strict=True):
            if ids.dtype != jnp.int32 or ids.shape != (batch, length):
                raise ValueError(f"segments of {name} are {ids.dtype}{ids.shape}, expected int32{(batch, length)}")
            is_known = not isinstance(ids, jax.core.Tracer) and getattr(ids, "is_fully_addressable", True)
            if is_known and (np.asarray(ids) == NO_ID).any():  # jnp would be traced in a jitted function
                raise ValueError(f"segments of {name} have the id {NO_ID}, which is reserved: expected a larger one")
    if mask is None:
        return
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool: True where a query attends to a key")
    largest = (batch, 1, queries, keys)
    if mask.ndim != 4 or any(n not in (1, most) for n, most in zip(mask.shape, largest, strict=True)):
        raise ValueError(f"mask has shape {mask.shape}, expected it to broadcast to {largest}")


def checked_scale(scale: object, head_dim: int) -> float:
    """Return the factor of q·k as a number, 1/sqrt(D) for None, or raise ValueError."""
    try:
        number = 1 / math.sqrt(head_dim) if scale is None else float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"scale must be a number that is known at trace time, found {scale!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"scale={scale}: expected a finite number")
    return number


@dataclasses.dataclass(frozen=True)
class Composition:
    """The composition of an attention layer (Section 3, Table 9): which composes exist, and their branches.

    Fields:
      compose: the attention matrices that are composed: "both", "pre" (scores), "post" (weights) or None.
      branches: the tokens that give a compose its dynamic weights: "qk" (queries and keys), "q" or "k".
      projection: the dynamic projections exist.
      gate: the dynamic gates exist.
      static: the static projection W_b exists.
      rank: R of the dynamic projections.
      groups: G, the number of equal groups; heads are composed inside each group.
      gelu: the GELU of the dynamic projections: "tanh" or "exact".
      compose_window: the latest keys, the query's own included, whose pairs with a query are composed; None: all keys.
    """

    compose: str | None = None
    branches: str = "qk"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = 2
    groups: int = 1
    gelu: str = "tanh"
    compose_window: int | None = None

    @classmethod
    def of_weights(cls, pre: ComposeWeights | None, post: ComposeWeights | None, groups: int = 1) -> Composition:
        """Return the composition that has the branches of both weights, with the larger of their ranks."""
        composed = {name: w for name, w in (("pre", pre), ("post", post)) if w is not None}
        arrays = {(name, field): x for name, w in composed.items() for field, x in w._asdict().items() if x is not None}
        fields = {field for _, field in arrays}
        return cls(
            "both" if len(composed) == 2 else next(iter(composed), None),
            branches="".join(side for side in "qk" if fields & {f"{side}1", f"{side}g"}),
            projection=bool(fields & {"q1", "k1"}),
            gate=bool(fields & {"qg", "kg"}),
            static="static" in fields,
            rank=max((x.shape[2] for (_, field), x in arrays.items() if field in ("q1", "k1")), default=0),
            groups=groups,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the composes that exist: "pre", "post", both or none."""
        return tuple(name for name in ("pre", "post") if self.compose in (name, "both"))

    @property
    def is_key_wise(self) -> bool:
        """True if a compose depends on the keys, so that decoding caches the weights of each key."""
        return self.compose is not None and "k" in self.branches and (self.projection or self.gate)

    @property
    def mixes_heads(self) -> bool:
        """True if there are dynamic or static projections; gates alone do not mix heads."""
        return self.projection or self.static

    @property
    def branch_kinds(self) -> tuple[tuple[str, ...], bool, bool]:
        """The names of the composes, `is_key_wise` and `mixes_heads`: properties that select a backend."""
        return self.names, self.is_key_wise, self.compose is not None and self.mixes_heads

    def why_not_foldable(self, key_heads: int) -> str | None:
        """Return the reason why the composition cannot be folded with `key_heads` key heads, or None."""
        if self.compose is None:
            return "there is no composition"
        if self.is_key_wise:
            return "the composition is key-wise"
        if self.compose_window is not None:
            return "the composition has a window"
        if self.mixes_heads and self.groups % key_heads:
            return f"the {self.groups} groups of heads are not inside the {key_heads} key heads"
        return None

    def foldable(self, key_heads: int) -> bool:
        """Return True if the composition can be folded into queries and outputs (`dcvit.dcmha.folded`)."""
        return self.why_not_foldable(key_heads) is None

    def parameters(self, heads: int, width: int) -> dict[str, tuple[tuple[int, ...], Initializer]]:
        """Return shape and initializer of the parameters of one compose, by their names in `ComposeWeights`.

        "q1" is the paper's W_q1, and so on; "static" is W_b.
        """
        per_group = heads // self.groups
        inner = 2 * self.rank * per_group
        found: dict[str, tuple[tuple[int, ...], Initializer]] = {}
        for side in [side for side in "qk" if side in self.branches]:
            if self.projection:
                found[f"{side}1"] = (width, self.groups, inner), hidden_init(width, inner)
                found[f"{side}2"] = (self.groups, inner, inner), projection_init(self.rank, per_group)
            if self.gate:
                found[f"{side}g"] = (width, heads), gate_init(width, per_group)
        if self.static:
            found["static"] = (self.groups, per_group, per_group), static_init(per_group)
        return found

    def cached(self, heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the key-wise weights of one token in one compose, by their names in `ComposeWeights`."""
        if not self.is_key_wise:
            return {}
        projections = {"k1": (self.rank, heads), "k2": (self.rank, heads)} if self.projection else {}
        return {**projections, **({"kg": (heads,)} if self.gate else {})}

    def multiply_adds(self, heads: int, key_heads: int, width: int, tokens: int, pairs: int) -> int:
        """Return the multiply-adds of the composes of one layer: their dynamic weights, then Eqn 7 on every pair.

          each side of T tokens:    T·(M·G·I + G·I²) for w_1 and w_2,   T·M·H for the gate
          each of P pairs:          2·R·H (down H→R, up R→H) and H (gate) for each side,   H·J for the static W_b

        With G = 1 the weights are the paper's T·(M·2RH + (2RH)² + M·H). A composition that can be folded into queries
        and outputs costs nothing for a pair:

          each of T tokens:         R·H·J and H·J for the J×J matrices (projection and gate), H·J·D to apply them, with
                                    J = 1 if there are only gates
        """
        rank, per_group = self.rank, heads // self.groups
        inner = 2 * rank * per_group
        weights = self.projection * self.groups * inner * (width + inner) + self.gate * width * heads
        sides, composes = len(self.branches), len(self.names)
        if self.foldable(key_heads):
            per_group = per_group if self.mixes_heads else 1
            matrix = self.projection * rank + self.gate
            return composes * tokens * (weights + heads * per_group * (matrix + width // heads))
        each_pair = sides * (self.projection * 2 * rank * heads + self.gate * heads) + self.static * heads * per_group
        return composes * (tokens * sides * weights + pairs * each_pair)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inputs"], meta_fields=["options", "composition"])
@dataclasses.dataclass(frozen=True)
class Call:
    """One call of attention: a JAX tree whose leaves are its arrays. `make_call` checks and makes it.

    Fields:
      inputs: the arrays.
      options: whether it is causal, its windows, groups and scale; `compose_window` is None if all pairs are inside.
      composition: the composes and branches that the arrays contain, with the groups of the options.
    """

    inputs: Inputs
    options: Options
    composition: Composition

    @property
    def is_plain(self) -> bool:
        """True if there is no composition."""
        return self.composition.compose is None

    def in_groups(self, groups: int) -> Call:
        """Return the call with another number of groups, for a device that has a part of the heads."""
        options = dataclasses.replace(self.options, groups=groups)
        return Call(self.inputs, options, dataclasses.replace(self.composition, groups=groups))

    def without_composition(self, q: Float[Array, "B T H D"]) -> Call:
        """Return the call of plain attention with the queries `q` and the same keys, values, mask and segments."""
        plain = self.inputs._replace(q=q, pre=None, post=None, hidden=None)
        return Call(plain, dataclasses.replace(self.options, groups=1), Composition())


Attend: TypeAlias = Callable[[Call], Array]  # a function that computes attention: the outputs of the heads of a call


class UnsupportedError(NotImplementedError):
    """An implementation does not support a call; the message is a one-line reason.

    It is a class of its own, apart from the NotImplementedError that JAX raises.
    """


def reason_of(check: Callable[..., object], *args: object) -> str | None:
    """Return the message of the UnsupportedError that check(*args) raises, or None."""
    try:
        check(*args)
    except UnsupportedError as error:
        return str(error)
    return None
