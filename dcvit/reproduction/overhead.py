"""Table 6: training and inference overhead: bounds for the paper's models, and the measured speed of small models."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcvit.config.load import ROOT
from dcvit.models import lm
from dcvit.models.presets import decode_preset
from dcvit.reproduction import costs, rounds, scaling
from dcvit.reproduction.arms import language_model, language_model_run
from dcvit.reproduction.costs import CONTEXT, VOCABULARY
from dcvit.reproduction.seeded import machine
from dcvit.reproduction.tables import Chart, Row, Table
from dcvit.training.benchmark import Program
from dcvit.training.setup import load_setup
from dcvit.training.timing import interleaved

# Throughput of DCFormer++ in percent of Transformer++: training, and generation with and without windows there.
PAPER = {"2.8B": (74.5, 87.9, 81.1), "6.9B": (83.1, 94.5, 88.7), "13B": (84.4, 95.1, 89.9), "33B": (89.2, 94.8, 89.7)}
SIZES = ((64, 2, 8), (128, 4, 8))  # width, depth, heads of the measured models
LENGTH, PROMPT, NEW = 256, 192, 64  # tokens: of a row in training, of a prompt, and generated
ROUNDS = 20
PLAIN, SAME, COMPOSED = "TFM++", "TFM++ with the same windows", "DCFM++"
ESTIMATES = ROOT / "docs" / "tpu_step.json"


def table() -> Table:
    """Return Table 6: bounds and estimates for the paper's models, and the speed of small models, measured here."""
    estimated = estimates(ESTIMATES)
    rows = [*bounds(), *estimated, *(row for size in SIZES for row in measured(size))]
    missing = f"docs/{ESTIMATES.name} has no estimates of the TPU compiler for these models."
    if not ESTIMATES.is_file():
        missing = f"The TPU compiler's estimates of docs/{ESTIMATES.name} are not part of an installed package."
    notes = (
        "Speed is that of DCFormer++ in percent of Transformer++, which has no windows unless it says “same windows”. "
        "The paper's are throughputs on TPU v3 (training) and A100 (generation of one row).",
        f"FLOPs bound: the ratio of the operations of a training step for a row of {CONTEXT} tokens; it bounds the "
        "speed of implementations that compute as fast. Cache bound: the ratio of the cache's numbers per token; it "
        "bounds generation once reading the cache takes the time. Above 100 %, the windows save more than compositions "
        "cost. Bounds are counted, not measured.",
        f"Measured: untrained models of these architectures, rows of {LENGTH} bytes, windows of {LENGTH // 8} in every "
        f"other layer, without compilation. Training: steps of {scaling.BATCH} rows. Generation: {NEW} "
        f"tokens after prompts of {PROMPT}, from the first new token to the last. Medians and ranges (of the "
        f"ratio within a round) of {ROUNDS} interleaved rounds on {machine()}; other processes on the machine change "
        "them. Small models on CPUs say nothing about the size of the overhead on accelerators.",
        "TPU compiler: static estimates of the cycles of a training step by scripts/tpu/step.py, without a run."
        if estimated else missing,
    )  # fmt: skip
    return Table("table6", "Table 6: overhead of DCFormer++, as bounds and measured", rows, notes,
                 Chart("case", "speed %", None, "paper %"))  # fmt: skip


def row_of(
    case: str, unit: str, plain: float, composed: float, paper: float | None,
    measured: tuple[float, str] | None = None,
) -> Row:  # fmt: skip
    """Return the table row `case`: costs of the plain and the composed model, and the latter's speed in percent.

    The speed is the first of `measured`, whose second is its range; by default it is 100·plain/composed.
    """
    speed, spread = (100 * plain / composed, None) if measured is None else measured
    return {
        "case": case, "unit": unit, "TFM++": plain, "DCFM++": composed, "speed %": speed, "range %": spread,
        "paper %": paper,
    }  # fmt: skip


