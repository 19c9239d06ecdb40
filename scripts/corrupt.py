"""Damages a checkpoint in many ways and checks that commands which resume or load it detect the damage.

    python scripts/corrupt.py --mutations 240 --seed 0

Every file of a checkpoint in turn has a bit flipped, is truncated, is deleted, or is swapped with another file. Then
`dcvit train` resumes with on_corrupt="fail" and "previous", and `load_params` loads the checkpoint as all other
commands do. `train` must report every damage in one line that names the file. Parameters that `load_params` returns
must be bitwise identical to the saved ones. An intact checkpoint must load directly afterwards. Prints counts. The exit
status is 1 if any requirement is violated.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from dcvit import cli, train
from dcvit.checkpoint.checkpointer import load_params
from dcvit.errors import CheckpointError

STEPS, INTERVAL = 6, 3
KINDS = ("bit flip", "truncation", "deletion", "swap")
RESUME_INTERVAL = 8  # mutations between two resumed runs, which take seconds
TIMEOUT = 600  # seconds after which a command counts as hanging
TINY = {
    "total_steps": STEPS, "ckpt_steps": INTERVAL, "log_steps": INTERVAL, "tensorboard": False, "ema_decay": 0.9,
    "model.width": 16, "model.depth": 1, "model.mlp_dim": 16, "model.patch_size": (4, 4), "evals": {},
}  # fmt: skip


class Hang(BaseException):
    """Raised after `TIMEOUT`. It is not an Exception because commands catch those."""


def command(workdir: Path, **options: object) -> tuple[int, str]:
    """Run `dcvit train` and return its exit status and stderr."""
    words = [f"--config.{key}={value}" for key, value in {**TINY, **options}.items()]
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = cli.run(train.main, ["--config", "vit_digits", "--workdir", str(workdir), *words])
    return status, err.getvalue()


def mutate(folder: Path, name: str, kind: str, draw: random.Random) -> list[str]:
    """Damage one file and return the names of all files that changed."""
    path = folder / name
    content = bytearray(path.read_bytes())
    if kind == "bit flip":
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
    elif kind == "truncation":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "deletion":
        path.unlink()
    else:
        others = [p for p in files(folder) if (folder / p).read_bytes() != bytes(content)]
        other = draw.choice(others)
        path.write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(content)
        return [name, other]
    return [name]


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def same(a: object, b: object) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def check(
    intact: Path, work: Path, expected: object, name: str, kind: str, draw: random.Random, resume: bool
) -> list[str]:
    """Apply one mutation and return the violated requirements.

    With `resume`, a run with on_corrupt="previous" also resumes from the earlier checkpoint.
    """
    wrong = []
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(intact, work)
    latest = work / "checkpoints" / str(STEPS)
    damaged = mutate(latest, name, kind, draw)

    status, message = command(work)
    if status != 2 or not message.startswith("error: ") or message.count("\n") != 1:
        wrong.append("silent" if status == 0 else f"status {status}: {message}")
    if not any(file in message for file in damaged) or str(latest) not in message:
        wrong.append(f"not named: {message}")
    if f"{work / 'checkpoints' / str(INTERVAL)}" not in message:
        wrong.append(f"the earlier checkpoint is not named: {message}")
    try:
        if not same(load_params(work), expected):
            wrong.append("silent: load_params returned other values")
    except CheckpointError as e:
        if not any(file in str(e) for file in damaged):
            wrong.append(f"not named by load_params: {e}")
    except Exception as e:
        wrong.append(f"load_params raised {e!r}")
    if not same(load_params(intact), expected):
        wrong.append("an intact checkpoint did not load afterwards")
    if not resume:
        return wrong
    status, message = command(work, on_corrupt="previous")
    if status or "set aside as" not in message or not any(file in message for file in damaged):
        wrong.append(f"on_corrupt='previous': status {status}: {message}")
    elif not same(load_params(work), expected):
        wrong.append("on_corrupt='previous' has another result")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, started = random.Random(args.seed), time.monotonic()
    met, failures, slowest = Counter(), [], 0.0

    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory(prefix="dcvit-corrupt-") as folder:
        intact = Path(folder) / "intact"
        status, message = command(intact)
        if status:
            raise SystemExit(message)
        expected = jax.device_get(load_params(intact))
        names = files(intact / "checkpoints" / str(STEPS))
        print(f"{len(names)} files, each {args.mutations / len(names):.1f} times", file=sys.stderr)
        for i in range(args.mutations):
            name, kind = names[i % len(names)], KINDS[(i + i // len(names)) % len(KINDS)]
            begun = time.monotonic()
            signal.alarm(TIMEOUT)
            try:
                wrong = check(intact, Path(folder) / "work", expected, name, kind, draw, i % RESUME_INTERVAL == 0)
            except Hang:
                wrong = [f"hang: more than {TIMEOUT} s"]
            signal.alarm(0)
            slowest = max(slowest, time.monotonic() - begun)
            met[kind] += 1
            failures += [f"{kind} of {name}: {line}" for line in wrong]
    counts = {
        "mutations": args.mutations, "files": len(names), "kinds": dict(met),
        "silent": sum("silent" in line for line in failures), "hangs": sum("hang" in line for line in failures),
        "other failures": sum("silent" not in line and "hang" not in line for line in failures),
        "slowest": f"{slowest:.1f} s", "all": f"{time.monotonic() - started:.0f} s",
    }  # fmt: skip
    print(json.dumps(counts))
    for line in failures:
        print(f"wrong: {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
