"""Leaderboard of cross-head attention: the names of `dcvit.models.head_settings` on a small language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcvit.models import flops, head_settings, lm
from dcvit.reproduction import arms, costs
from dcvit.reproduction.arms import Arm
from dcvit.reproduction.table9 import about, row
from dcvit.reproduction.tables import Cell, Chart, Table

KEY_HEADS = 4  # two heads share a key head, so that all names are possible
ARMS = {name: Arm({"heads": name, "num_key_heads": KEY_HEADS}) for name in head_settings.NAMES}


def table(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the table of complete runs."""
    found = arms.compare(ARMS, runs, seeds, steps)
    rows = []
    for name, arm in ARMS.items():
        net = model_of(arm)
        more: dict[str, Cell] = {
            "MFLOP per token": costs.forward_operations(net, arms.CONTEXT) / arms.CONTEXT / 1e6,
            "cache per token": costs.cache_per_token(net, arms.CONTEXT),
            "flash": "yes" if is_flash(net) else "no",
        }
        rows.append(row(name, found, more))
    return Table("heads", "Leaderboard of cross-head attention", rows, (about(found, steps),),
                 Chart("config", "bits per byte", "± 95 %"))  # fmt: skip


def model_of(arm: Arm) -> lm.LM:
    """Return the model of an arm."""
    return arms.model_of({**arms.MODEL, **arm.fields})


def is_flash(net: lm.LM) -> bool:
    """Return True if any fused plain attention computes the scores and weights of a model."""
    if net.heads is not None:
        return net.heads != "diff"
    return net.compose is None or flops.foldable(net)