def bounds() -> list[Row]:
    """Return table rows with bounds of the composed models' speed: by operations in training, by cache in decoding."""
    rows: list[Row] = []
    for size, (training, generation, same_windows) in PAPER.items():
        plain, composed = (lm.Model(VOCABULARY, preset=f"{name}++-{size}") for name in ("Transformer", "DCFormer"))
        same = lm.Model(VOCABULARY, **{**decode_preset(f"Transformer++-{size}"), "window_pattern": "1:1"})
        operations = [costs.training_operations(net, CONTEXT) / 1e12 for net in (plain, same, composed)]
        cache = [costs.cache_per_token(net, CONTEXT) for net in (plain, same, composed)]
        for what, unit, counted, papers in (
            ("training, FLOPs bound", "TFLOP per row", operations, (training, None)),
            ("generation, cache bound", "numbers per token", cache, (generation, same_windows)),
        ):
            for windows, count, paper in zip(("", ", same windows"), counted[:2], papers, strict=True):
                case = f"{size} {what}{windows}"
                rows.append(row_of(case, unit, count, counted[2], paper))
    return rows


def estimates(path: Path) -> list[Row]:
    """Return table rows with the training speed that the TPU compiler estimates, from a file of scripts/tpu/step.py.

    A row compares a composed and a plain model of the same config, topology and number of examples. Without the file
    there are no rows.
    """
    if not path.is_file():
        return []
    stored = json.loads(path.read_text())
    found = {(each["config"], each["topology"], each["examples"]): each["seconds"] for each in stored}
    rows = []
    for (config, topology, examples), seconds in found.items():
        plain = found.get((config.replace("DCFormer++-", "Transformer++-"), topology, examples))
        if "DCFormer++-" in config and plain is not None:
            size = config.partition("DCFormer++-")[2].replace(",", " ").split()[0]
            case = f"{config.partition('preset=')[2]} training, TPU compiler, {topology}"
            paper = PAPER[size][0] if size in PAPER else None
            rows.append(row_of(case, "seconds per step", plain, seconds, paper))
    return rows


def fields(size: tuple[int, int, int]) -> dict[str, dict[str, object]]:
    """Return, by name, the fields of the models to measure: plain, plain with windows, composed; size: see `SIZES`."""
    composed = {**scaling.fields_of("DCFormer++", size), "qk_norm": None, "window": LENGTH // 8}  # as in Table 6
    plain = scaling.fields_of("Transformer++", size)
    windows = {name: composed[name] for name in ("window", "window_pattern")}
    return {PLAIN: plain, SAME: {**plain, **windows}, COMPOSED: composed}


def runs_of(size: tuple[int, int, int]) -> dict[str, tuple[str, list[str]]]:
    """Return (config, overrides) of each measured model (see `fields`) of a size, by name."""
    runs = {arm: language_model_run(Path(), each, 1) for arm, each in fields(size).items()}
    lengths = [f"{data}.context={LENGTH}" for data in ("input.data", "evals.validation.data")]
    return {arm: (run.spec, [*run.words(0), *lengths]) for arm, run in runs.items()}


def nets_of(size: tuple[int, int, int]) -> dict[str, lm.LM]:
    """Return the measured models (see `fields`) of a size, by name."""
    return {arm: language_model(each).clone(context=LENGTH) for arm, each in fields(size).items()}


def measured(size: tuple[int, int, int]) -> list[Row]:
    """Measure small models of a size in training and generation, and return table rows with their speed."""
    steps = {arm: Program(load_setup(*run), "train").start() for arm, run in runs_of(size).items()}
    rates = {
        "training": {
            arm: [scaling.BATCH * LENGTH / time for time in seconds]
            for arm, seconds in interleaved(steps, ROUNDS).items()
        }
    }
    for batch, name in ((1, "generation"), (8, "generation of 8 rows")):
        rates[name] = rounds.decoding_rates(nets_of(size), batch, PROMPT, NEW, ROUNDS)
    return [
        measured_row(f"{size[0]}×{size[1]} {name}, measured", each, arm)
        for name, each in rates.items()
        for arm in (PLAIN, SAME)
    ]


def measured_row(case: str, rates: Mapping[str, Sequence[float]], plain: str) -> Row:
    """Return a table row: median tokens/s of the model `plain` and the composed one, and their ratio with its range."""
    windows = ", same windows" if plain == SAME else ""
    ratios = [100 * b / a for a, b in zip(rates[plain], rates[COMPOSED], strict=True)]
    medians = [statistics.median(rates[arm]) for arm in (plain, COMPOSED)]
    spread = f"{min(ratios):.1f}–{max(ratios):.1f}"
    return row_of(case + windows, "tokens/s", medians[0], medians[1], None, (statistics.median(ratios), spread))
