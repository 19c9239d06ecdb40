"""Damages the files of a workdir and checks that `dcvit train` detects the damage when it resumes.

    python scripts/attack/corrupt.py --mutations 400 --seed 0

Every file of a run that was stopped has in turn a bit flipped, is truncated, is deleted, or is swapped with another
file. Then `dcvit train` resumes. It must report the damage in one line that names the file, or give a result that is
bitwise identical to that of the intact run. Numbers in damaged metrics, which have no checksums, may differ. Prints
counts as JSON, and a line for each violated requirement; the exit status is 1 if there are any.
"""

import argparse
import contextlib
import faulthandler
import io
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from chaos import report

from dcvit import cli, train
from dcvit.hub.source import ModelSource, open_parameters
from dcvit.runs import metrics

SAVED, STEPS, INTERVAL = 6, 9, 3  # the step at which the run was stopped, all steps, steps between checkpoints
KINDS = ("bit flip", "truncation", "deletion", "swap")
LATEST, EARLIER = f"checkpoints/{SAVED}", f"checkpoints/{SAVED - INTERVAL}"
# Files that are compared with others: an error names their folder and the entry that differs.
COMPARED = ("config.json", "data.json", "accepted.json", "SHA256SUMS")
METRICS = "metrics.jsonl"
TIMEOUT = 600  # seconds after which a mutation counts as hanging and ends the process
TINY = {
    "total_steps": STEPS, "ckpt_steps": INTERVAL, "ckpt_keep": 9, "log_steps": INTERVAL, "tensorboard": False,
    "ema_decay": 0.9, "model.width": 16, "model.depth": 1, "model.mlp_dim": 16, "model.patch_size": (4, 4), "evals": {},
}  # fmt: skip


def resume(workdir: Path, *words: str, **options: object) -> tuple[int, str]:
    """Run `dcvit train` and return its exit status and stderr."""
    words = (*words, *(f"--config.{key}={value}" for key, value in {**TINY, **options}.items()))
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = cli.run(train.main, ["--config", "vit_digits", "--workdir", str(workdir), *words])
    return status, err.getvalue()


def stopped_run(workdir: Path) -> None:
    """Train a run that was lengthened with --accept, and remove its last checkpoint, as if it was killed before."""
    for words, steps in (((), SAVED), (("--accept", "total_steps"), STEPS)):
        status, message = resume(workdir, *words, total_steps=steps)
        if status:
            raise SystemExit(message)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))


class Result(NamedTuple):
    """The result of a run: the bytes of its parameters, and its rows of metrics."""

    params: dict[str, bytes]
    rows: list[metrics.Values]


def result_of(workdir: Path) -> Result:
    params = {
        name: np.asarray(tensor.read()).tobytes() for name, tensor in open_parameters(ModelSource(workdir)).items()
    }
    return Result(params, metrics.read(workdir / METRICS))


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damage(workdir: Path, name: str, kind: str, draw: random.Random) -> list[str]:
    """Damage a file of a workdir, and return the names of all files that changed."""
    path = workdir / name
    content = path.read_bytes()
    if kind == "bit flip":
        bit, flipped = draw.randrange(8 * len(content)), bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
    elif kind == "truncation":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "deletion":
        path.unlink()
    else:
        other = draw.choice([p for p in files(workdir) if (workdir / p).read_bytes() != content])
        path.write_bytes((workdir / other).read_bytes())
        (workdir / other).write_bytes(content)
        return [name, other]
    return [name]


def is_named(message: str, workdir: Path, name: str) -> bool:
    """Return True if a message names a file of a workdir; a file of a checkpoint after the folder of the checkpoint."""
    parts = Path(name).parts
    if parts[-1] in COMPARED:
        return str(workdir.joinpath(*parts[:-1])) in message
    return str(workdir.joinpath(*parts[:2])) in message and "/".join(parts[2:]) in message


def outcome(workdir: Path, damaged: list[str], expected: Result) -> str:
    """Resume a damaged run to its end. Return the outcome, which starts with "wrong" if it violates a requirement."""
    status, message = resume(workdir)
    if status:
        if status != 2 or not message.startswith("error: ") or message.count("\n") != 1:
            return f"wrong: status {status}: {message}"
        if not any(is_named(message, workdir, name) for name in damaged):
            return f"wrong: the error does not name the file: {message}"
        if all(name.startswith(f"{LATEST}/") for name in damaged) and str(workdir / EARLIER) not in message:
            return f"wrong: the error does not name the earlier checkpoint: {message}"
        return "reported"
    found = result_of(workdir)
    if found.params != expected.params:
        return f"wrong: silently another result: {message}"
    if found.rows == expected.rows:
        return "without effect"
    if "rows before the checkpoint" in message and is_named(message, workdir, METRICS):
        return "warned of missing rows"
    return "other rows" if METRICS in damaged else f"wrong: silently other rows of metrics: {message}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, started = random.Random(args.seed), time.monotonic()
    kinds, outcomes, wrong = Counter(), Counter(), []
    with tempfile.TemporaryDirectory(prefix="dcvit-corrupt-") as folder:
        intact, work = Path(folder) / "intact", Path(folder) / "work"
        stopped_run(intact)
        shutil.copytree(intact, work)
        if resume(work)[0]:
            raise SystemExit("corrupt: the intact run does not resume")
        expected = result_of(work)
        # The earlier checkpoint has the same kinds of files as the latest one.
        names = [name for name in files(intact) if not name.startswith(EARLIER)]
        for i in range(args.mutations):
            name, kind = names[i % len(names)], KINDS[(i + i // len(names)) % len(KINDS)]
            faulthandler.dump_traceback_later(TIMEOUT, exit=True)
            shutil.rmtree(work)
            shutil.copytree(intact, work)
            found = outcome(work, damage(work, name, kind, draw), expected)
            outcomes[found.partition(":")[0]] += 1
            if found.startswith("wrong"):
                wrong.append(f"{kind} of {name}: {found}")
            kinds[kind] += 1
        faulthandler.cancel_dump_traceback_later()
    counts = {"files": len(names), "kinds": kinds, "outcomes": outcomes, "seconds": round(time.monotonic() - started)}
    return report(counts, wrong)


if __name__ == "__main__":
    sys.exit(main())
