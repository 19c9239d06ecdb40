"""Damages a workdir in many ways and checks that commands which resume, load or draw the run detect the damage.

    python tests/robustness/corrupt.py --mutations 400 --seed 0

Every file of a run that was stopped has in turn a bit flipped, is truncated, is deleted, or is swapped with another
file. Whole checkpoints are exchanged, renamed, linked, copied or linked from a run with another seed. Then `dcvit
train` resumes with on_corrupt="fail" and "previous", the model is opened as all other commands open it, and `dcvit
plot` reads the metrics. Each must report the damage in one line that names the file, or give a result that is bitwise
identical to that of the intact run. Numbers in damaged metrics, which have no checksums, may differ. An intact
checkpoint must load directly afterwards. Prints counts. The exit status is 1 if any requirement is violated.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from dcvit import cli, train
from dcvit.errors import CheckpointError, ConfigError, MetricsError
from dcvit.hub.model import open_trained
from dcvit.hub.source import ModelSource, open_parameters
from dcvit.runs import metrics
from dcvit.runs.steps import saved_steps

SAVED, STEPS, INTERVAL = 6, 9, 3  # the step at which the run was stopped, all steps, steps between checkpoints
KINDS = ("bit flip", "truncation", "deletion", "swap")
LATEST, EARLIER = f"checkpoints/{SAVED}", f"checkpoints/{SAVED - INTERVAL}"
# Files that are compared with others: an error names their folder and the entry that differs.
COMPARED = ("config.json", "data.json", "accepted.json", "SHA256SUMS")
METRICS = "metrics.jsonl"
RESUME_INTERVAL = 8  # mutations between two runs that are resumed with on_corrupt="previous", which take seconds
TIMEOUT = 600  # seconds after which a command counts as hanging
TINY = {
    "total_steps": STEPS, "ckpt_steps": INTERVAL, "ckpt_keep": 9, "log_steps": INTERVAL, "tensorboard": False,
    "ema_decay": 0.9, "model.width": 16, "model.depth": 1, "model.mlp_dim": 16, "model.patch_size": (4, 4), "evals": {},
}  # fmt: skip


def load_params(source: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in open_parameters(ModelSource(source)).items()}


class Result(NamedTuple):
    """The result of a run."""

    params: object
    rows: list[metrics.Values]

    @classmethod
    def of(cls, workdir: Path) -> "Result":
        return cls(load_params(workdir), metrics.read(workdir / METRICS))


class Expected(NamedTuple):
    """Results of the intact run."""

    stopped: Result
    resumed: Result
    resumed_from_previous: Result


class Hang(BaseException):
    """Raised after `TIMEOUT`. It is not an Exception because commands catch those."""


def command(workdir: Path, *words: str, **options: object) -> tuple[int, str]:
    """Run `dcvit train` and return its exit status and stderr."""
    words = (*words, *(f"--config.{key}={value}" for key, value in {**TINY, **options}.items()))
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = cli.run(train.main, ["--config", "vit_digits", "--workdir", str(workdir), *words])
    return status, err.getvalue()


def stopped_run(folder: Path, seed: int) -> Path:
    """Train a run that was lengthened with --accept, and remove its last checkpoint, as if it was killed before."""
    workdir = folder / f"seed-{seed}"
    for words, steps in (((), SAVED), (("--accept", "total_steps"), STEPS)):
        status, message = command(workdir, *words, total_steps=steps, seed=seed)
        if status:
            raise SystemExit(message)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    return workdir


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damage_file(name: str, kind: str) -> Callable[[Path, random.Random], list[str]]:
    """Return a function that damages a file of a workdir and returns the names of all files that changed."""

    def mutate(workdir: Path, draw: random.Random) -> list[str]:
        path = workdir / name
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
            other = draw.choice([p for p in files(workdir) if (workdir / p).read_bytes() != bytes(content)])
            path.write_bytes((workdir / other).read_bytes())
            (workdir / other).write_bytes(content)
            return [name, other]
        return [name]

    return mutate


def exchange(workdir: Path, draw: random.Random) -> list[str]:
    (workdir / LATEST).rename(workdir / "checkpoints" / "x")
    (workdir / EARLIER).rename(workdir / LATEST)
    (workdir / "checkpoints" / "x").rename(workdir / EARLIER)
    return [LATEST, EARLIER]


def rename(workdir: Path, draw: random.Random) -> list[str]:
    name = f"checkpoints/{SAVED + draw.choice((1, 2))}"
    (workdir / draw.choice((LATEST, EARLIER))).rename(workdir / name)
    return [name]


def link(workdir: Path, draw: random.Random) -> list[str]:
    one, other = draw.sample((LATEST, EARLIER), 2)
    shutil.rmtree(workdir / one)
    (workdir / one).symlink_to(Path(other).name)
    return [one]


def foreign(other: Path, *, linked: bool) -> Callable[[Path, random.Random], list[str]]:
    """Return a function that replaces a checkpoint by that of another run."""

    def mutate(workdir: Path, draw: random.Random) -> list[str]:
        name = draw.choice((LATEST, EARLIER))
        shutil.rmtree(workdir / name)
        if linked:
            (workdir / name).symlink_to(other / name)
        else:
            shutil.copytree(other / name, workdir / name)
        return [name]

    return mutate


def same(a: object, b: object) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def is_named(message: str, workdir: Path, name: str) -> bool:
    """Return True if a message names a file of a workdir; a file of a checkpoint after the folder of the checkpoint."""
    parts = Path(name).parts
    if parts[-1] in COMPARED:
        return str(workdir.joinpath(*parts[:-1])) in message
    return str(workdir.joinpath(*parts[:2])) in message and "/".join(parts[2:]) in message


class Checks:
    """Checks of one damaged workdir. Each returns the violated requirement, or None, and counts its outcome."""

    def __init__(self, workdir: Path, damaged: list[str], expected: Expected, met: Counter):
        self.workdir, self.damaged, self.expected, self.met = workdir, damaged, expected, met

    def reported(self, message: str, what: str) -> str | None:
        self.met[f"{what}: reported"] += 1
        if "\n" in message.strip() or not any(is_named(message, self.workdir, name) for name in self.damaged):
            return f"{what} does not name it in one line: {message}"
        if all(name.startswith(f"{LATEST}/") for name in self.damaged) and str(self.workdir / EARLIER) not in message:
            return f"{what} does not name the earlier checkpoint: {message}"
        return None

    def load(self) -> str | None:
        """Open the model and its parameters."""
        try:
            model = open_trained(self.workdir, None, None)
            params = load_params(model.source.path)
        except (CheckpointError, ConfigError) as e:
            return self.reported(str(e), "load")
        except Exception as e:
            return f"load raised {e!r}"
        self.met["load: without effect"] += 1
        return None if same(params, self.expected.stopped.params) else "silent: load returned other values"

    def plot(self) -> str | None:
        """Read the metrics; the end of the file may be missing, as after a kill."""
        try:
            rows = metrics.read(self.workdir / METRICS)
        except MetricsError as e:
            return self.reported(str(e), "plot")
        except Exception as e:
            return f"plot raised {e!r}"
        is_same = rows == self.expected.stopped.rows[: len(rows)]
        self.met["plot: without effect" if is_same else "plot: other rows"] += 1
        return None if is_same or METRICS in self.damaged else "silent: plot read other rows"

    def resume(self) -> str | None:
        """Resume the run to its end; a message about missing rows of metrics is a warning."""
        status, message = command(self.workdir)
        if status:
            wrong = None if status == 2 and message.startswith("error: ") else f"train: status {status}: {message}"
            return wrong or self.reported(message, "train")
        found = Result.of(self.workdir)
        if not same(found.params, self.expected.resumed.params):
            return f"silent: train resumed to another result: {message}"
        if found.rows == self.expected.resumed.rows:
            self.met["train: without effect"] += 1
            return None
        warned = "rows before the checkpoint" in message and is_named(message, self.workdir, METRICS)
        self.met["train: warned" if warned else "train: other rows"] += 1
        is_allowed = warned or METRICS in self.damaged
        return None if is_allowed else f"silent: train resumed to other rows of metrics: {message}"

    def resume_from_previous(self) -> str | None:
        status, message = command(self.workdir, on_corrupt="previous")
        named = any(Path(f).name in message or is_named(message, self.workdir, f) for f in self.damaged)
        if status or "set aside as" not in message or not named:
            return f"on_corrupt='previous': status {status}: {message}"
        found, expected = Result.of(self.workdir), self.expected.resumed_from_previous
        is_same = same(found.params, expected.params) and found.rows == expected.rows
        return None if is_same else "silent: on_corrupt='previous' has another result"


def plan(intact: Path, other: Path, count: int) -> list[tuple[str, str, Callable[[Path, random.Random], list[str]]]]:
    """Return (kind, target, function) of each mutation: of all files in turn, every eighth of a whole checkpoint."""
    whole = {
        "exchange": exchange, "rename": rename, "link": link, "foreign copy": foreign(other, linked=False),
        "foreign link": foreign(other, linked=True),
    }  # fmt: skip
    found = files(intact)
    # Those of the earlier checkpoint, which has the same kinds of files, only if they are text of the run itself.
    names = [name for name in found if not name.startswith(EARLIER) or name.endswith(("SHA256SUMS", "about/metadata"))]
    mutations = []
    for i in range(count):
        if i % 8 == 7:
            kind = list(whole)[i // 8 % len(whole)]
            mutations.append((kind, "a checkpoint", whole[kind]))
        else:
            name, kind = names[(i - i // 8) % len(names)], KINDS[(i - i // 8 + i // len(names)) % len(KINDS)]
            mutations.append((kind, name, damage_file(name, kind)))
    return mutations


def check(checks: Checks, *, previous: bool) -> list[str]:
    """Return the violated requirements of a damaged workdir; with `previous`, also resume from the earlier one."""
    found = [checks.load(), checks.plot(), checks.resume()]
    if previous and all(name.startswith(f"{LATEST}/") for name in checks.damaged):
        found.append(checks.resume_from_previous())
    return [line for line in found if line]


def expected_results(intact: Path, work: Path) -> Expected:
    """Resume copies of the intact run in `work`, from its latest checkpoint and from the earlier one."""
    found = [Result.of(intact)]
    for removed in (None, LATEST):
        shutil.copytree(intact, work)
        if removed:
            shutil.rmtree(work / removed)
        status, message = command(work)
        if status or saved_steps(work)[-1] != STEPS:
            raise SystemExit(f"corrupt: the intact run does not resume: {message}")
        found.append(Result.of(work))
        shutil.rmtree(work)
    return Expected(*found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, started = random.Random(args.seed), time.monotonic()
    kinds, met, failures, slowest = Counter(), Counter(), [], 0.0

    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory(prefix="dcvit-corrupt-") as name:
        work = Path(name) / "work"
        intact, other = stopped_run(Path(name), 0), stopped_run(Path(name), 1)
        expected, count = expected_results(intact, work), len(files(intact))
        for i, (kind, target, mutate) in enumerate(plan(intact, other, args.mutations)):
            begun = time.monotonic()
            shutil.copytree(intact, work)
            signal.alarm(TIMEOUT)
            try:
                checks = Checks(work, mutate(work, draw), expected, met)
                wrong = check(checks, previous=i % RESUME_INTERVAL == 0)
                if not same(load_params(intact), expected.stopped.params):
                    wrong.append("an intact checkpoint did not load afterwards")
            except Hang:
                wrong = [f"hang: more than {TIMEOUT} s"]
            signal.alarm(0)
            shutil.rmtree(work)
            slowest = max(slowest, time.monotonic() - begun)
            kinds[kind] += 1
            failures += [f"{kind} of {target}: {line}" for line in wrong]
    counts = {
        "mutations": args.mutations, "files": count, "kinds": dict(kinds), "outcomes": dict(met),
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
