"""Signals: SIGTERM saves and ends the run with 75 whatever it is at, a second one or Ctrl-C ends it at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import TINY

from dcvit import metrics, preemption
from dcvit.checkpoint import Checkpoints, saved_steps

# A run whose main thread, at a given moment, says so and then does not come back to Python for a minute, as in a
# compilation: the sleep is the C library's, called without letting signal handlers run.
STUCK = """
import ctypes, sys
from dcvit import cli, evaluators, loop, train
import dcvit.loop, dcvit.evaluators
def stick(*_, **__):
    print("stuck", flush=True)
    ctypes.CDLL(None).usleep(59_000_000)
    ctypes.CDLL(None).sleep(60)
moment, argv = sys.argv[1], sys.argv[2:]
real = loop.Loop._evaluations
if moment == "evaluating":
    loop.Loop._evaluations = lambda self, step, *rest: stick() if step == 3 else real(self, step, *rest)
elif moment == "waiting for data":
    prefetch = loop.prefetch
    def slow(*args):
        for number, batch in enumerate(prefetch(*args), start=1):
            if number == 5:
                stick()
            yield batch
    loop.prefetch = slow
elif moment == "compiling":
    train.jit_update = lambda *_: type("Update", (), {"lower": stick})()
sys.exit(cli.run(train.main, argv))
"""


def start(code, *argv):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def words(workdir, **overrides):
    options = {**TINY, "ckpt_steps": 100, **overrides}
    return ["--config", "vit_digits", "--workdir", str(workdir), *(f"--config.{k}={v}" for k, v in options.items())]


def until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} did not come: {lines} {process.stderr.read()}")


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "saved"), [("evaluating", [3]), ("waiting for data", [4]), ("compiling", [])])
def test_the_main_thread_need_not_take_part(tmp_path, moment, saved):
    workdir = tmp_path / "run"
    process = start(STUCK, moment, *words(workdir))
    until(process, "stuck")
    sent = time.monotonic()
    for _ in range(2):  # as `timeout` does, to the child and to its group
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    _, err = process.communicate(timeout=50)
    assert process.returncode == preemption.SAVED, err
    assert time.monotonic() - sent < 40
    assert saved_steps(workdir) == saved
    assert Checkpoints(workdir).newest() == (saved[-1] if saved else None)
    assert (f"step {saved[-1]} is saved" if saved else "no step was done") in err


@pytest.mark.slow
def test_nobody_need_read_what_it_says(tmp_path):
    """As where Ctrl-C or a signal to the group ends `tee`, too."""
    workdir = tmp_path / "run"
    process = start(STUCK, "waiting for data", *words(workdir))
    until(process, "stuck")
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=50) == preemption.SAVED
    process.stdout.close()
    assert saved_steps(workdir) == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"), [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 143)], ids=["Ctrl-C", "twice"]
)
def test_the_impatient_end_it_at_once_and_keep_the_last_checkpoint(tmp_path, sent, status):
    """A save that never ends stands in for a slow disk."""
    code = "from dcvit import loop; import time; loop.Loop.stop = lambda self: time.sleep(60);" + textwrap.dedent(STUCK)
    workdir = tmp_path / "run"
    process = start(code, "waiting for data", *words(workdir, ckpt_steps=1))
    until(process, "stuck")
    for number in sent:
        process.send_signal(number)
        time.sleep(preemption.AGAIN_SECONDS + 0.5)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status, err
    assert Checkpoints(workdir).newest() in (3, 4)
    assert metrics.read(workdir / "metrics.jsonl")[-1]["step"] == 4
    assert "Traceback" not in err


def test_handlers_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with preemption.Preemption() as listening:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert listening.listener.is_alive()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not listening.listener.is_alive()
