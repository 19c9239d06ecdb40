"""Interrupts a training run at random moments and compares its result with an uninterrupted run.

    python tests/robustness/chaos.py --model vit --kills 50 --terms 20 --seed 0
    python tests/robustness/chaos.py --model lm --kills 50 --terms 20 --seed 0
    python tests/robustness/chaos.py --model vit --processes 2 --kills 20 --terms 10 --seed 0

Each start of the run receives one SIGKILL, SIGTERM or SIGINT at a random moment of the start, of the compilation, of a
step, of a save or of an evaluation. Every third start is paused for a second before (SIGSTOP, SIGCONT); every third one
loses the reader of its stdout, and must do two more steps. In a run of two processes a random one of them receives the
signal, and both must end. After all signals, the run is started once more and completes. Its last checkpoint and its
metrics.jsonl must be bitwise identical to those of the uninterrupted run. SIGTERM and SIGINT must lose no step. SIGKILL
may lose the steps since the latest complete checkpoint: at most the interval, plus those that ran during the next save.
Prints a row of a Markdown table. The exit status is 1 if anything differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
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
from dcvit.runs.steps import saved_steps

INTERVAL, EVAL = 10, 7  # steps between checkpoints and between evaluations
AIMS = ("starting", "compiling", "a step", "saving", "evaluating")
BEFORE = ("", "paused ", "closed stdout ")  # what happens to a start before its signal
STATUSES = {signal.SIGKILL: {-signal.SIGKILL}, signal.SIGTERM: {75}, signal.SIGINT: {130}}
CONFIGS = {
    "vit": ("vit_digits", {"evals.test.log_steps": EVAL, "ema_decay": 0.99, "mixup": 0.2}),
    "lm": (
        "lm_stdlib",
        {"evals.validation.log_steps": EVAL, "evals.validation.data.limit": 32, "input.batch_size": 2},
    ),
}
TIMEOUT = 900  # seconds after which a process that makes no progress is an error
END_SECONDS = 60  # in which a process must have ended after another one was killed


def command(model: str, workdir: Path, steps: int) -> list[str]:
    config, options = CONFIGS[model]
    options = {"total_steps": steps, "ckpt_steps": INTERVAL, "log_steps": 1, "tensorboard": False, **options}
    words = [f"--config.{key}={value}" for key, value in options.items()]
    return [sys.executable, "-u", "-m", "dcvit.train", "--config", config, "--workdir", str(workdir), *words]


def several(count: int) -> list[list[str]]:
    """Return the options of each process of a run on this machine."""
    if count == 1:
        return [[]]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [["--coordinator", address, "--num_processes", str(count), "--process_id", str(i)] for i in range(count)]


class Attempt:
    """One start of the run, until it ends or is interrupted."""

    def __init__(self, model: str, workdir: Path, steps: int, processes: int, *, cache: bool = True):
        self.workdir, self.log = workdir, workdir.with_name(f"{workdir.name}.log")
        environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": str(cache).lower()}
        if processes > 1:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        self.log.write_bytes(b"")
        self.rows_before = self.rows()
        with self.log.open("ab") as log:
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
            self.processes = [
                subprocess.Popen(
                    [*command(model, workdir, steps), *words], stdout=self.reader.stdin, stderr=log, env=environment
                )
                for words in several(processes)
            ]
        self.reader.stdin.close()  # the pipe remains open in the processes
        self.started = time.monotonic()

    def runs(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def until(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait for a condition. Return False if a process ended first."""
        while not condition():
            if not self.runs():
                return False
            if time.monotonic() - self.started > TIMEOUT:
                self.kill()
                raise SystemExit(f"chaos: not {what} after {TIMEOUT} s:\n{self.log.read_text()}")
            time.sleep(0.001)
        return True

    def rows(self) -> list[bytes]:
        path = self.workdir / "metrics.jsonl"
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    def row(self) -> int:
        """Return the step of the last row of metrics."""
        lines = self.rows()
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
            return self.runs()
        if not self.until(lambda: self.says("compiling the training step"), "compiling"):
            return False
        if at == "compiling":
            time.sleep(draw.uniform(0, 3))
            return self.runs()
        if at == "evaluating":
            target = -(-target // EVAL) * EVAL - 1
        if not self.until(lambda: self.row() >= target, f"at step {target}"):
            return False
        if at == "saving" and not self.until(self.saving, "saving"):
            return False
        time.sleep(draw.uniform(0, 0.15 if at == "saving" else 0.05))
        return self.runs()

    def disturb(self, how: str, process: subprocess.Popen) -> bool:
        """Do one of `BEFORE`. Return False if the run ended because of it."""
        if how == "paused ":
            process.send_signal(signal.SIGSTOP)
            time.sleep(1)
            process.send_signal(signal.SIGCONT)
        elif how == "closed stdout ":
            self.reader.kill()
            step = max(self.row(), max(saved_steps(self.workdir), default=0))
            return self.until(lambda: self.row() >= step + 2, "continuing without a reader")
        return self.runs()

    def interrupt(self, number: signal.Signals, process: subprocess.Popen) -> list[int]:
        """Send a signal to a process, or to all if they are not connected yet, and return all exit statuses."""
        connected = self.says("dcvit train: ") or self.reader.poll() is not None
        for receiver in [process] if connected else self.processes:
            receiver.send_signal(number)
        return self.end(END_SECONDS if number == signal.SIGKILL else TIMEOUT)

    def end(self, seconds: float = TIMEOUT) -> list[int]:
        """Wait for all processes and return their exit statuses; a process that has to be killed has status 0."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        statuses = [process.poll() or 0 for process in self.processes]
        self.kill()
        return statuses

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.reader.wait()

    def lost(self) -> int:
        """Return the number of steps done by the run, of which the interrupted attempt did some, but not saved."""
        done = 0 if self.rows() == self.rows_before else self.row()
        return max(0, done - max(saved_steps(self.workdir), default=0))


def interrupt(args: argparse.Namespace, workdir: Path, steps: int, draw: random.Random) -> dict:
    """Run until completion with all interruptions. Return the signals, the lost steps and the errors."""
    sent = [signal.SIGKILL] * args.kills + [signal.SIGTERM] * args.terms + [signal.SIGINT] * args.interrupts
    draw.shuffle(sent)
    events, wrong = Counter(), []
    lost: dict[signal.Signals, list[int]] = {number: [] for number in STATUSES}
    for i, number in enumerate(sent):
        at, before = AIMS[i % len(AIMS)], BEFORE[i % len(BEFORE)]
        attempt = Attempt(args.model, workdir, steps, args.processes, cache=at != "compiling")
        receiver = draw.randrange(args.processes)
        target = (i + 1) * (steps - 2 * INTERVAL) // len(sent)
        if not (attempt.aim(at, target, draw) and attempt.disturb(before, attempt.processes[receiver])):
            attempt.kill()
            wrong.append(f"the run ended before {number.name} to {before}{at}:\n{attempt.log.read_text()}")
            break
        begun = time.monotonic()
        statuses = attempt.interrupt(number, attempt.processes[receiver])
        valid = STATUSES[number] | ({-number} if at == "starting" else set())  # before Python has its handler
        if statuses[receiver] not in valid or 0 in statuses:
            wrong.append(f"{number.name} to {before}{at} gave the statuses {statuses}:\n{attempt.log.read_text()}")
        events[f"{number.name} {before}{at}"] += 1
        lost[number].append(attempt.lost())
        print(
            f"{i + 1}/{len(sent)} {number.name} to process {receiver}, {before}{at}: statuses {statuses} after "
            f"{time.monotonic() - begun:.0f} s, step {attempt.row()}, {attempt.lost()} steps lost", file=sys.stderr,
        )  # fmt: skip
    attempt = Attempt(args.model, workdir, steps, args.processes)
    if any(statuses := attempt.end()):
        wrong.append(f"the last attempt ended with the statuses {statuses}:\n{attempt.log.read_text()}")
    return {"events": events, "lost": lost, "wrong": wrong}


def arrays(item: Path) -> object:
    """Load an item of a checkpoint that any number of processes saved as a tree of NumPy arrays."""
    handler = ocp.PyTreeCheckpointHandler()
    types = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(item).tree)
    return handler.restore(item, args=ocp.args.PyTreeRestore(restore_args=types))


def differences(one: Path, other: Path, steps: int) -> list[str]:
    """List the files, arrays and fields that differ at the end of two runs."""
    found = []
    if (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl")
    states = [one / "checkpoints" / str(steps), other / "checkpoints" / str(steps)]
    for item in sorted(p.name for p in states[0].iterdir() if p.is_dir() and p.name != "about"):
        trees = [arrays((state / item).absolute()) for state in states]
        leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in trees]
        for (path, a), (_, b) in zip(*leaves, strict=True):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                found.append(f"{item}{jax.tree_util.keystr(path)}")
    abouts = [json.loads((state / "about" / "metadata").read_text()) for state in states]
    found += [key for key in abouts[0] if key != "seconds" and abouts[0][key] != abouts[1][key]]
    return found


def row(args: argparse.Namespace, steps: int, lost: dict[str, list[int]], found: list[str], seconds: float) -> str:
    """Return a Markdown table of one row."""
    beyond = sum(value > INTERVAL for value in lost["SIGKILL"])
    worst = {name: max(values, default=0) for name, values in lost.items()}
    cells = {
        "model": args.model if args.processes == 1 else f"{args.model}, {args.processes} processes",
        **{name: len(values) for name, values in lost.items()}, "steps": steps,
        "SIGKILL lost (most, interval)": f"{worst['SIGKILL']}, {INTERVAL} ({beyond} more than {INTERVAL})",
        "SIGTERM, SIGINT lost": max(worst["SIGTERM"], worst["SIGINT"]), "differences": ", ".join(found) or "none",
        "time": f"{seconds:.0f} s",
    }  # fmt: skip
    lines = [cells, ["---"] * len(cells), cells.values()]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="vit")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--interrupts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for both runs (default: a temporary folder)")
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    steps = 8 * (args.kills + args.terms + args.interrupts) + 2 * INTERVAL
    out = args.out or Path(tempfile.mkdtemp(prefix="dcvit-chaos-"))
    out.mkdir(parents=True, exist_ok=True)
    uninterrupted, interrupted = out / "uninterrupted", out / "interrupted"
    if uninterrupted.exists() or interrupted.exists():
        raise SystemExit(f"chaos: {out} already contains runs")
    started = time.monotonic()
    attempt = Attempt(args.model, uninterrupted, steps, args.processes)
    if any(attempt.end()):
        raise SystemExit(f"chaos: the uninterrupted run failed:\n{attempt.log.read_text()}")
    report = interrupt(args, interrupted, steps, random.Random(args.seed))
    found = differences(uninterrupted, interrupted, steps)
    lost = {number.name: values for number, values in report["lost"].items()}
    for name, values in lost.items():
        most = 2 * INTERVAL - 1 if name == "SIGKILL" else 0  # a save waits for the previous one to end
        if max(values, default=0) > most:
            report["wrong"].append(f"{name} lost {max(values)} steps")
    print(json.dumps({"events": report["events"], "lost": lost}), file=sys.stderr)
    print(row(args, steps, lost, found, time.monotonic() - started))
    for line in report["wrong"]:
        print(f"wrong: {line}")
    if not args.out:
        shutil.rmtree(out)
    return 1 if found or report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
