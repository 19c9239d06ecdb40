"""The demo behind `scripts/demo.sh lm`: two runs of configs/lm_stdlib.py, a table, a picture, a few generated lines."""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from demo import ROOT, make_folder, run

RUNS = {"DCFormer++": "dcmha", "Transformer++": "mha"}
PROMPT = "def main("
GENERATED = 118  # bytes of each sample


def seeds(text: str) -> list[int]:
    """ "0,1,2" as numbers."""
    return [int(word) for word in text.split(",")]


def spread(values: list[float], form: str) -> str:
    """One value, or the mean of several with the least and the greatest."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}}–{max(values):{form}})"


def result(name: str, workdirs: list[Path]) -> dict[str, str]:
    """A model's row of the table, from what its runs wrote."""
    from dcvit.runs import metrics

    rows = [metrics.read(workdir / "metrics.jsonl") for workdir in workdirs]
    timings = [metrics.read(workdir / "timing.jsonl") for workdir in workdirs]
    steps = [1e3 * statistics.median(row["step_seconds"] for row in timing) for timing in timings]
    return {
        "model": name,
        "parameters": f"{rows[0][0]['num_params']:,}",
        "bits per byte": spread([run[-1]["validation/bits_per_byte"] for run in rows], ".3f"),
        "step time (ms)": spread(steps, ".0f"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo.sh lm", description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--seeds", type=seeds, default=[0], help="runs of each model, e.g. 0,1,2 (default 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/demo_lm", help="where everything goes")
    args = parser.parse_args()
    started = time.monotonic()
    out = Path(os.path.relpath(args.out.resolve(), ROOT))  # the commands run in the clone
    os.chdir(ROOT)
    workdirs = {name: [out / f"{name}-seed{seed}" for seed in args.seeds] for name in RUNS}
    for workdir in [workdir for each in workdirs.values() for workdir in each]:
        make_folder(workdir)
    for i, seed in enumerate(args.seeds):
        for name, attention in RUNS.items():
            print(f"\ntraining {name}, seed {seed}")
            config = f"configs/lm_stdlib.py:attention={attention},steps={args.steps}"
            run("dcvit.train", "--config", config, "--workdir", workdirs[name][i], f"--config.seed={seed}")

    from dcvit import cli

    print()
    title = f"{args.steps} steps of 16×128 bytes; {os.cpu_count()} CPU cores, Python {platform.python_version()}"
    rows = [result(name, workdirs[name]) for name in RUNS]
    cli.show(rows, "table", title=title)
    (out / "table.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    run("dcvit.plot", *(each[0] for each in workdirs.values()), "--out", out / "curves.png")
    for name in RUNS:
        print(f"\n{name} writes:")
        run("dcvit.generate", "--workdir", workdirs[name][0], "--prompt", PROMPT, "--tokens", GENERATED,
            "--temperature", 0.7, "--top_p", 0.95)  # fmt: skip
    print(f"\nall of it lies in {out.resolve()}:")
    print("  MODEL-seedN/    config.json, metrics.jsonl, timing.jsonl, checkpoints/")
    print("  curves.png      training loss and validation bits per byte; table.json, the table above")
    print(f"write more with   python -m dcvit.generate --workdir {workdirs['DCFormer++'][0]} --prompt TEXT")
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
