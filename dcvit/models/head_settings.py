"""Cross-head attention of other papers by name: the argument `heads` of `Model`.

Each name stands for fields of the composition (`SETTINGS`), by which `Model` replaces it, so that the built model is an
ordinary composed one. The letters are those of `dcvit.dcmha`; A are scores or weights.

  name         formula                                                                      source
  mha          plain attention                                                              Vaswani et al., 2017
  talking      A' = A·P before and after the softmax, P = I + W_b                           Shazeer et al., 2020
  mta          A' = A·P after the softmax: the head convolution of multi-token attention    Golovneva et al., 2025
  gated        O' = O ⊙ 2σ(2·x·W_qg): headwise gated attention                              Qiu et al., 2025
  lightweight  A' = A + A·w_q1·w_q2 after the softmax, rank 1                               Xiao et al., 2024, Eqn 7
  folded       query-wise branches and W_b inside each group of a key head                  `dcvit.dcmha.folded`
  folded_post  the same after the softmax only                                              Xiao et al., 2024
  dcmha        the complete composition                                                     Xiao et al., 2024
  dcmha_post   the same after the softmax only                                              Xiao et al., 2024, Table 9

docs/heads.md lists the differences from the papers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from dcvit.errors import nearest

LOG = logging.getLogger(__name__)
STATIC = {"projection": False, "gate": False, "static": True}
# The fields that a name stands for. `groups` of `FOLDED` is the number of key heads.
SETTINGS: dict[str, dict[str, object]] = {
    "mha": {"compose": None},
    "talking": {"compose": "both", **STATIC},
    "mta": {"compose": "post", **STATIC},
    "gated": {"compose": "post", "branches": "q", "projection": False, "gate": True, "static": False},
    "lightweight": {
        "compose": "post", "branches": "q", "projection": True, "gate": False, "static": False, "rank": 1,
    },
    "folded": {"compose": "both", "branches": "q", "projection": True, "gate": True, "static": True},
    "folded_post": {"compose": "post", "branches": "q", "projection": True, "gate": True, "static": True},
    "dcmha": {"compose": "both", "branches": "qk", "projection": True, "gate": True},
    "dcmha_post": {"compose": "post", "branches": "qk", "projection": True, "gate": True},
}  # fmt: skip
FOLDED = ("folded", "folded_post")
NAMES = tuple(SETTINGS)
COMPOSITION = ("heads", "compose", "branches", "projection", "gate", "static", "rank", "groups")


def of_attention(name: str) -> dict[str, object]:
    """Return the fields of a model for the argument `attention` of the shipped configs, a name of this module.

    Except for `FOLDED`, these are fields of the composition instead of `heads`, so that a config can still override
    them.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"attention={name!r}; {nearest(name, NAMES, 'heads=')}")
    if name in ("dcmha", "dcmha_post"):
        return {"compose": SETTINGS[name]["compose"]}  # the other fields are the defaults of a model, or of its preset
    return {"heads": name} if name in FOLDED else dict(SETTINGS[name])


def with_attention(model: Mapping[str, object], name: str) -> dict[str, object]:
    """Return the fields of a model with its composition replaced by that of `of_attention`."""
    return {key: value for key, value in model.items() if key not in COMPOSITION} | of_attention(name)


def resolve(
    name: str | None, preset: Mapping[str, object], fields: Mapping[str, object], num_heads: int
) -> dict[str, Any]:
    """Return the fields of a model, with those that a name of this module stands for.

    These replace `compose`, and all fields of the preset. "folded" and "folded_post" without `num_key_heads` have half
    as many key heads as heads.

    Args:
      name: the argument `heads` of the model; None stands for no fields.
      preset: fields of the model's preset.
      fields: fields that are given; they override the preset's.
      num_heads: H if the fields do not give it.

    Raises:
      ValueError: the name is unknown, another value is given for a field that it stands for, or "folded" has as many
        key heads as heads.
    """
    merged = {**preset, **fields}
    if name is None:
        return merged
    if name not in NAMES:
        raise ValueError(f"heads={name!r}; {nearest(str(name), NAMES, 'heads=')}")
    meant = SETTINGS[name]
    if name in FOLDED:
        heads = merged.get("num_heads", num_heads)
        key_heads = merged.get("num_key_heads") or _half(heads)
        if key_heads == heads:
            raise ValueError(f"heads={name!r} composes the heads of a key head: set num_key_heads below num_heads")
        meant = {**meant, "groups": key_heads}
        merged["num_key_heads"] = key_heads
    elif "groups" not in fields:
        merged.pop("groups", None)  # of a preset: a name composes all heads
    for field, value in meant.items():
        if field != "compose" and fields.get(field, value) != value:
            raise ValueError(f"heads={name!r} means {field}={value!r}, found {fields[field]!r}; remove one of them")
    return {**merged, **meant}


@functools.cache
def _half(num_heads: int) -> int:
    """Return half of `num_heads`, the default number of key heads of a folded composition, and log it once."""
    if num_heads % 2:
        raise ValueError(f"heads='folded' with num_heads={num_heads}: set num_key_heads to a divisor below num_heads")
    LOG.info("heads='folded': num_key_heads is %d, half of the %d heads", num_heads // 2, num_heads)
    return num_heads // 2
