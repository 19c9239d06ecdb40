"""Table 2: ratios of extra parameters and computation, by the formulas of Appendix E and counted from models."""

from __future__ import annotations

from dcvit.models import lm
from dcvit.reproduction import costs
from dcvit.reproduction.tables import Chart, Row, Table

RANK = 2
# Model, sequence length S, and the percentages of the paper. For 6.9B and ρ = 0.5 it prints S = 4096, although
# ρ = S/D_m is 0.5 at S = 2048 and the percentage is that of ρ = 0.5.
CASES = (("1.4B", 2048, 2.6, 4.8), ("6.9B", 2048, 1.3, 1.9), ("6.9B", 8192, 1.3, 3.3))


def extra_parameters(head_dim: int, rank: int = RANK) -> float:
    """Return (2R + 1)/(3·D_h) of Eqn 10."""
    return (2 * rank + 1) / (3 * head_dim)


def extra_operations(head_dim: int, rho: float, rank: int = RANK) -> float:
    """Return 4(2R + 1)(1 + ρ)/((12 + ρ)·D_h) of Eqn 11."""
    return 4 * (2 * rank + 1) * (1 + rho) / ((12 + rho) * head_dim)


def one_layer(size: str, composed: bool, depth: int) -> lm.LM:
    """Return layers of a model of the paper, all global, with a small vocabulary."""
    preset = f"{'DCFormer' if composed else 'Transformer'}-{size}"
    if size == "6.9B":  # GPT-3's architecture, as Appendix E assumes, in a size that only LLaMA's has
        shape = {name: getattr(lm.Model(2, preset=f"Transformer++-{size}"), name) for name in ("width", "num_heads")}
        return _layers("Transformer-1.4B", composed, depth, mlp_dim=None, **shape)
    return _layers(preset, composed, depth)


def _layers(preset: str, composed: bool, depth: int, **fields: int | None) -> lm.LM:
    shared = {"depth": depth, "window_pattern": "none", "context": 8192, "qk_norm": None}
    return lm.Model(2, preset=preset, implementation="reference", compose="both" if composed else None,
                    **{**shared, **fields})  # fmt: skip


def table() -> Table:
    """Return the table; percentages of a layer, without embeddings."""
    rows: list[Row] = []
    for size, length, paper_parameters, paper_operations in CASES:
        plain, composed = ([one_layer(size, c, depth) for depth in (1, 2)] for c in (False, True))
        net = plain[0]
        head_dim = net.width // net.num_heads

        def extra(count: list[float]) -> float:
            """Return the percentage that a composed layer has more; other parts of the models cancel."""
            without, with_one = count[1] - count[0], count[3] - count[2]
            return 100 * (with_one / without - 1)

        models = [*plain, *composed]
        rho = length / net.width
        rows.append({
            "model": size, "S": length, "ρ": rho,
            "params, formula %": 100 * extra_parameters(head_dim),
            "params, counted %": extra([costs.parameters(m) for m in models]),
            "params, paper %": paper_parameters,
            "FLOPs, formula %": 100 * extra_operations(head_dim, rho),
            "FLOPs, all pairs %": extra([_all_pairs(m, length) for m in models]),
            "FLOPs, visible pairs %": extra([costs.forward_operations(m, length) for m in models]),
            "FLOPs, program %": extra([costs.program_operations(m, length) for m in models]),
            "FLOPs, paper %": paper_operations,
        })  # fmt: skip
    notes = (
        "Counted parameters are those of the parameter tree; the formula omits 4R²/(3·D_h²). FLOPs of the formula "
        "count compositions for all query-key pairs and plain attention for the half that causality allows. “All "
        "pairs” and “visible pairs” count both for the same pairs, by `dcvit.models.flops`. “Program” is XLA's count "
        "of the unoptimized program, with all pairs, element-wise operations and the zeros of block matrices.",
        "The paper prints S = 4096 for 6.9B and ρ = 0.5; ρ = S/D_m = 0.5 is S = 2048, which is counted here.",
    )
    return Table("table2", "Table 2: extra parameters and FLOPs of DCMHA in a layer", rows, notes,
                 Chart("model", "FLOPs, formula %", None, "FLOPs, paper %"))  # fmt: skip


def _all_pairs(net: lm.LM, length: int) -> float:
    """Return the operations of a row in which every token attends to all: those of visible pairs, and the rest."""
    pairs = length * (length + 1) // 2
    longer = [costs.forward_operations(net, n) for n in (length, length + 1, length + 2)]
    each = longer[2] - 2 * longer[1] + longer[0]  # the second difference: the cost of one pair
    return longer[0] + (length**2 - pairs) * each
