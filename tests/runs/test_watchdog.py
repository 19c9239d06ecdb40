"""The watchdog of a run: stalls are reported, also while a C function holds the interpreter lock."""

import os
import subprocess
import sys
import threading

import pytest

from dcvit.runs import watchdog as watchdog_module
from dcvit.runs.watchdog import LOG, STALLED, Watchdog


@pytest.fixture
def reports(monkeypatch):
    """Return a function that waits for the next report of a watchdog."""
    reported = threading.Semaphore(0)
    write = Watchdog._report

    def report(self, line):
        write(self, line)
        reported.release()

    monkeypatch.setattr(Watchdog, "_report", report)
    return lambda: reported.acquire(timeout=60)


def test_each_stall_is_reported_once_with_all_stacks_and_what_is_read(tmp_path, capfd, monkeypatch, reports):
    monkeypatch.setattr("input_pipeline.active_reads", lambda: ["input_0: /data/cat/1.jpg (for 12 s)"])
    release, waiting = threading.Event(), threading.Event()

    def a_worker_that_hangs():
        waiting.set()
        release.wait()

    worker = threading.Thread(target=a_worker_that_hangs)
    worker.start()
    waiting.wait()
    watchdog = Watchdog(tmp_path, 0.2)
    watchdog("evaluating test after step 3")
    assert reports()
    text = (tmp_path / LOG).read_text()
    assert text == capfd.readouterr().err.removesuffix("\n")
    assert "no progress for 0.2 s while evaluating test after step 3" in text
    assert "/data/cat/1.jpg (for 12 s)" in text
    assert "in a_worker_that_hangs" in text
    assert "test_each_stall_is_reported_once" in text
    watchdog("at step 4")
    assert reports()
    text = (tmp_path / LOG).read_text()
    assert text.count("while at step 4") == text.count("while evaluating test") == 1
    watchdog.close()
    release.set()
    worker.join()


@pytest.mark.slow
def test_progress_is_not_reported(tmp_path, monkeypatch):
    """The time advances by most of the limit between two calls, ten times."""
    now = 0.0
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(Watchdog, "_report", lambda self, line: pytest.fail(line))
    checked = threading.Semaphore(0)
    arm = Watchdog._arm
    monkeypatch.setattr(Watchdog, "_arm", lambda self: (arm(self), checked.release()))
    watchdog = Watchdog(tmp_path, 1.0)
    for step in range(10):
        watchdog(f"at step {step}")
        now += 0.9
        for _ in range(2):  # the second time, the first check since then is over
            assert checked.acquire(timeout=60)
    watchdog.close()
    assert not watchdog.reported


STALL = """
import ctypes, pathlib, sys, time, jax
from dcvit.runs import watchdog
watchdog.REPORT_SECONDS = 0.1 if sys.argv[2] == "holding" else 600
dog = watchdog.Watchdog(pathlib.Path(sys.argv[1]), 0.5, exit_on_stall=sys.argv[3] == "any")
if sys.argv[3] == "save":
    dog("saving step 2", saves=True)
if sys.argv[2] == "holding":
    ctypes.PyDLL(None).sleep(600)  # unlike CDLL, PyDLL does not release the interpreter lock
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lock", "stall", "status"),
    [
        ("released", "any", STALLED),
        pytest.param("holding", "any", 1, marks=pytest.mark.exhaustive),
        pytest.param("released", "save", STALLED, marks=pytest.mark.exhaustive),
    ],
)
def test_stalled_process_reports_its_stack_and_exits_if_asked_to_or_while_it_saves(tmp_path, lock, stall, status):
    completed = subprocess.run(
        [sys.executable, "-c", STALL, str(tmp_path), lock, stall], capture_output=True, text=True, timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert completed.returncode == status, completed.stderr
    expected = "Timeout (0:00:00.6" if lock == "holding" else "no progress for 0.5 s while "
    assert expected in completed.stderr
    assert f'File "<string>", line {9 if lock == "holding" else 10}' in completed.stderr


@pytest.mark.exhaustive
@pytest.mark.usefixtures("library_promotion")
def test_run_announces_each_kind_of_work(digits_run, monkeypatch):
    phases = []
    monkeypatch.setattr(Watchdog, "__call__", lambda self, phase, **_: phases.append(phase))
    assert digits_run(total_steps=2, ckpt_steps=1, watchdog_seconds=0)[0] == 0
    assert [phase for phase in phases if "step 2" in phase] == [
        "waiting for the data of step 2", "at step 2", "evaluating test after step 2", "saving step 2",
    ]  # fmt: skip
    assert {"starting", "compiling the training step", "finishing the last checkpoint"} <= {*phases}
