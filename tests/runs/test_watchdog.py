"""A run that stands still is reported with the stacks of its threads and what its input workers read."""

import os
import subprocess
import sys
import threading
import time

import pytest

from dcvit.runs.watchdog import LOG, STALLED, Watchdog


def test_a_stall_is_reported_once_with_all_stacks_and_what_is_read(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("input_pipeline.active_reads", lambda: ["input_0: /data/cat/1.jpg (for 12 s)"])
    holding, waiting = threading.Event(), threading.Event()

    def a_worker_that_hangs():
        waiting.set()
        holding.wait()

    worker = threading.Thread(target=a_worker_that_hangs)
    worker.start()
    waiting.wait()
    watchdog = Watchdog(tmp_path, 0.2)
    watchdog("evaluating test after step 3")
    time.sleep(0.7)
    text = (tmp_path / LOG).read_text()
    assert text == capfd.readouterr().err.removesuffix("\n")
    assert "no progress for 0.2 s while evaluating test after step 3" in text
    assert "/data/cat/1.jpg (for 12 s)" in text
    assert "in a_worker_that_hangs" in text
    assert "test_a_stall_is_reported_once" in text
    watchdog("at step 4")
    time.sleep(0.5)
    assert "while at step 4" in (tmp_path / LOG).read_text()
    watchdog.close()
    holding.set()
    worker.join()


def test_a_log_that_cannot_be_written_is_on_stderr_all_the_same(tmp_path, capfd):
    (tmp_path / LOG).mkdir()
    watchdog = Watchdog(tmp_path, 0.2)
    time.sleep(0.6)
    watchdog.close()
    assert "no progress for 0.2 s while starting" in capfd.readouterr().err


def test_progress_is_no_stall(tmp_path):
    watchdog = Watchdog(tmp_path, 1.0)
    for step in range(8):
        watchdog(f"at step {step}")
        time.sleep(0.2)
    watchdog.close()
    assert not (tmp_path / LOG).exists()


HANG = """
import time
from dcvit import cli, train
from dcvit.training import inputs
real = inputs.TrainingData.batches
def batches(self, *args):
    for number, batch in enumerate(real(self, *args)):
        if number == 2:
            time.sleep(600)
        yield batch
inputs.TrainingData.batches = batches
import sys
sys.exit(cli.run(train.main, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_may_end_where_it_stands_still(tmp_path):
    from conftest import TINY

    options = {**TINY, "watchdog_seconds": 8, "watchdog_exit": True}
    words = ["--config", "vit_digits", "--workdir", str(tmp_path), *(f"--config.{k}={v}" for k, v in options.items())]
    done = subprocess.run(
        [sys.executable, "-c", HANG, *words], capture_output=True, text=True, timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == STALLED, done.stderr
    assert "while waiting for the data of step" in done.stderr
    assert "in batches" in (tmp_path / LOG).read_text()
