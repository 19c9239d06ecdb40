"""Interrupts a training run at random moments and compares its result with an uninterrupted run.

    python tests/robustness/chaos.py --model vit --kills 50 --terms 20 --interrupts 10 --seed 0
    python tests/robustness/chaos.py --model parquet --kills 20 --terms 0 --interrupts 0
    python tests/robustness/chaos.py --model vit --processes 2 --kills 20 --terms 10 --interrupts 0 --seed 0

Each start of the run receives one SIGKILL, SIGTERM or SIGINT at a random moment of the start, of the compilation, of a
step, of a save or of an evaluation; in a run of two processes, a random one of them does, and both must end. Then the
run is started once more and completes. Its last checkpoint and its metrics.jsonl must be bitwise identical to those of
the uninterrupted run. SIGTERM and SIGINT must lose no step. SIGKILL may lose the steps since the latest complete
checkpoint: at most the interval, plus those that ran during the next save.
"""

import argparse
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from PIL import Image

from dcvit.runs.steps import saved_steps

INTERVAL, EVAL = 10, 7  # steps between checkpoints and between evaluations
# Kind of moment -> seconds within which the signal follows it.
MOMENTS = {"starting": 5.0, "compiling": 3.0, "a step": 0.05, "saving": 0.15, "evaluating": 0.05}
STATUSES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, signal.SIGINT: 130}
CONFIGS = {
    "vit": ("vit_digits", {"evals.test.log_steps": EVAL, "ema_decay": 0.99, "mixup": 0.2}),
    "lm": ("lm_stdlib", {"evals.validation.log_steps": EVAL, "input.batch_size": 2}),
    "parquet": (
        "vit_folder:data_dir={data},variant=mu/16,res=32,batch_size=16",
        {"evals.val.log_steps": EVAL, "num_classes": 4, "input.data.window": 100},
    ),
}
TIMEOUT = 900  # seconds after which a process that makes no progress is an error
END_SECONDS = 60  # in which a process must have ended after another one was killed


def cluster(count):
    """Return the options of each process of a run on this machine."""
    if count == 1:
        return [[]]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [["--coordinator", address, "--num_processes", str(count), "--process_id", str(i)] for i in range(count)]


def write_parquet(folder):
    """Write 600 images of 40×40 pixels in row groups of 50, and 100 images for evaluation, as Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    random = np.random.default_rng(0)
    for split, count in (("train", 600), ("val", 100)):
        images = []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (40, 40, 3), np.uint8)).save(file, "PNG")
            images.append({"bytes": file.getvalue()})
        table = pa.table({"image": images, "label": random.integers(0, 4, count)})
        pq.write_table(table, folder / f"{split}.parquet", row_group_size=50)


class Attempt:
    """One start of the run, until it ends or is interrupted."""

    def __init__(self, args, workdir, *, cache=True):
        self.workdir, self.log = workdir, workdir.with_name(f"{workdir.name}.log")
        self.rows_before = self.rows()
        config, options = CONFIGS[args.model]
        config = config.format(data=workdir.parent / "data")
        options = {"total_steps": args.steps, "ckpt_steps": INTERVAL, "log_steps": 1, "tensorboard": False, **options}
        words = [sys.executable, "-u", "-m", "dcvit.train", "--config", config, "--workdir", str(workdir)]
        words += [f"--config.{key}={value}" for key, value in options.items()]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": str(cache).lower()}
        if args.processes > 1:
            environment["JAX_NUM_CPU_DEVICES"] = "1"
        with self.log.open("wb") as log:
            streams = {"stdout": log, "stderr": log, "env": environment}
            self.processes = [subprocess.Popen([*words, *more], **streams) for more in cluster(args.processes)]
        self.started = time.monotonic()

    def runs(self):
        return all(process.poll() is None for process in self.processes)

    def until(self, condition):
        """Wait for a condition. Return False if a process ended first."""
        while not condition():
            if not self.runs():
                return False
            if time.monotonic() - self.started > TIMEOUT:
                self.end(0)
                raise SystemExit(f"chaos: no progress in {TIMEOUT} s:\n{self.log.read_text()}")
            time.sleep(0.001)
        return True

    def rows(self):
        path = self.workdir / "metrics.jsonl"
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    def step(self):
        """Return the step of the last row of metrics."""
        lines = self.rows()
        return json.loads(lines[-1])["step"] if lines else 0

    def logged(self, text):
        return text in self.log.read_text()

    def saves(self):
        return any("orbax-checkpoint-tmp" in path.name for path in self.workdir.glob("checkpoints/*"))

    def aim(self, moment, step, draw):
        """Wait for a random moment of a kind. Return False if the run ended first."""
        if moment == "evaluating":
            step = -(-step // EVAL) * EVAL - 1
        if moment != "starting" and not self.until(lambda: self.logged("compiling the training step")):
            return False
        if moment not in ("starting", "compiling") and not self.until(lambda: self.step() >= step):
            return False
        if moment == "saving" and not self.until(self.saves):
            return False
        time.sleep(draw.uniform(0, MOMENTS[moment]))
        return self.runs()

    def interrupt(self, number, process):
        """Send a signal to a process, or to all if they are not connected yet, and return all exit statuses."""
        for receiver in [process] if self.logged("dcvit train: ") else self.processes:
            receiver.send_signal(number)
        return self.end(END_SECONDS if number == signal.SIGKILL else TIMEOUT)

    def end(self, seconds=TIMEOUT):
        """Wait for all processes and return their exit statuses; a process that has to be killed has status 0."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        statuses = [process.poll() or 0 for process in self.processes]
        for process in self.processes:
            process.kill()
            process.wait()
        return statuses

    def lost(self):
        """Return the number of steps done by the run, of which the interrupted attempt did some, but not saved."""
        done = 0 if self.rows() == self.rows_before else self.step()
        return max(0, done - max(saved_steps(self.workdir), default=0))


