"""Demos of scripts/demo.sh: a composed and a plain model with a table, a plot, and predictions or generated text."""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE_MODELS = {"DCViT": "dcmha", "ViT": "mha"}
LANGUAGE_MODELS = {"DCFormer++": "dcmha", "Transformer++": "mha"}
MARK = ".demo"  # file that marks the workdirs of a demo, which the next demo may remove
NUM_IMAGES = 5  # test images that are written and predicted
PROMPT, NUM_BYTES = "def main(", 118  # of each sample


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


def train(out: Path, models: Mapping[str, str], spec: str, *words: str) -> None:
    """Train every model, with its attention in place of "{}" in `spec`, in an empty folder."""
    for name in models:
        make_folder(out / name)
    for name, attention in models.items():
        print(f"\ntraining {name}")
        run("dcvit.train", "--config", spec.format(attention), "--workdir", out / name, *words)


def report(out: Path, title: str, rows: Sequence[Mapping[str, object]], workdirs: Sequence[Path]) -> None:
    """Print and write the table of results, and plot the curves."""
    from dcvit import cli

    print()
    machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"
    cli.show([dict(row) for row in rows], "table", title=f"{title}; {machine}")
    (out / "table.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    run("dcvit.plot", *workdirs, "--out", out / "curves.png")


def step_times(workdir: Path) -> float:
    """Return the median time of a step of a run in milliseconds."""
    from dcvit.runs import metrics

    return 1e3 * statistics.median(row["step_seconds"] for row in metrics.read(workdir / "timing.jsonl"))


def image_row(name: str, workdir: Path) -> dict[str, object]:
    """Return the row of the table for a model of images, from the files of its run."""
    from dcvit.runs import metrics

    rows = metrics.read(workdir / "metrics.jsonl")
    return {
        "model": name,
        "top-1": f"{rows[-1]['test/top1']:.2%}",
        "top-5": f"{rows[-1]['test/top5']:.2%}",
        "loss": f"{rows[-1]['test/loss']:.4f}",
        "parameters": f"{rows[0]['num_params']:,}",
        "step time": f"{step_times(workdir):.1f} ms",
    }


def language_row(name: str, workdirs: Sequence[Path]) -> dict[str, object]:
    """Return the row of the table for a language model, from the files of its runs."""
    from dcvit.runs import metrics

    rows = [metrics.read(workdir / "metrics.jsonl") for workdir in workdirs]
    return {
        "model": name,
        "parameters": f"{rows[0][0]['num_params']:,}",
        "bits per byte": spread([run[-1]["validation/bits_per_byte"] for run in rows], ".3f"),
        "step time (ms)": spread([step_times(workdir) for workdir in workdirs], ".0f"),
    }


def spread(values: Sequence[float], form: str) -> str:
    """Format one value, or the mean, minimum and maximum of several values."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}}–{max(values):{form}})"


def write_images(folder: Path) -> None:
    """Write the first test images as PNG files whose names contain the labels."""
    from PIL import Image

    import input_pipeline

    source = input_pipeline.open_source("digits", split="test")
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(NUM_IMAGES):
        example = source[i]
        Image.fromarray(example["image"][..., 0]).save(folder / f"test{i}_is_{example['label']}.png")


def images(out: Path, epochs: int) -> None:
    """Train the models of images, and predict a few test images."""
    train(out, IMAGE_MODELS, f"configs/vit_digits.py:attention={{}},epochs={epochs}")
    workdirs = [out / name for name in IMAGE_MODELS]
    report(out, f"{epochs} epochs, 360 test images", [image_row(path.name, path) for path in workdirs], workdirs)
    write_images(out / "images")
    print("\npredictions of DCViT for test images")
    run("dcvit.predict", "--workdir", out / "DCViT", out / "images", "--topk", 3)
    print(f"\nall results are in {out.resolve()}:")
    print("  DCViT/ ViT/     config.json, metrics.jsonl, timing.jsonl, checkpoints/")
    print("  curves.png      training loss and test accuracy; table.json, the table above")
    print(f"  images/         {NUM_IMAGES} test images; predict your own with")
    print(f"                  python -m dcvit.predict --workdir {out / 'DCViT'} IMAGE …")


def text(out: Path, steps: int, seeds: str) -> None:
    """Train the language models with every seed, and generate text with those of the first seed."""
    train(out, LANGUAGE_MODELS, f"configs/lm_stdlib.py:attention={{}},steps={steps}", "--seeds", seeds)
    workdirs = {name: sorted((out / name).glob("seed*/")) for name in LANGUAGE_MODELS}
    rows = [language_row(name, each) for name, each in workdirs.items()]
    report(out, f"{steps} steps of 16×128 bytes", rows, [each[0] for each in workdirs.values()])
    for name, each in workdirs.items():
        print(f"\ntext generated by {name}:")
        run("dcvit.generate", "--workdir", each[0], "--prompt", PROMPT, "--tokens", NUM_BYTES,
            "--temperature", 0.7, "--top_p", 0.95)  # fmt: skip
    print(f"\nall results are in {out.resolve()}:")
    print("  MODEL/seedN/    config.json, metrics.jsonl, timing.jsonl, checkpoints/")
    print("  curves.png      training loss and validation bits per byte; table.json, the table above")
    print(f"generate more with   python -m dcvit.generate --workdir {workdirs['DCFormer++'][0]} --prompt TEXT")


def main() -> None:
    words = sys.argv[1:]
    is_text = words[:1] == ["lm"]
    parser = argparse.ArgumentParser(prog="demo.sh lm" if is_text else "demo.sh", description=__doc__)
    default = ROOT / ("runs/demo_lm" if is_text else "runs/demo")
    parser.add_argument("--out", type=Path, default=default, help="folder for all results")
    if is_text:
        parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
        parser.add_argument("--seeds", default="1", help="seeds, such as 0,1,2, or their number (default 1)")
    else:
        parser.add_argument("--epochs", type=int, default=120, help="passes over the training images (default 120)")
    args = parser.parse_args(words[is_text:])
    started = time.monotonic()
    out = Path(os.path.relpath(args.out.resolve(), ROOT))  # the commands run in the clone
    os.chdir(ROOT)
    if is_text:
        text(out, args.steps, args.seeds)
    else:
        images(out, args.epochs)
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
