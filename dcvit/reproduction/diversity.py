"""Figure 5: captured variance of concatenated QK and OV heads, of the models that the in-context tasks have trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from dcvit.interpret.circuits import captured_variance, circuits
from dcvit.reproduction import arms, in_context
from dcvit.reproduction.tables import Curves, Row, Table, grid
from dcvit.training.seeds import workdir_of
from dcvit.training.trained import open_trained

KINDS = ("QK", "OV")
SHARES = (0.5, 0.9)
PLAIN, COMPOSED = in_context.ARMS


def curves(workdir: Path) -> dict[str, Float64[np.ndarray, " N"]]:
    """Return the captured variance by the number of components, mean over the layers of a run, of QK and OV heads."""
    model, params = open_trained(workdir, None, None).language_model()
    found = [[captured_variance(forms) for forms in circuits(model, params, layer)] for layer in range(model.depth)]
    return dict(zip(KINDS, np.asarray(found, np.float64).mean(axis=0), strict=True))


def components(curve: Float64[np.ndarray, " N"], share: float) -> int:
    """Return the smallest number of components that capture a share of the variance."""
    return int(np.argmax(curve >= share)) + 1


def figure5(runs: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return the curves of both models, mean over layers and seeds.

    Raises:
      ConfigError: a run is not complete, or the runs of a model differ in more than their seed.
    """
    in_context.check_complete(runs, seeds)
    found = {seed: {name: curves(workdir_of(runs / name, seed)) for name in in_context.ARMS} for seed in seeds}
    rows: list[Row] = []
    for kind in KINDS:
        for name in in_context.ARMS:
            by_seed = {seed: {str(i): x for i, x in enumerate(found[seed][name][kind], 1)} for seed in seeds}
            means, intervals = arms.summary(by_seed)
            rows += [
                {
                    "heads": f"{kind}, {name}", "components": int(i), "captured variance": mean,
                    "± 95 %": intervals[i],
                }
                for i, mean in means.items()
            ]  # fmt: skip
    return Table("figure5", "Figure 5: captured variance of QK and OV heads", rows,
                 (in_context.about(seeds, steps), *_notes(found)),
                 Curves("heads", "components", "captured variance", "± 95 %", scale="linear"))  # fmt: skip


def _notes(found: Mapping[int, Mapping[str, Mapping[str, np.ndarray]]]) -> tuple[str, ...]:
    """Return the numbers of components as a table, and the paper's statements with their results."""
    rows: list[Row] = []
    statements = []
    for kind in KINDS:
        for name in in_context.ARMS:
            counts = {
                seed: {f"{share:.0%}": float(components(each[name][kind], share)) for share in SHARES}
                for seed, each in found.items()
            }
            means, intervals = arms.summary(counts)
            row: dict[str, str | float | None] = {"heads": f"{kind}, {name}"}
            for share in means:
                row |= {f"components for {share}": means[share], f"± 95 %, {share}": intervals[share]}
            rows.append(row)
        area = {seed: {"d": float(np.mean(e[COMPOSED][kind] - e[PLAIN][kind]))} for seed, e in found.items()}
        difference, width = arms.summary(area)
        statements.append(f"- {kind} heads are more diverse with DCMHA: {arms.decision(difference['d'], width['d'])}")
    return (
        "The heads of a layer are concatenated, W_Q·W_Kᵀ or W_V·W_O; the curves are the cumulative share of variance "
        "that their first principal components capture, mean over layers and seeds. A lower curve means more diverse "
        "heads.",
        f"Components that capture a share of the variance, of the mean over layers:\n\n{grid(rows)}",
        "The paper finds that DCMHA increases the diversity of QK heads significantly and that of OV heads moderately. "
        "With the mean difference of the curves to the plain model with the same seed:\n\n" + "\n".join(statements),
    )
