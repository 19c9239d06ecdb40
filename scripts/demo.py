"""Demos of scripts/demo.sh: composed and plain models with tables, plots, and predictions or generated text."""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASK_MODELS = {"DCFormer": "dcmha_post", "Transformer": "mha"}  # what docs/heads.md recommends for these tasks
IMAGE_MODELS = {"DCViT": "dcmha", "ViT": "mha"}
TEXT_MODELS = {"DCFormer++": "dcmha", "Transformer++": "mha"}
EQUAL_TIME = "Transformer++, equal time"
MARK = ".demo"  # file that marks the workdirs of a demo, which the next demo may remove
NUM_IMAGES = 5  # test images that are written and predicted
SENTENCE = "wolf . wolf . cello . odd the"  # of the explorer page
PROMPT, NUM_BYTES = "def main(", 118  # of each sample of text


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
    run("dcvit.compare", *workdirs, "--out", out / "curves.png")


def step_times(workdir: Path) -> float:
    """Return the median time of a step of a run in milliseconds."""
    from dcvit.runs import metrics

    return 1e3 * statistics.median(row["step_seconds"] for row in metrics.read(workdir / "timing.jsonl"))


def rows_of(out: Path, models: Iterable[str], metric: str, unit: str, form: str) -> list[dict[str, object]]:
    """Return the rows of the table for some models, from the files of their runs with all seeds.

    Args:
      out: the folder of all results.
      models: the names of the models, which are also their folders.
      metric: the metric whose final value is shown, as a percentage if the unit is one, in the format `form`.
      unit: the unit of the metric.
    """
    from dcvit.runs import metrics

    rows: list[dict[str, object]] = []
    for name in models:
        found = [metrics.read(workdir / "metrics.jsonl") for workdir in seeds_of(out, name)]
        scale = 100 if unit.startswith("%") else 1
        rows.append({
            "model": name,
            "result": f"{spread([scale * run[-1][metric] for run in found], form)} {unit}",
            "parameters": f"{found[0][0]['num_params']:,}",
            "step time (ms)": spread([step_times(workdir) for workdir in seeds_of(out, name)], ".1f"),
        })  # fmt: skip
    return rows


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


def seeds_of(out: Path, model: str) -> list[Path]:
    """Return the workdirs of all seeds of a model."""
    return sorted((out / model).glob("seed*/"))


def tasks_and_images(out: Path, steps: int, epochs: int, seeds: str) -> None:
    """Train the models of tasks with every seed and those of images with one, explain one and predict with another."""
    train(out, TASK_MODELS, f"configs/lm_synthetic.py:attention={{}},steps={steps}", "--seeds", seeds)
    train(out, IMAGE_MODELS, f"configs/vit_digits.py:attention={{}},epochs={epochs}", "--seeds", "1")
    rows = rows_of(out, TASK_MODELS, "validation/accuracy", "% of answers", ".1f")
    rows += rows_of(out, IMAGE_MODELS, "test/top1", "% top-1", ".2f")
    title = f"in-context tasks, {steps} steps, 2,320 new questions; digits, {epochs} epochs, 360 test images"
    report(out, title, rows, [workdir for name in TASK_MODELS for workdir in seeds_of(out, name)])
    run("dcvit.explore", "--workdir", seeds_of(out, "DCFormer")[0], "--prompt", SENTENCE, "--out", out / "explore.html")
    write_images(out / "images")
    print("\npredictions of DCViT for test images")
    run("dcvit.predict", "--workdir", out / "DCViT/seed0", out / "images", "--topk", 3)
    print(f"\nall results are in {out.resolve()}:")
    print("  MODEL/seedN/    config.json, metrics.jsonl, timing.jsonl, checkpoints/")
    print("  curves.png      training and validation loss on the tasks; table.json, the table above")
    print("  explore.html    how the heads of DCFormer compose: open it in a browser")
    print(f"  images/         {NUM_IMAGES} test images; predict your own with")
    print(f"                  python -m dcvit.predict --workdir {out / 'DCViT' / 'seed0'} IMAGE …")


def text(out: Path, steps: int, seeds: str) -> None:
    """Train the language models with every seed, and generate text with those of the first seed.

    The plain model is trained again for as many steps as take the time of the composed one.
    """
    spec = "configs/lm_stdlib.py:attention={},steps="
    train(out, TEXT_MODELS, f"{spec}{steps}", "--seeds", seeds)
    composed, plain = (statistics.mean(map(step_times, seeds_of(out, name))) for name in TEXT_MODELS)
    longer = round(steps * composed / plain)
    train(out, {EQUAL_TIME: "mha"}, f"{spec}{longer}", "--seeds", seeds)
    workdirs = {name: seeds_of(out, name)[0] for name in TEXT_MODELS}
    rows = rows_of(out, [*TEXT_MODELS, EQUAL_TIME], "validation/bits_per_byte", "bits per byte", ".3f")
    report(out, f"{steps} steps of 16×128 bytes, for equal time {longer}", rows, [*workdirs.values()])
    for name, workdir in workdirs.items():
        print(f"\ntext generated by {name}:")
        run("dcvit.generate", "--workdir", workdir, "--prompt", PROMPT, "--tokens", NUM_BYTES,
            "--temperature", 0.7, "--top_p", 0.95)  # fmt: skip
    print(f"\nall results are in {out.resolve()}:")
    print("  MODEL/seedN/    config.json, metrics.jsonl, timing.jsonl, checkpoints/")
    print("  curves.png      training loss and validation bits per byte; table.json, the table above")
    print(f"generate more with   python -m dcvit.generate --workdir {workdirs['DCFormer++']} --prompt TEXT")


def main() -> None:
    words = sys.argv[1:]
    is_text = words[:1] == ["lm"]
    parser = argparse.ArgumentParser(prog="demo.sh lm" if is_text else "demo.sh", description=__doc__)
    default = ROOT / ("runs/demo_lm" if is_text else "runs/demo")
    parser.add_argument("--out", type=Path, default=default, help="folder for all results")
    steps = 600 if is_text else 2000
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of the language models (default {steps})")
    parser.add_argument("--seeds", default="1", help="seeds, such as 0,1,2, or their number (default 1)")
    if not is_text:
        parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default 20)")
    args = parser.parse_args(words[is_text:])
    started = time.monotonic()
    out = Path(os.path.relpath(args.out.resolve(), ROOT))  # the commands run in the clone
    os.chdir(ROOT)
    if is_text:
        text(out, args.steps, args.seeds)
    else:
        tasks_and_images(out, args.steps, args.epochs, args.seeds)
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
