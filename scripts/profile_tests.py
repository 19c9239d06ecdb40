"""Measures the tests: wall and CPU seconds, and compilations, by folder, file and test.

    python scripts/profile_tests.py [pytest options]      such as -n 2 --dist worksteal -m "not exhaustive"

This file is also the pytest plugin that records: each worker appends a line per test to a file in a temporary folder.
Seconds include fixtures and subprocesses. Programs that come from the compilation cache also count as compilations.
"""

import collections
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import pytest

FOLDER = "DCVIT_TEST_PROFILE"  # environment variable: the folder in which the workers write
COLUMNS = ("tests", "wall s", "CPU s", "compilations", "compiling s")
ROWS = {"folder": None, "file": 40, "test": 40}  # of each table, with the largest CPU time first


class Recorder:
    """Pytest plugin that appends what each test takes to a file of this process."""

    def __init__(self, folder):
        import jax

        self.file = pathlib.Path(folder, f"{os.getpid()}.jsonl")
        self.compilations = []  # seconds
        jax.monitoring.register_event_duration_secs_listener(self.on_event)

    def on_event(self, event, duration, **_):
        """Count the compilations among JAX's events."""
        if event == "/jax/core/compile/backend_compile_duration":
            self.compilations.append(duration)

    def now(self):
        """Return the values of `COLUMNS` since the process started, without the number of tests."""
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(u.ru_utime + u.ru_stime for u in usage)
        return time.perf_counter(), cpu, len(self.compilations), sum(self.compilations)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Record one test with its fixtures."""
        before = self.now()
        result = yield
        values = [b - a for a, b in zip(before, self.now(), strict=True)]
        with self.file.open("a") as file:
            print(json.dumps([item.nodeid, 1, *values]), file=file)
        return result


def pytest_configure(config):
    """Record in every process that runs tests."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(Recorder(os.environ[FOLDER]))


def keys(test):
    """Return the row of a test in each table."""
    path = pathlib.PurePath(test.partition("::")[0])
    return {"folder": "/".join(path.parent.parts[:2]), "file": str(path), "test": test}


def table(title, rows):
    """Print the sums of a table."""
    sums = collections.defaultdict(lambda: [0] * len(COLUMNS))
    for test, *values in rows:
        key = keys(test)[title]
        sums[key] = [a + b for a, b in zip(sums[key], values, strict=True)]
    found = sorted(sums.items(), key=lambda item: -item[1][2])[: ROWS[title]]
    if title == "folder":
        found.append(("all", [sum(column) for column in zip(*sums.values(), strict=True)]))
    print(f"\n| {title} | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    for name, values in found:
        print(f"| {name} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")


def main(argv):
    """Run pytest with the recorder and print the tables; return pytest's status."""
    plugin = pathlib.Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, FOLDER: folder, "PYTHONPATH": str(plugin.parent)}
        command = [sys.executable, "-m", "pytest", "-p", plugin.stem, *argv]
        status = subprocess.run(command, env=environment, check=False).returncode
        rows = [json.loads(line) for file in pathlib.Path(folder).iterdir() for line in file.open()]
    for title in ROWS:
        table(title, rows)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
