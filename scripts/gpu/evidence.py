"""Measurements on a GPU in the order of their worth, in a limited time, with a file of results after each part.

    python scripts/gpu/evidence.py --minutes 9 --out gpu           on a machine with a GPU
    python scripts/gpu/evidence.py --minutes 9 --out gpu --parts equal_time    its last part, which takes as long
    python scripts/gpu/evidence.py --tiny --out rehearsal          the same commands with small shapes, on a CPU

The programs of all parts are first compiled side by side, into a compilation cache. Then each part runs alone under its
own limit. OUT/summary.json has the state of each part; a part that is stopped or fails does not stop the others. The
kernels are used without verification (DCVIT_KERNELS=trust), so that no time goes into it; the part "kernels" checks
those of common cases. Only jax, flax and optax are needed, except for the training of configs, and for the part
"profile" Nsight Compute, which writes why the warps of one kernel wait.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMPILING = 0.4  # largest fraction of the time for compilations
LEAST = 15  # seconds below which no part is started
PROFILER = (
    "ncu", "--kernel-name", "regex:dcmha_post_grad", "--launch-count", "1", "--kill", "yes", "--csv",
    "--section", "SpeedOfLight", "--section", "SchedulerStats", "--section", "WarpStateStats",
)  # fmt: skip


class Part(NamedTuple):
    """A command of the package or a script, and its limit.

    Fields:
      name: the stem of its files in the output folder.
      words: the words after `python`; "{out}" is the output folder.
      seconds: limit of its time.
      compiles: words that are added to compile its programs only; none if it cannot.
      needs: a module or program without which it does not run.
      before: words before `python`.
    """

    name: str
    words: tuple[str, ...]
    seconds: int
    compiles: tuple[str, ...] = ()
    needs: str = "jax"
    before: tuple[str, ...] = ()


def parts(tiny: bool) -> list[Part]:
    """Return the parts in the order of their worth."""
    train, layers = ROOT / "scripts/bench/train.py", ROOT / "scripts/bench/dcmha.py"
    equal = (str(ROOT / "scripts/gpu/equal_time.py"), "--json", "{out}/equal_time.json", *["--tiny"] * tiny)
    only = ("--rounds", "0")

    def steps(name: str, words: str, *rows: str) -> Part:
        chosen = ("--rows", *rows) if rows else ()
        out = ("--rounds", "1" if tiny else "9", "--json", f"{{out}}/{name}.json")
        return Part(name, (str(train), *words.split(), *chosen, *out), 120, only)

    def training(config: str, *words: str) -> Part:
        workdir = f"{{out}}/{config}"
        words = ("-m", "dcvit", "train", "--config", config, "--workdir", workdir, *words)
        return Part(config, words, 120, needs="ml_collections")

    shapes = ("64x16_4x16",) if tiny else ("vit_s16", "lm_405m", "lm_6.9b")
    rounds = "2" if tiny else "15"
    layer = ("--shapes", *shapes, "--rounds", rounds, "--json", "{out}/layers.json")
    cases = ("gates",) if tiny else ("ViT-S/16", "405M", "6.9B", "grouped", "static", "documents")
    grouped = ("grouped, best", "folded, best")
    most = ("plain, best", "DC, best", "folded, best")  # those that fit into 80 GB together
    one = "--model 405M --batch 1 --depth 1"
    return [
        steps("steps_405M", one, *grouped) if tiny else steps("steps_405M", "--model 405M --batch 8"),
        Part("layers", (str(layers), *layer), 120, only),
        steps("steps_vit_s16", f"--model vit_s16 --batch {1 if tiny else 256}", *grouped[: 2 if tiny else 0]),
        *([] if tiny else [steps("steps_6.9B", "--model 6.9B --batch 2 --depth 4", *most)]),
        Part("kernels", ("-m", "dcvit", "check-kernels", *cases, "--json"), 420),
        training("vit_digits", *["--config.total_epochs=1"] * tiny),
        training("lm_stdlib", *["--config.total_steps=2", "--config.evals.validation.data.limit=8"] * tiny),
        Part("profile", (str(layers), "--shapes", *shapes[-1:], "--rounds", "1"), 90, needs="ncu", before=PROFILER),
        Part("equal_time", equal, 540),
    ]


def start(part: Part, out: Path, more: Sequence[str] = ()) -> subprocess.Popen:
    """Start a part in a process group of its own, with its output in files."""
    words = [word.replace("{out}", str(out)) for word in part.words]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(out / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if more else {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}),
        **({} if part.name == "kernels" else {"DCVIT_KERNELS": "trust"}),
    }
    stem = f"{part.name}_compiling" if more else part.name
    printed = out / f"{stem}.{'json' if part.name == 'kernels' else 'txt'}"
    with printed.open("w") as stdout, (out / f"{stem}.log").open("w") as stderr:
        command = [*part.before, sys.executable, *words, *more]
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)


def wait(process: subprocess.Popen, seconds: float) -> str:
    """Wait for a process for some seconds, then kill its group; return how it ended."""
    seconds = max(0, seconds)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {seconds:.0f} s"
    return "done" if status == 0 else f"failed with status {status}"


def measure(chosen: Sequence[Part], out: Path, minutes: float) -> list[dict[str, object]]:
    """Compile the parts side by side, run one after the other, and return what became of each."""
    started, end = time.monotonic(), time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []

    def add(name: str, state: str, seconds: float) -> None:
        rows.append({"part": name, "state": state, "seconds": round(seconds, 1)})
        (out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name:24} {state}, {seconds:.0f} s", flush=True)

    possible = [part for part in chosen if importlib.util.find_spec(part.needs) or shutil.which(part.needs)]
    compiling = {part.name: start(part, out, part.compiles) for part in possible if part.compiles}
    for name, process in compiling.items():
        state = wait(process, started + COMPILING * 60 * minutes - time.monotonic())
        add(f"{name}, compiling", state, time.monotonic() - started)
    for part in chosen:
        left, begun = end - time.monotonic(), time.monotonic()
        if part not in possible:
            add(part.name, f"not run: {part.needs} is not installed", 0)
        elif left < LEAST:
            add(part.name, "not run: no time is left", 0)
        else:
            state = wait(start(part, out), min(part.seconds, left))
            add(part.name, state, time.monotonic() - begun)
    return rows


def main() -> int:
    """Run the script; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="limit of the whole")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in parts(False)], help="by default all")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to rehearse on a CPU")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: expected a number above 0")
    chosen = [part for part in parts(args.tiny) if not args.parts or part.name in args.parts]
    rows = measure(chosen, args.out, args.minutes)
    return int(any(str(row["state"]).startswith(("failed", "stopped")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
