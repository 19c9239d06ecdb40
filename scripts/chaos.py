"""Interrupts a training run at random moments and compares its result with an uninterrupted run.

    python scripts/chaos.py --model vit --kills 50 --terms 20 --seed 0
    python scripts/chaos.py --model lm --kills 50 --terms 20 --seed 0

Each start of the run receives one SIGKILL or SIGTERM at a random moment of the start, of the compilation, of a step, of
a save or of an evaluation. After all requested signals, the run is started once more and completes. Its last checkpoint
and its metrics.jsonl must be bitwise identical to those of the uninterrupted run. A SIGTERM must lose no step. A
SIGKILL may lose the steps since the latest complete checkpoint: at most the interval, plus those that ran during the
next save. Prints a row of a Markdown table. The exit status is 1 if anything differs.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from dcvit.parallel import runtime

INTERVAL, EVAL = 10, 7  # steps between checkpoints and between evaluations
AIMS = ("starting", "compiling", "a step", "saving", "evaluating")
SAVED = 75  # exit status of a run that SIGTERM stopped
CONFIGS = {
    "vit": ("vit_digits", {"evals.test.log_steps": EVAL, "ema_decay": 0.99, "mixup": 0.2}),
    "lm": (
        "lm_stdlib",
        {"evals.validation.log_steps": EVAL, "evals.validation.data.limit": 32, "input.batch_size": 2},
    ),
}
TIMEOUT = 900  # seconds after which a process that makes no progress is an error


def command(model: str, workdir: Path, steps: int) -> list[str]:
    config, options = CONFIGS[model]
    options = {"total_steps": steps, "ckpt_steps": INTERVAL, "log_steps": 1, "tensorboard": False, **options}
    words = [f"--config.{key}={value}" for key, value in options.items() if key != "ckpt_percent"]
    return [sys.executable, "-u", "-m", "dcvit.train", "--config", config, "--workdir", str(workdir), *words]


class Attempt:
    """One start of the run, until it ends or is interrupted."""

    def __init__(self, model: str, workdir: Path, steps: int, *, cache: bool = True):
        self.workdir, self.log = workdir, workdir.with_name(f"{workdir.name}.log")
        environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": str(cache).lower()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command(model, workdir, steps), stdout=log, stderr=log, env=environment)
        self.started = time.monotonic()

    def until(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait for a condition. Return False if the process ended first."""
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() - self.started > TIMEOUT:
                self.process.kill()
                raise SystemExit(f"chaos: not {what} after {TIMEOUT} s:\n{self.log.read_text()}")
            time.sleep(0.001)
        return True

    def row(self) -> int:
        """Return the step of the last row of metrics."""
        path = self.workdir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def saving(self) -> bool:
        folder = self.workdir / "checkpoints"
        return folder.is_dir() and any("orbax-checkpoint-tmp" in path.name for path in folder.iterdir())

    def aim(self, at: str, target: int, draw: random.Random) -> bool:
        """Wait for a random moment of a kind of `AIMS`. Return False if the run ended first."""
        if at == "starting":
            time.sleep(draw.uniform(0, 5))
            return self.process.poll() is None
        if not self.until(lambda: self.says("compiling the training step"), "compiling"):
            return False
        if at == "compiling":
            time.sleep(draw.uniform(0, 3))
            return self.process.poll() is None
        if at == "evaluating":
            target = -(-target // EVAL) * EVAL - 1
        if not self.until(lambda: self.row() >= target, f"at step {target}"):
            return False
        if at == "saving" and not self.until(self.saving, "saving"):
            return False
        time.sleep(draw.uniform(0, 0.15 if at == "saving" else 0.05))
        return self.process.poll() is None

    def end(self, sent: signal.Signals | None = None) -> int:
        """Send a signal if one is given, wait for the process, and return its exit status."""
        if sent:
            self.process.send_signal(sent)
        try:
            return self.process.wait(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(
                f"chaos: the process still runs {TIMEOUT} s after {sent}:\n{self.log.read_text()}"
            ) from None

    def saved(self) -> int:
        """Return the step that was saved after SIGTERM, or 0."""
        found = re.search(r"stopped by SIGTERM: step (\d+) is saved", self.log.read_text())
        return int(found[1]) if found else 0

    def resumed(self) -> int:
        """Return the step from which the run resumed, or 0."""
        found = re.search(r"resuming from the checkpoint of step (\d+)", self.log.read_text())
        return int(found[1]) if found else 0


def interrupt(model: str, workdir: Path, kills: int, terms: int, steps: int, draw: random.Random) -> dict:
    """Run until completion with all interruptions. Return the signals, the lost steps and the errors."""
    sent = [signal.SIGKILL] * kills + [signal.SIGTERM] * terms
    draw.shuffle(sent)
    aims = Counter()
    lost: dict[signal.Signals, list[int]] = {signal.SIGKILL: [], signal.SIGTERM: []}
    wrong, pending = [], None  # the last signal, and the last step before it
    for i, number in enumerate(sent):
        at = AIMS[i % len(AIMS)]
        attempt = Attempt(model, workdir, steps, cache=at != "compiling")
        target = (i + 1) * (steps - 2 * INTERVAL) // len(sent)
        if not attempt.aim(at, target, draw):
            raise SystemExit(f"chaos: the run ended before signal {i + 1}:\n{attempt.log.read_text()}")
        status = attempt.end(number)
        pending = account(attempt, pending, lost)
        aims[f"{number.name} {at}"] += 1
        early = at == "starting" and status == -signal.SIGTERM  # before Python has installed the handler
        if number == signal.SIGTERM and status != SAVED and not early:
            wrong.append(f"SIGTERM while {at} ended with status {status}:\n{attempt.log.read_text()}")
        if pending is None:
            pending = number, max(attempt.row(), attempt.saved())
        print(f"{i + 1}/{len(sent)} {number.name} {at}: status {status}, step {attempt.row()}", file=sys.stderr)
    attempt = Attempt(model, workdir, steps)
    if status := attempt.end():
        wrong.append(f"the last attempt ended with status {status}:\n{attempt.log.read_text()}")
    account(attempt, pending, lost)
    return {"aims": aims, "lost": lost, "wrong": wrong}


def account(
    attempt: Attempt, pending: tuple[signal.Signals, int] | None, lost: dict[signal.Signals, list[int]]
) -> tuple[signal.Signals, int] | None:
    """Record the steps that the last signal lost, if this attempt has resumed; otherwise return the signal again."""
    if pending is None or not (attempt.says("resuming from") or attempt.says("compiling the training step")):
        return pending
    number, row = pending
    lost[number].append(max(0, row - attempt.resumed()))
    return None


def differences(one: Path, other: Path, steps: int) -> list[str]:
    """List the files, arrays and fields that differ at the end of two runs."""
    found = []
    if (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl")
    states = [one / "checkpoints" / str(steps), other / "checkpoints" / str(steps)]
    for item in sorted(p.name for p in states[0].iterdir() if p.is_dir() and p.name != "about"):
        trees = [ocp.StandardCheckpointer().restore((state / item).absolute()) for state in states]
        leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in trees]
        for (path, a), (_, b) in zip(*leaves, strict=True):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                found.append(f"{item}{jax.tree_util.keystr(path)}")
    abouts = [json.loads((state / "about" / "metadata").read_text()) for state in states]
    found += [key for key in abouts[0] if key != "seconds" and abouts[0][key] != abouts[1][key]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="vit")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for both runs (default: a temporary folder)")
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    draw, steps = random.Random(args.seed), 8 * (args.kills + args.terms) + 2 * INTERVAL
    out = args.out or Path(tempfile.mkdtemp(prefix="dcvit-chaos-"))
    out.mkdir(parents=True, exist_ok=True)
    uninterrupted, interrupted = out / "uninterrupted", out / "interrupted"
    if uninterrupted.exists() or interrupted.exists():
        raise SystemExit(f"chaos: {out} already contains runs")
    started = time.monotonic()
    attempt = Attempt(args.model, uninterrupted, steps)
    if attempt.end():
        raise SystemExit(f"chaos: the uninterrupted run failed:\n{attempt.log.read_text()}")
    report = interrupt(args.model, interrupted, args.kills, args.terms, steps, draw)
    found = differences(uninterrupted, interrupted, steps)
    lost = {name.name: values for name, values in report["lost"].items()}
    worst = {name: max(values, default=0) for name, values in lost.items()}
    if worst["SIGTERM"]:
        report["wrong"].append(f"SIGTERM lost {worst['SIGTERM']} steps")
    if worst["SIGKILL"] >= 2 * INTERVAL:  # a save waits for the previous one to end
        report["wrong"].append(f"SIGKILL lost {worst['SIGKILL']} steps")
    beyond = sum(value > INTERVAL for value in lost["SIGKILL"])
    print(json.dumps({"signals": report["aims"], "lost": lost}), file=sys.stderr)
    print(
        "| model | SIGKILL | SIGTERM | steps | SIGKILL lost (maximum, interval) | SIGTERM lost | differences | time |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {args.model} | {args.kills} | {args.terms} | {steps} | {worst['SIGKILL']}, {INTERVAL} "
        f"({beyond} during a save more than {INTERVAL}) | {worst['SIGTERM']} | {', '.join(found) or 'none'} | "
        f"{time.monotonic() - started:.0f} s |"
    )
    for line in report["wrong"]:
        print(f"wrong: {line}")
    if not args.out:
        shutil.rmtree(out)
    return 1 if found or report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
