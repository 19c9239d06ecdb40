"""Searches for input that makes the package fail in another way than with an error that it documents.

    python scripts/attack/fuzz.py --examples 1000 --seed 0
    python scripts/attack/fuzz.py --examples 10000 --target image --target npz

Hypothesis generates strings, configs and files, valid ones and damaged ones, for each target of `fuzz_targets.py`.
Every exception but those that end a command with one line is a finding, and so are more than ten seconds of CPU time or
2 GB of memory for one example. Findings are minimized and written to tests/robustness/corpus, which the tests read.
Prints a line for each target. The exit status is 1 if there are findings.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import logging
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import hypothesis
from fuzz_targets import Target, targets
from hypothesis import HealthCheck, Phase

from dcvit.cli import EXPECTED
from dcvit.parallel import runtime

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "robustness" / "corpus"
SECONDS, MEMORY = 10, 2 << 30  # limits of one example: CPU time, and growth of memory in bytes
HANG = 600  # seconds of wall time after which an example ends the process


class Finding(Exception):  # noqa: N818
    """An undocumented exception or an exceeded limit; the message is its type and the line that raised it."""


def check(target: Target, data: bytes) -> None:
    """Let a target read bytes; raise a Finding if this fails with an undocumented exception or exceeds a limit.

    A target that hangs ends the process with a traceback.
    """
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faulthandler.dump_traceback_later(HANG, exit=True)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.read(data, Path(folder))
        except EXPECTED:
            pass
        except BaseException as e:  # also panics of Rust
            if isinstance(e, KeyboardInterrupt):
                raise
            frame = traceback.extract_tb(e.__traceback__)[-1]
            raise Finding(f"{type(e).__name__} at {Path(frame.filename).name}:{frame.lineno}") from e
        finally:
            faulthandler.cancel_dump_traceback_later()
    if time.process_time() - started > SECONDS:
        raise Finding(f"more than {SECONDS} s of CPU time")
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 > MEMORY:
        raise Finding(f"more than {MEMORY:,} bytes of memory")


def search(target: Target, examples: int, seed: int) -> dict[str, bytes]:
    """Try a number of examples, and return the smallest input of each finding."""
    found: dict[str, bytes] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @hypothesis.given(target.inputs)
    def read(data: bytes) -> None:
        try:
            check(target, data)
        except Finding as e:
            found[str(e)] = data  # Hypothesis ends with the smallest one
            raise

    with contextlib.suppress(Finding, ExceptionGroup):
        read()
    return found


def main() -> int:
    known = targets()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=known, help="may be repeated (default: all)")
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    logging.disable()
    status = 0
    for name in args.target or known:
        found = search(known[name], args.examples, args.seed)
        for message, data in found.items():
            path = CORPUS / name / hashlib.sha256(data).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"{name}: {message}: {path}")
            status = 1
        print(f"{name}: {len(found)} findings", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
