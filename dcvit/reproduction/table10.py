"""Table 10: window patterns and query-wise composition. At desk scale operations and cache, not losses."""

from __future__ import annotations

from dcvit.models import lm
from dcvit.reproduction import costs
from dcvit.reproduction.table6 import CONTEXT, VOCABULARY
from dcvit.reproduction.tables import Chart, Row, Table

# Column: window pattern and branches; the paper's perplexity (405M), training and generation speed in percent (6.9B).
COLUMNS = {
    "1:1": ("1:1", "qk", 10.83, 83.1, 94.5),
    "3:1": ("3:1", "qk", 10.78, 86.6, 99.0),
    "7:1": ("7:1", "qk", 10.83, 88.1, 101.5),
    "1:1 QW": ("1:1", "q", 10.89, 91.5, 99.6),
    "3:1 QW": ("3:1", "q", 10.92, 92.5, 103.3),
}


def table() -> Table:
    """Return the table for the 6.9B model."""
    plain = lm.Model(VOCABULARY, preset="Transformer++-6.9B")
    operations, cache = costs.training_operations(plain, CONTEXT), costs.cache_per_token(plain, CONTEXT)
    rows: list[Row] = []
    for name, (pattern, branches, perplexity, training, generation) in COLUMNS.items():
        net = lm.Model(VOCABULARY, preset="DCFormer++-6.9B", window_pattern=pattern, branches=branches, scan=True)
        rows.append({
            "local:global": name,
            "parameters": costs.parameters(net),
            "TFM++ FLOPs / FLOPs %": 100 * operations / costs.training_operations(net, CONTEXT),
            "training speed, paper %": training,
            "cache / TFM++ cache %": 100 * costs.cache_per_token(net, CONTEXT) / cache,
            "generation speed, paper %": generation,
            "perplexity 405M, paper": perplexity,
        })  # fmt: skip
    notes = (
        f"DCFormer++-6.9B at {CONTEXT} tokens against Transformer++-6.9B without windows. FLOPs and cache are counted; "
        "no speed is measured, and the losses need the runs of `--scale full`.",
    )
    return Table("table10", "Table 10: trade-offs of DCFormer++-6.9B, as bounds", rows, notes,
                 Chart("local:global", "TFM++ FLOPs / FLOPs %", None, "training speed, paper %"))  # fmt: skip
