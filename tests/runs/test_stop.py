"""Stop signals end a run at a step boundary, with a checkpoint; a second signal and a hang end the process at once.

The tests wait for events, not for times: the processes print lines when they reach a state.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from marks import exhaustive
from trained_workdirs import TINY

from dcvit import train
from dcvit.runs import restoring, stop
from dcvit.runs.checkpointer import Checkpointer
from dcvit.runs.steps import saved_steps

TIMEOUT = 300  # of one process
IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
HANGS_UP = pytest.mark.skipif(IGNORED, reason="SIGHUP is ignored, as by nohup, and a run then continues")

# The main thread prints "stuck". Before training it waits; in training it blocks on a mutex that it holds, so that it
# executes no more Python code, as in a compilation.
LISTENING = """
import contextlib, ctypes, sys, time
from dcvit import cli
from dcvit.runs import stop
stop.REPEAT_SECONDS = 0.1
def main(_):
    with stop.StopSignals() as signals, signals.training() if sys.argv[1] == "training" else contextlib.nullcontext():
        print("stuck", flush=True)
        if sys.argv[1] == "training":
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
        time.sleep(600)
sys.exit(cli.run(main))
"""
TRAINING = """
import sys
from dcvit import cli, train
from dcvit.training import hooks
record = hooks.MetricsHook._record
def recorded(self, step, *rest):
    if step == 2:
        print("stuck", flush=True)
        sys.stdin.readline()
    return record(self, step, *rest)
hooks.MetricsHook._record = recorded
sys.exit(cli.run(train.main, sys.argv[1:]))
"""


def start(code, *argv):
    """Start a process; return it once its main thread is stuck."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "stuck" in line:
            return process
    pytest.fail(f"{lines} {process.stderr.read()}")


def end(process, status):
    """Return what a process prints on stderr until it ends with a status."""
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status, err
    assert "Traceback" not in err
    return err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "again"),
    [
        (signal.SIGTERM, 75, ""),
        pytest.param(signal.SIGHUP, 75, "", marks=[pytest.mark.exhaustive, HANGS_UP]),  # of a terminal that is closed
        pytest.param(signal.SIGINT, 130, "; press Ctrl-C again to end without saving", marks=pytest.mark.exhaustive),
    ],
)
def test_signal_in_an_evaluation_saves_the_run_after_it(tmp_path, number, status, again):
    workdir = tmp_path / "run"
    options = {**TINY, "ckpt_steps": 100}
    words = [f"--config.{key}={value}" for key, value in options.items()]
    process = start(TRAINING, "--config", "vit_digits", "--workdir", str(workdir), *words)
    for _ in range(2):  # as `timeout` does: to the process and to its group
        process.send_signal(number)
    name = stop.NAMES[number]
    err = end(process, status)  # it also closes stdin, on which the process waits
    assert err.splitlines() == [
        f"{name}: stopping before the next step, if there is one{again}",
        f"stopped by {name}: step 2 is saved; re-run the same command to resume",
    ]
    assert saved_steps(workdir) == [restoring.latest(workdir)] == [2]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), exhaustive(signal.SIGINT, 130)])
def test_second_signal_ends_the_process_at_once(number, status):
    process = start(LISTENING, "training")
    process.send_signal(number)
    time.sleep(1)  # longer than `REPEAT_SECONDS`
    process.send_signal(number)
    assert f"ended by {stop.NAMES[number]} before the run was saved\n" in end(process, status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM: nothing to save; re-run the same command to resume\n"),
        exhaustive(signal.SIGINT, 130, "interrupted\n"),
    ],
)
def test_signal_before_training_ends_the_command(number, status, line):
    process = start(LISTENING, "before")
    process.send_signal(number)
    assert end(process, status) == line


def test_handlers_are_restored_and_nohup_is_respected():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.StopSignals() as signals:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert {number: signal.getsignal(number) for number in before} == before
    assert not signals.listener.is_alive()


@pytest.mark.slow
def test_hang_ends_the_process_with_all_stacks_although_it_holds_the_interpreter_lock():
    code = "import ctypes\nfrom dcvit.runs.stop import Watchdog\nWatchdog(0.5)\nctypes.PyDLL(None).sleep(600)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert 'File "<string>", line 4' in done.stderr


@pytest.mark.usefixtures("library_promotion")
def test_signal_after_the_last_step_changes_nothing_and_starts_no_further_seed(tmp_path, monkeypatch, capsys):
    close = Checkpointer.close

    def closed(checkpointer):
        os.kill(os.getpid(), signal.SIGTERM)
        close(checkpointer)

    monkeypatch.setattr(Checkpointer, "close", closed)
    words = [f"--config.{key}={value}" for key, value in {**TINY, "total_steps": 1, "evals": "{}"}.items()]
    with pytest.raises(SystemExit) as stopped:
        train.main(["--config", "vit_digits", "--workdir", str(tmp_path), "--seeds", "0,1", *words])
    assert stopped.value.code == stop.SAVED
    assert "stopped by SIGTERM: seed 1 has not started" in capsys.readouterr().err
    assert saved_steps(tmp_path / "seed0") == [1]
    assert not (tmp_path / "seed1").exists()


def test_progress_restarts_the_watchdog_and_closing_ends_it(monkeypatch):
    calls = []
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(stop.faulthandler, name, lambda *args, name=name, **_: calls.append((name, *args)))
    watchdog = stop.Watchdog(0.5)
    watchdog.progress()
    watchdog.close()
    assert calls == [*[("dump_traceback_later", 0.5)] * 2, ("cancel_dump_traceback_later",)]
    calls.clear()
    watchdog = stop.Watchdog(0)
    watchdog.progress()
    watchdog.close()
    assert not calls
