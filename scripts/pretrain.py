"""Makes the models in `dcvit/pretrained` again: trains, converts and evaluates each, and writes its card.

    python scripts/pretrain.py [digits] [tasks] [text] [--runs FOLDER]

A run in FOLDER/NAME that is complete is not trained again. A model that exists is replaced.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax

from dcvit.hub import pretrained
from dcvit.hub.open import open_model
from dcvit.hub.saved import as_weights
from dcvit.pages.evaluation import evaluate
from dcvit.parallel import runtime
from dcvit.runs import checksums, metrics
from dcvit.weights.export.card import CARD
from dcvit.weights.export.conversion import convert

ROOT = Path(__file__).resolve().parent.parent
FIGURES = "card.json"
NO_LICENSE = "# license: to be chosen by the author of the weights"
CONFIGS = {"digits": "vit_digits", "tasks": "lm_synthetic", "text": "lm_stdlib"}
DATA = {
    "digits": "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, UCI), the part that scikit-learn "
    "contains; license of the data: CC BY 4.0",
    "tasks": "generated from a seed by dcvit (kind 'synthetic'); license of the data: Apache-2.0",
    "text": "source code of Python's standard library; license of the data: PSF-2.0",
}
USE = {
    "digits": "dcvit predict --model digits IMAGE",
    "tasks": 'dcvit explore --model tasks --prompt "wolf . wolf . cello . odd the"',
    "text": 'dcvit generate --model text --prompt "def main("',
}
COLUMNS = ("top1", "top5", "loss", "bits_per_byte", "accuracy")  # of an evaluation, those that it has


def evaluations(folder: Path) -> dict[str, dict[str, float]]:
    """Return the figures of each evaluator of a run or of a model of the package, by the name of the evaluator."""
    rows = evaluate(open_model(folder)).rows
    return {
        str(row["evaluation"]): {key: row[key] for key in COLUMNS if row.get(key) is not None}
        for row in rows
        if "/" not in str(row["evaluation"])  # as in the names of a part of the data
    }


def card(name: str, workdir: Path, folder: Path) -> dict[str, object]:
    """Return the figures of the card of a model."""
    record = json.loads((folder / pretrained.RUN).read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    last = metrics.read(workdir / "metrics.jsonl")[-1]
    return {
        "config": CONFIGS[name],
        "seed": record["seed"],
        "steps": last["step"],
        "parameters": metrics.read(workdir / "metrics.jsonl")[0]["num_params"],
        "evaluations": evaluations(folder),
        "commit": commit.stdout.strip(),
        "software": f"Python {platform.python_version()}, jax {jax.__version__}, {os.cpu_count()} CPU cores",
        "again": f"python scripts/pretrain.py {name}",
        "use": USE[name],
        "data": DATA[name],
        "license": "Apache-2.0",
    }


def section(figures: dict[str, object]) -> str:
    """Return the section of the card with its figures, which the card of every converted model does not have."""
    lines = [
        f"| {key} | {', '.join(f'{k} {v:.5g}' for k, v in value.items()) if isinstance(value, dict) else value} |"
        for key, value in (figures | figures["evaluations"]).items()
        if key != "evaluations"
    ]
    return "\n".join(["\n## Origin\n", "| fact | value |", "|---|---|", *lines]) + "\n"


def table() -> str:
    """Return the table of docs/weights.md, from the cards."""
    lines = ["| name | parameters | config, seed | steps | result on its evaluation data |", "|---|---|---|---|---|"]
    for name in CONFIGS:
        found = json.loads((pretrained.FOLDER / name / FIGURES).read_text())
        (result,) = found["evaluations"].values()
        if "bits_per_byte" in result:
            cell = f"{result['bits_per_byte']:.3f} bits per byte"
        elif "top1" in result:
            cell = f"{100 * result['top1']:.2f} % top-1"
        else:
            cell = f"{100 * result['accuracy']:.2f} % of answers"
        facts = [name, f"{found['parameters']:,}", f"`{found['config']}`, {found['seed']}", f"{found['steps']:,}", cell]
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines)


def make(name: str, workdir: Path) -> None:
    """Train a model if its run is not complete, and write its folder."""
    command = [sys.executable, "-m", "dcvit.train", "--config", CONFIGS[name], "--workdir", str(workdir)]
    subprocess.run(command, check=True, cwd=ROOT)
    folder = pretrained.FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder}: {convert([workdir], folder, 'safetensors', lambda path: as_weights(open_model(path)))}")
    shutil.copyfile(workdir / "config.json", folder / pretrained.RUN)
    figures = card(name, workdir, folder)
    (folder / FIGURES).write_text(json.dumps(figures, indent=2) + "\n")
    text = (folder / CARD).read_text()
    assert NO_LICENSE in text
    (folder / CARD).write_text(text.replace(NO_LICENSE, "license: apache-2.0") + section(figures))
    checksums.write(folder, [CARD, FIGURES], checksums.WEIGHTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"models, by default all: {', '.join(CONFIGS)}")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/pretrained", help="folder of the runs")
    args = parser.parse_args()
    if unknown := {*args.names} - {*CONFIGS}:
        parser.error(f"{', '.join(sorted(unknown))}: the models are {', '.join(CONFIGS)}")
    runtime.configure()
    runtime.check_devices()
    for name in args.names or CONFIGS:
        make(name, args.runs.resolve() / name)
    print(table())


if __name__ == "__main__":
    main()
