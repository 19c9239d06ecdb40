"""Demo of scripts/demo.sh: two runs of configs/vit_digits.py with a table, a plot and a few predictions."""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = {"DCViT": "dcmha", "ViT": "mha"}
MARK = ".demo"  # file that marks the workdirs of a demo, which the next demo may remove
NUM_IMAGES = 5  # test images that are written and predicted


def run(*command: object) -> None:
    """Run a dcvit command. If it fails, exit with its status."""
    process = subprocess.run([sys.executable, "-m", *map(str, command)])
    if process.returncode:
        sys.exit(process.returncode)


def make_folder(workdir: Path) -> None:
    """Create an empty workdir. Remove the workdir of an earlier demo; exit if the folder holds anything else."""
    if (workdir / MARK).exists():
        shutil.rmtree(workdir)
    elif workdir.exists():
        print(f"error: {workdir} exists and was not created by a demo; choose another --out", file=sys.stderr)
        sys.exit(2)
    workdir.mkdir(parents=True)
    (workdir / MARK).touch()


def result(name: str, workdir: Path) -> dict[str, object]:
    """Return the row of the table for a run, from its metrics and timing files."""
    from dcvit.runs import metrics

    rows = metrics.read(workdir / "metrics.jsonl")
    steps = [row["step_seconds"] for row in metrics.read(workdir / "timing.jsonl")]
    return {
        "model": name,
        "top-1": f"{rows[-1]['test/top1']:.2%}",
        "top-5": f"{rows[-1]['test/top5']:.2%}",
        "loss": f"{rows[-1]['test/loss']:.4f}",
        "parameters": f"{rows[0]['num_params']:,}",
        "step time": f"{statistics.median(steps) * 1e3:.1f} ms",
    }


def write_images(folder: Path) -> None:
    """Write the first test images as PNG files whose names contain the labels."""
    from PIL import Image

    import input_pipeline

    source = input_pipeline.open_source("digits", split="test")
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(NUM_IMAGES):
        example = source[i]
        Image.fromarray(example["image"][..., 0]).save(folder / f"test{i}_is_{example['label']}.png")


def train(out: Path, epochs: int) -> None:
    """Train every model of `RUNS` in an empty workdir."""
    for name in RUNS:
        make_folder(out / name)
    for name, attention in RUNS.items():
        print(f"\ntraining {name}")
        config = f"configs/vit_digits.py:attention={attention},epochs={epochs}"
        run("dcvit.train", "--config", config, "--workdir", out / name)


def report(out: Path, epochs: int) -> None:
    """Print the table of results, plot the curves and predict a few test images."""
    from dcvit import cli

    print()
    title = f"{epochs} epochs, 360 test images; {os.cpu_count()} CPU cores, Python {platform.python_version()}"
    rows = [result(name, out / name) for name in RUNS]
    cli.show(rows, "table", title=title)
    (out / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    run("dcvit.plot", *(out / name for name in RUNS), "--out", out / "curves.png")
    write_images(out / "images")
    print("\npredictions of DCViT for test images")
    run("dcvit.predict", "--workdir", out / "DCViT", out / "images", "--topk", 3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    parser.add_argument("--epochs", type=int, default=120, help="passes over the training images (default 120)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/demo", help="folder for all results")
    args = parser.parse_args()
    started = time.monotonic()
    out = Path(os.path.relpath(args.out.resolve(), ROOT))  # the commands run in the clone
    os.chdir(ROOT)
    train(out, args.epochs)
    report(out, args.epochs)
    print(f"\nall results are in {out.resolve()}:")
    print("  DCViT/ ViT/     config.json, metrics.jsonl, timing.jsonl, checkpoints/")
    print("  curves.png      training loss and test accuracy; table.json, the table above")
    print(f"  images/         {NUM_IMAGES} test images; predict your own with")
    print(f"                  python -m dcvit.predict --workdir {out / 'DCViT'} IMAGE …")
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
