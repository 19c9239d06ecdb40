"""Searches for input that makes the package fail in another way than with an error that it documents.

    python tests/robustness/fuzz.py --minutes 10 --seed 0
    python tests/robustness/fuzz.py --minutes 1 --target image --target npz

Hypothesis generates strings, configs and files, valid ones and damaged ones, for each target of `fuzz_targets.py`.
Every exception but those that end a command with one line is a finding, and so are more than ten seconds of CPU time or
2 GB of memory for one example. Findings are minimized and written to the folder `--out`, whose files
`test_fuzz_corpus.py` reads. Prints a Markdown table. The exit status is 1 if there are
findings. Input that ends the process itself is left in `--out` as TARGET.current.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import logging
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import hypothesis
from fuzz_targets import Target, targets
from hypothesis import HealthCheck, Phase, settings

from dcvit.cli import EXPECTED
from dcvit.parallel import runtime

CORPUS = Path(__file__).with_name("corpus")
SECONDS, MEMORY = 10, 2 << 30  # limits of one example: CPU time, and growth of memory in bytes
ROUND = 100  # examples that Hypothesis generates with one seed


class UndocumentedError(Exception):
    """An undocumented exception; `name` is its type and the line that raised it."""

    def __init__(self, error: BaseException):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self.name = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
        super().__init__(f"{self.name}: {str(error)[:200]}")


class Unbounded(BaseException):
    """An example exceeds a limit. It is not an Exception because the package catches those."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise Unbounded if the body takes too much CPU time or memory; end the process if it hangs."""

    def stop(*_: object) -> None:
        raise Unbounded(f"more than {SECONDS} s of CPU time")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGVTALRM, stop)  # not SIGPROF: libtpu sends it
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        faulthandler.dump_traceback_later(60 + 6 * SECONDS, exit=True)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGVTALRM, previous)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if (after - before) << 10 > MEMORY:
        raise Unbounded(f"{(after - before) >> 10} MB")


def check(target: Target, data: bytes) -> None:
    """Let a target read bytes.

    Raises:
      UndocumentedError: an undocumented exception.
      Unbounded: too much time or memory.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limits():
                target.read(data, Path(folder))
        except EXPECTED:
            pass
        except (KeyboardInterrupt, Unbounded):
            raise
        except BaseException as e:  # also panics of Rust
            raise UndocumentedError(e) from e


class Search:
    """A search with one target; `findings` holds the smallest input found of each name."""

    def __init__(self, target: Target, current: Path | None = None):
        """`current` is a file for the input that is read, in case it ends the process."""
        self.target, self.current = target, current
        self.examples, self.findings, self.deadline = 0, dict[str, tuple[bytes, str]](), float("inf")

    def explore(self, **options: object) -> None:
        """Try as many examples as the options, Hypothesis's settings, say; stop at the first new finding."""
        latest: dict[str, tuple[bytes, str]] = {}

        @settings(
            database=None, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink), **options,
        )  # fmt: skip
        @hypothesis.given(self.target.inputs)
        def read(data: bytes) -> None:
            if time.monotonic() > self.deadline and not latest:
                return
            self.examples += 1
            if self.current:
                self.current.write_bytes(data)
            try:
                check(self.target, data)
            except UndocumentedError as e:
                if e.name not in self.findings:
                    latest[e.name] = data, str(e)
                    raise
            except Unbounded as e:
                self.findings[f"{e}"] = data, str(e)
                raise

        if "derandomize" not in options:
            read = hypothesis.seed(self.seed)(read)
        with contextlib.suppress(UndocumentedError, Unbounded):
            read()
        self.findings |= latest

    def run(self, seconds: float, seed: int) -> None:
        """Explore for a time."""
        self.deadline, self.seed = time.monotonic() + seconds, seed * 1_000_000
        while time.monotonic() < self.deadline:
            self.explore(max_examples=ROUND)
            self.seed += 1


def save(folder: Path, name: str, search: Search) -> None:
    """Write the findings of a target, and print them."""
    for data, message in search.findings.values():
        path = folder / name / hashlib.sha256(data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{name}: {message}\n  {path}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", help="name of a target; may be repeated (default: all)")
    parser.add_argument("--out", type=Path, default=CORPUS, help="folder for the findings")
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    logging.disable()
    known = targets()
    names = args.target or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"unknown targets {', '.join(unknown)}; known: {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [("target", "examples", "findings"), ("---", "---:", "---:")]
    for name in names:
        search = Search(known[name], args.out / f"{name}.current")
        search.run(60 * args.minutes / len(names), args.seed)
        search.current.unlink(missing_ok=True)
        save(args.out, name, search)
        rows.append((name, f"{search.examples:,}", str(len(search.findings))))
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(any(row[2] != "0" for row in rows[2:]))


if __name__ == "__main__":
    sys.exit(main())
