"""Tables 8 and 9: ViTs on embedded images as stand-ins for ImageNet-1k, and ablations of DCMHA's components."""

from collections.abc import Sequence
from pathlib import Path

from paper.runs import Run, cells, compare, decision, folder_of, language_model, minus, settings
from paper.table import Table, bars

STEPS = 600
MODEL = {"width": 64, "depth": 2, "mlp_dim": 176, "num_heads": 8}
# Name: the config fields in which a model differs from the others, and the perplexity in the paper. DCFM++ is R = 2.
ARMS: dict[str, tuple[dict[str, object], float]] = {
    "TFM++": ({"compose": None}, 11.68),
    "+static proj.": ({"compose": "both", "projection": False, "gate": False, "static": True}, 11.17),
    "+dyn. proj.": ({"compose": "both", "gate": False}, 10.95),
    "+dyn. gate": ({"compose": "both", "projection": False}, 11.31),
    "+all": ({"compose": "both", "static": True}, 10.79),
    "DCFM++ (R=2)": ({"compose": "both"}, 10.83),
    "+query-wise": ({"compose": "both", "branches": "q"}, 10.89),
    "+key-wise": ({"compose": "both", "branches": "k"}, 10.91),
    "+pre comp.": ({"compose": "pre"}, 11.54),
    "+post comp.": ({"compose": "post"}, 11.05),
    "R=1": ({"compose": "both", "rank": 1}, 10.87),
    "R=4": ({"compose": "both", "rank": 4}, 10.89),
}
CLAIMS = (  # of the paper: the first arm has a lower loss than the second
    ("DCMHA improves Transformer++", "DCFM++ (R=2)", "TFM++"),
    ("static composition improves Transformer++", "+static proj.", "TFM++"),
    ("dynamic composition is better than static", "DCFM++ (R=2)", "+static proj."),
    ("dynamic projections are better than gates", "+dyn. proj.", "+dyn. gate"),
    ("query-wise composition alone improves", "+query-wise", "TFM++"),
    ("key-wise composition alone improves", "+key-wise", "TFM++"),
    ("post-compose is better than pre-compose", "+post comp.", "+pre comp."),
    ("rank 2 is better than rank 1", "DCFM++ (R=2)", "R=1"),
    ("rank 4 is not better than rank 2", "DCFM++ (R=2)", "R=4"),
)


def table9(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Table 9: bits per byte at equal steps and at equal time, and which of the paper's statements hold."""

    def make(name: str, steps: int) -> Run:
        return language_model(folder_of(folder, name), {**MODEL, **ARMS[name][0]}, steps)

    found = compare(make, [*ARMS], seeds, steps)
    rows = [
        {
            "config": name, "parameters": found.parameters[name],
            **cells(found.at_steps[name], "bits per byte", "± 95 %"),
            **cells(minus(found.at_steps[name], found.at_steps["TFM++"]), "difference"),
            **cells(found.at_time[name], "at equal time"), "steps at equal time": found.steps[name],
            "step ms": found.ms[name], "perplexity, paper": paper,
        }
        for name, (_, paper) in ARMS.items()
    ]  # fmt: skip
    claims = [f"{text}: {decision(minus(found.at_steps[a], found.at_steps[b]))}" for text, a, b in CLAIMS]
    return Table("table9", "Table 9: ablations of DCMHA's components", rows, [settings(steps, seeds), *claims],
                 bars(rows, "config", "bits per byte", "perplexity, paper", "± 95 %"))  # fmt: skip


IMAGE_STEPS, IMAGE_METRIC = 1500, "test/top1"
STAND_INS = {"digits": "vit_digits", "scenes": "vit_scenes"}  # for ImageNet-1k: the config
ATTENTION = {"ViT": "mha", "DCViT": "dcmha"}
PAPER = {"ViT": (65.2, 79.8), "DCViT": (68.0, 80.1)}  # top-1 of (DC)ViT-S/16 after 90 and 300 epochs


def table8(folder: Path, seeds: Sequence[int], steps: int) -> Table:
    """Return Table 8: top-1 accuracy on stand-ins for ImageNet-1k, at equal steps and at equal time."""
    rows, claims = [], []
    for data, config in STAND_INS.items():

        def make(name: str, steps: int, data: str = data, config: str = config) -> Run:
            spec = f"{config}:attention={ATTENTION[name]}"
            return Run(folder / data / name, spec, {"total_steps": steps}, IMAGE_METRIC)

        found = compare(make, [*ATTENTION], seeds, steps)
        for name, equal in (("ViT", "steps"), ("DCViT", "steps"), ("DCViT", "time")):
            finals = found.at_steps if equal == "steps" else found.at_time
            ours, plain = ([100 * value for value in finals[arm]] for arm in (name, "ViT"))
            early, late = PAPER[name] if equal == "steps" else (None, None)
            rows.append({
                "model": f"{name} on {data}{', equal time' if equal == 'time' else ''}",
                "parameters": found.parameters[name], "steps": steps if equal == "steps" else found.steps[name],
                "step ms": found.ms[name],
                **cells(ours, "top-1 %", "± 95 %"), **cells(minus(ours, plain), "difference"),
                "ImageNet-1k, 90 epochs, paper": early, "ImageNet-1k, 300 epochs, paper": late,
            })  # fmt: skip
            if name == "DCViT":
                verdict = decision(minus(ours, plain), lower=False, decimals=2)
                claims.append(f"DCViT is more accurate than ViT on {data} at equal {equal}: {verdict}")
    return Table("table8", "Table 8: image classification on stand-ins for ImageNet-1k", rows,
                 [settings(steps, seeds), *claims],
                 bars(rows, "model", "top-1 %", "ImageNet-1k, 300 epochs, paper", "± 95 %"))  # fmt: skip
