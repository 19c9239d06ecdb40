"""Stop signals: SIGTERM and Ctrl-C save in any state of the main thread; a second signal ends the process at once.

The tests wait for events, not for times: the processes print lines when they reach a state.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from trained_workdirs import TINY

from dcvit.runs import preemption, restoring
from dcvit.runs.steps import saved_steps

TIMEOUT = 300  # of one process

# The main thread prints "stuck" at a given moment, and then
#   stays     blocks in C, on a mutex that it holds, so that it executes no more Python code
#   raises    raises an exception as soon as a stop has started; the save waits until then
STICK = """
import ctypes, sys, threading, time
from dcvit.runs import preemption
preemption.REPEAT_SECONDS = dict.fromkeys(preemption.REPEAT_SECONDS, float(sys.argv[1]))
moment, then, argv = sys.argv[2], sys.argv[3], sys.argv[4:]
saving, ended = threading.Event(), threading.Event()
def stick(*_, **__):
    print("stuck", flush=True)
    if then == "stays":
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    saving.wait()
    raise RuntimeError("failed while stopping")
"""
LISTENING = (
    STICK
    + """
def save():
    saving.set()
    if then == "raises":
        ended.wait()
    if moment == "never saved":
        time.sleep(600)
    return "step 3 is saved"
with preemption.Preemption() as listening, listening.saving(save, ended.set):
    stick()
"""
)
TRAINING = (
    STICK
    + """
from dcvit import cli, train
from dcvit.training import hooks
record = hooks.MetricsHook._record
def recorded(self, step, *rest):
    if step == 3:
        stick()
    return record(self, step, *rest)
hooks.MetricsHook._record = recorded
sys.exit(cli.run(train.main, argv))
"""
)


def start(code, moment, then, *argv, repeat_seconds=600.0):
    """Start a process in which signals count as one within some seconds; return it once its main thread is stuck."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(repeat_seconds), moment, then, *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    read_until(process.stdout, "stuck", process)
    return process


def read_until(stream, text, process):
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} was not printed: {lines} {process.stderr.read()}")


def words(workdir):
    options = {**TINY, "ckpt_steps": 100}
    return ["--config", "vit_digits", "--workdir", str(workdir), *(f"--config.{k}={v}" for k, v in options.items())]


def stop(process, number=signal.SIGTERM, status=preemption.SAVED):
    """Send a signal twice, as `timeout` does (to the process and to its group); return what is printed on stderr."""
    for _ in range(2):
        process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status, err
    assert "Traceback" not in err
    return err


def end(process, first, second, status):
    """Send a signal and, while the process saves, another one; return what is printed on stderr after the first."""
    process.send_signal(first)
    read_until(process.stderr, f"{preemption.NAMES[first]}: saving and stopping", process)
    time.sleep(0.5)  # longer than `REPEAT_SECONDS`
    process.send_signal(second)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status, err
    return err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "number", "status", "again"),
    [
        ("stays", signal.SIGTERM, 75, ""),
        ("raises", signal.SIGTERM, 75, ""),
        ("stays", signal.SIGINT, 130, "; press Ctrl-C again to end without saving"),
        ("stays", signal.SIGHUP, 75, ""),  # of a terminal that is closed
    ],
)
def test_stop_is_completed_in_any_state_of_the_main_thread(hangup, then, number, status, again):
    err = stop(start(LISTENING, "ending", then), number, status)
    name = preemption.NAMES[number]
    assert err.splitlines() == [
        f"{name}: saving and stopping{again}",
        f"stopped by {name}: step 3 is saved; re-run the same command to resume",
    ]


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with preemption.Preemption():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGINT, 130),
    ],
)
def test_second_signal_ends_the_process_while_it_saves(first, second, status):
    err = end(start(LISTENING, "never saved", "stays", repeat_seconds=0.1), first, second, status)
    assert err == f"ended by {preemption.NAMES[second]} before the run was saved\n"


@pytest.mark.slow
def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with preemption.Preemption() as listening:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert listening.listener.is_alive()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not listening.listener.is_alive()


@pytest.mark.slow
def test_training_that_is_stopped_in_an_evaluation_is_saved(tmp_path):
    workdir = tmp_path / "run"
    err = stop(start(TRAINING, "evaluating", "stays", *words(workdir)))
    assert saved_steps(workdir) == [3]
    assert restoring.latest(workdir) == 3
    assert "step 3 is saved" in err
