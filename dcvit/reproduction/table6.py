"""Table 6: training and inference overhead. At desk scale the operations and the cache that bound it, not the speed."""

from __future__ import annotations

from dcvit.models import lm
from dcvit.models.presets import decode_preset
from dcvit.reproduction import costs
from dcvit.reproduction.tables import Chart, Row, Table

CONTEXT, VOCABULARY = 2048, 50_257
# Throughput of DCFormer++ in percent of Transformer++: training, and generation with and without windows there.
PAPER = {"2.8B": (74.5, 87.9, 81.1), "6.9B": (83.1, 94.5, 88.7), "13B": (84.4, 95.1, 89.9), "33B": (89.2, 94.8, 89.7)}


def table() -> Table:
    """Return the table."""
    rows: list[Row] = []
    for size, (training, global_only, windowed) in PAPER.items():
        plain, composed = (lm.Model(VOCABULARY, preset=f"{name}++-{size}") for name in ("Transformer", "DCFormer"))
        same = lm.Model(VOCABULARY, **{**decode_preset(f"Transformer++-{size}"), "window_pattern": "1:1"})
        operations = [costs.training_operations(net, CONTEXT) for net in (plain, same, composed)]
        cache = [costs.cache_per_token(net, CONTEXT) for net in (plain, same, composed)]
        rows.append({
            "model": size,
            "TFM++ FLOPs / DCFM++ FLOPs %": 100 * operations[0] / operations[2],
            "… with the same windows %": 100 * operations[1] / operations[2],
            "training speed, paper %": training,
            "TFM++ cache / DCFM++ cache %": 100 * cache[0] / cache[2],
            "… with the same windows in TFM++ %": 100 * cache[1] / cache[2],
            "generation speed, paper %": global_only,
            "… with the same windows, paper %": windowed,
        })  # fmt: skip
    notes = (
        f"Rows of {CONTEXT} tokens. The ratio of FLOPs bounds the ratio of training speeds of implementations that "
        "compute as fast; above 100 %, the windows of DCFormer++ save more than compositions cost. The ratio of the "
        "cache's numbers bounds that of generation once reading the cache takes the time. No speed is measured.",
    )
    return Table("table6", "Table 6: overhead of DCFormer++, as bounds", rows, notes,
                 Chart("model", "… with the same windows %", None, "training speed, paper %"))  # fmt: skip