def interrupted_run(args, workdir):
    """Run until completion with all interruptions. Return the most lost steps of each signal, and the errors."""
    draw = random.Random(args.seed)
    sent = [signal.SIGKILL] * args.kills + [signal.SIGTERM] * args.terms + [signal.SIGINT] * args.interrupts
    draw.shuffle(sent)
    lost, wrong = dict.fromkeys([number.name for number in STATUSES], 0), []
    for i, number in enumerate(sent):
        moment = list(MOMENTS)[i % len(MOMENTS)]
        what = f"{number.name} to {moment}"
        attempt = Attempt(args, workdir, cache=moment != "compiling")
        receiver = draw.randrange(args.processes)
        if not attempt.aim(moment, (i + 1) * (args.steps - 2 * INTERVAL) // len(sent), draw):
            attempt.end(0)
            return lost, [*wrong, f"the run ended before {what}:\n{attempt.log.read_text()}"]
        statuses = attempt.interrupt(number, attempt.processes[receiver])
        valid = {STATUSES[number], *([-number] if moment == "starting" else [])}  # before Python has its handler
        if statuses[receiver] not in valid or 0 in statuses:
            wrong.append(f"{what} gave the statuses {statuses}:\n{attempt.log.read_text()}")
        lost[number.name] = max(lost[number.name], attempt.lost())
        most = 2 * INTERVAL - 1 if number == signal.SIGKILL else 0  # a save waits for the previous one to end
        if attempt.lost() > most:
            wrong.append(f"{what} lost {attempt.lost()} steps")
        print(f"{i + 1}/{len(sent)} {what}: step {attempt.step()}, {attempt.lost()} lost", file=sys.stderr)
    attempt = Attempt(args, workdir)
    if any(statuses := attempt.end()):
        wrong.append(f"the last attempt ended with the statuses {statuses}:\n{attempt.log.read_text()}")
    return lost, wrong


def arrays(item):
    """Load an item of a checkpoint that any number of processes saved as a tree of NumPy arrays."""
    handler = ocp.PyTreeCheckpointHandler()
    types = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(item).tree)
    return handler.restore(item, args=ocp.args.PyTreeRestore(restore_args=types))


def differences(one, other, step):
    """List the files, arrays and fields that differ at the end of two runs."""
    found = []
    if (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl")
    states = [(run / "checkpoints" / str(step)).absolute() for run in (one, other)]
    for item in sorted(p.name for p in states[0].iterdir() if p.is_dir() and p.name != "about"):
        leaves = [jax.tree_util.tree_leaves_with_path(arrays(state / item)) for state in states]
        for (path, a), (_, b) in zip(*leaves, strict=True):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                found.append(f"{item}{jax.tree_util.keystr(path)}")
    abouts = [json.loads((state / "about" / "metadata").read_text()) for state in states]
    return found + [key for key in abouts[0] if key != "seconds" and abouts[0][key] != abouts[1][key]]


def compare(model="vit", processes=1, kills=50, terms=20, interrupts=10, seed=0):
    """Run without and with interruptions; return the most steps that each signal lost, and what is wrong."""
    args = argparse.Namespace(model=model, processes=processes, kills=kills, terms=terms, interrupts=interrupts)
    args.seed, args.steps = seed, 8 * (kills + terms + interrupts) + 2 * INTERVAL
    with tempfile.TemporaryDirectory(prefix="dcvit-chaos-") as folder:
        if model == "parquet":
            write_parquet(Path(folder, "data"))
        uninterrupted, interrupted = Path(folder, "uninterrupted"), Path(folder, "interrupted")
        attempt = Attempt(args, uninterrupted)
        if any(attempt.end()):
            raise SystemExit(f"chaos: the uninterrupted run failed:\n{attempt.log.read_text()}")
        lost, wrong = interrupted_run(args, interrupted)
        return lost, wrong or [f"{name} differs" for name in differences(uninterrupted, interrupted, args.steps)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="vit")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    for name, count in {"kills": 50, "terms": 20, "interrupts": 10, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    lost, wrong = compare(**vars(parser.parse_args()))
    print(json.dumps(lost), *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
