"""Benchmark of restarts: seconds from the restart of a killed run to its next completed step.

    python scripts/bench/restart.py [--config lm_stdlib] [--rounds 5] [--store s3://bucket/folder] [--docs docs]

A run is killed after its first checkpoint. Then the same command is started, and killed after one more step, with a
workdir on the disk or in a store, and with an empty compilation cache ("cold") or that of an earlier start ("warm").
These arms take turns in each round. The time includes the start of Python and JAX, the data, restoring, and compiling;
the seconds of restoring alone are measured, too.
Without --store, moto serves S3 on this machine, so that the result does not include a network.

`--docs FOLDER` writes restart.json to the folder, and the table into fault_tolerance.md there.
"""

import argparse
import collections
import contextlib
import itertools
import json
import logging
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import results

from dcvit.runs import files, steps

BEGIN, END = "<!-- written by scripts/bench/restart.py -->", "<!-- end -->"
SAVED = 3  # the step of the checkpoint
TIMEOUT = 1800  # seconds for a start
CACHES = ("cold", "warm")
OPTIONS = {
    "total_steps": 10**6, "total_epochs": None, "log_steps": 1, "ckpt_epochs": None, "ckpt_percent": None,
    "evals": "{}", "tensorboard": False,
}  # fmt: skip
TINY = {"model.width": 16, "model.depth": 1, "model.mlp_dim": 16, "input.batch_size": 2}
# Trains until it is killed, and prints the number of each step, and before them the seconds of restoring.
TRAIN = """
import json, sys, time
import dcvit, jax
from dcvit.runs import restoring

original = restoring.restore

def restore(*args):
    started = time.perf_counter()
    items = jax.block_until_ready(original(*args))
    print("restored", time.perf_counter() - started, flush=True)
    return items

restoring.restore = restore
config, workdir, options = sys.argv[1:]
dcvit.train(config, workdir, on_row=lambda step, row: print("completed", step, flush=True), **json.loads(options))
"""


def start(config: str, workdir: str, options: Mapping[str, object], cache: Path) -> subprocess.Popen[str]:
    """Start a run with a compilation cache; its stdout has a line for each step."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    words = [sys.executable, "-c", TRAIN, config, workdir, json.dumps({**OPTIONS, **options})]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for_step(run: subprocess.Popen[str], step: int) -> float:
    """Wait until a run has completed a step; return its seconds of restoring, NaN if it restored nothing.

    Exit with the run's last lines if it ends before, or takes too long.
    """
    last, restored = collections.deque[str](maxlen=20), math.nan
    timer = threading.Timer(TIMEOUT, run.kill)
    timer.start()
    for line in run.stdout:
        if line.startswith("restored "):
            restored = float(line.split()[1])
        if line.startswith("completed ") and int(line.split()[1]) >= step:
            timer.cancel()
            return restored
        last.append(line)
    timer.cancel()
    raise SystemExit(f"restart: the run ended with status {run.wait()}:\n{''.join(last)}")


def kill(run: subprocess.Popen[str]) -> None:
    """Kill a run and wait for its end."""
    run.kill()
    run.communicate()


def prepare(config: str, workdir: str, options: Mapping[str, object], cache: Path) -> None:
    """Train until the checkpoint of step `SAVED` is complete, kill the run, and fill the cache by one more start."""
    run = start(config, workdir, {**options, "ckpt_steps": SAVED}, cache)
    wait_for_step(run, SAVED)
    deadline = time.monotonic() + TIMEOUT
    while SAVED not in steps.saved_steps(files.folder(workdir)):
        if time.monotonic() > deadline:
            raise SystemExit(f"restart: no checkpoint in {workdir}")
        time.sleep(0.05)
    kill(run)
    restart(config, workdir, options, cache)


def restart(config: str, workdir: str, options: Mapping[str, object], cache: Path) -> tuple[float, float]:
    """Return the seconds from the start of a killed run to its next completed step, and those of restoring; kill it."""
    started = time.perf_counter()
    run = start(config, workdir, {**options, "ckpt_steps": 10**6}, cache)
    restored = wait_for_step(run, SAVED + 1)
    seconds = time.perf_counter() - started
    kill(run)
    if math.isnan(restored):
        raise SystemExit(f"restart: the run in {workdir} did not resume")
    return seconds, restored


def measure(config: str, places: Mapping[str, str], rounds: int, options: Mapping[str, object]) -> dict[str, object]:
    """Return the seconds of each arm and round, and the settings.

    Args:
      config: the config of the run.
      places: a new workdir for each name of a place.
      rounds: number of rounds.
      options: overrides of the config.
    """
    seconds: dict[str, list[float]] = {f"{place}, {cache}": [] for place, cache in itertools.product(places, CACHES)}
    restoring: dict[str, list[float]] = {place: [] for place in places}
    with tempfile.TemporaryDirectory(prefix="dcvit-restart-") as folder:
        caches = {name: Path(folder, name) for name in CACHES}
        for workdir in places.values():
            prepare(config, workdir, options, caches["warm"])
        for number, place, cache in itertools.product(range(rounds), places, CACHES):
            shutil.rmtree(caches["cold"], ignore_errors=True)
            took, restored = restart(config, places[place], options, caches[cache])
            seconds[f"{place}, {cache}"].append(round(took, 2))
            restoring[place].append(round(restored, 2))
            print(f"round {number + 1}, {place}, {cache}: {took:.1f} s, restoring {restored:.1f} s", file=sys.stderr)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    return {"machine": machine, "config": config, "rounds": rounds, "seconds": seconds, "restoring": restoring}


def table(result: Mapping[str, object]) -> str:
    """Return the Markdown table of a result of `measure`, with a line about its settings."""
    lines = [
        f"`{result['config']}`, {result['rounds']} rounds ({result['machine']}). Seconds from the restart to the next "
        "completed step: median (smallest–largest).",
        "",
        "| workdir | empty compilation cache | filled compilation cache | of which restoring (both caches) |",
        "|---|---|---|---|",
    ]
    seconds: Mapping[str, Sequence[float]] = result["seconds"]
    restoring: Mapping[str, Sequence[float]] = result["restoring"]
    for place, restored in restoring.items():
        found = [*(seconds[f"{place}, {cache}"] for cache in CACHES), restored]
        cells = [f"{statistics.median(times):.1f} ({min(times):.1f}–{max(times):.1f})" for times in found]
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join(lines)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve S3 on this machine, set the variables by which clients use it, and yield the URL of a bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
    }  # fmt: skip
    try:
        from input_pipeline import stores

        stores.filesystem("s3://bucket").mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.stop()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="lm_stdlib")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", help="folder of an object store for the workdir (default: S3 by moto)")
    parser.add_argument("--tiny", action="store_true", help="a small model and one round, which show that it works")
    parser.add_argument("--docs", type=Path, help="folder of the documentation, to write the results to")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("expected 1 or more rounds")
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="dcvit-restart-"))
        store = args.store or stack.enter_context(served())
        name = f"restart-{time.time_ns()}"
        places = {"disk": f"{disk}/{name}", store.partition("://")[0] + "://": f"{store.rstrip('/')}/{name}"}
        if not args.store:
            places = {"disk": places["disk"], "S3 (moto, same machine)": places["s3://"]}
        result = measure(args.config, places, 1 if args.tiny else args.rounds, TINY if args.tiny else {})
    print(table(result))
    if args.docs:
        results.write(result, table(result), args.docs / "restart.json", args.docs / "fault_tolerance.md", (BEGIN, END))


if __name__ == "__main__":
    main()
