"""Signals: SIGTERM saves and ends the run with 75 whatever it is at, a second one or Ctrl-C ends it at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import TINY

from dcvit.checkpoint.checkpointer import Checkpointer
from dcvit.checkpoint.steps import saved_steps
from dcvit.runs import metrics, preemption

# A run whose main thread, at a given moment, says so and then
#   stays      never comes back to Python: it waits for a mutex that it holds, in C, which no signal interrupts
#   returns, raises    comes back as soon as a stop has begun, while that stop saves slowly
STUCK = """
import ctypes, sys, time
from dcvit import cli, train
from dcvit.checkpoint.checkpointer import Checkpointer
from dcvit.training import trainer as loop
moment, then, argv = sys.argv[1], sys.argv[2], sys.argv[3:]
run = None
def stick(*_, **__):
    print("stuck", flush=True)
    if then == "stays":
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    while run.limit is None:
        time.sleep(0.001)
    if then == "raises":
        raise RuntimeError("failed while stopping")
if then != "stays":
    save = Checkpointer.save
    Checkpointer.save = lambda *args, **kwargs: (time.sleep(2), save(*args, **kwargs))
from dcvit.training import hooks
real_run, real = loop.Trainer.run_steps, hooks.MetricsHook._record
def start(self, *args):
    global run
    run = self
    return real_run(self, *args)
loop.Trainer.run_steps = start
if moment == "evaluating":
    def record(self, step, *rest):
        if step == 3:
            stick()
        return real(self, step, *rest)
    hooks.MetricsHook._record = record
elif moment == "waiting for data":
    prefetch = loop.prefetch
    def slow(*args):
        for number, batch in enumerate(prefetch(*args), start=1):
            if number == 5:
                stick()
            yield batch
    loop.prefetch = slow
elif moment == "compiling":
    loop.jit_update = lambda *_: type("Update", (), {"lower": stick})()
elif moment == "in a step":
    jit_update = loop.jit_update
    def failing(*args):
        update = jit_update(*args)
        def lower(*shapes):
            compiled = update.lower(*shapes).compile()
            def step(state, batch):
                if int(state.step) == 3:
                    stick()
                return compiled(state, batch)
            return type("Lowered", (), {"compile": lambda self: step})()
        return type("Update", (), {"lower": staticmethod(lower)})()
    loop.jit_update = failing
elif moment == "ending":
    ended = loop.Trainer.run_steps
    def end(self, *args):
        row = ended(self, *args)
        stick()
        return row
    loop.Trainer.run_steps = end
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


STOPS = [
    ("evaluating", "stays", 3),
    ("waiting for data", "stays", 4),
    ("compiling", "stays", None),
    ("evaluating", "returns", 3),
    ("evaluating", "raises", 3),
    ("waiting for data", "raises", 4),
    ("in a step", "raises", 3),
    ("ending", "returns", 6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "then", "saved"), STOPS)
def test_a_stop_saves_and_exits_with_75_whatever_the_main_thread_does(tmp_path, moment, then, saved):
    workdir = tmp_path / "run"
    process = start(STUCK, moment, then, *words(workdir))
    until(process, "stuck")
    for _ in range(2):  # as `timeout` does, to the child and to its group
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    _, err = process.communicate(timeout=120)
    assert process.returncode == preemption.SAVED, err
    assert saved_steps(workdir) == ([saved] if saved else [])
    assert Checkpointer(workdir).latest() == saved
    assert (f"step {saved} is saved" if saved else "no step was completed") in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_nobody_need_read_what_it_says(tmp_path):
    """As where Ctrl-C or a signal to the group ends `tee`, too."""
    workdir = tmp_path / "run"
    process = start(STUCK, "waiting for data", "stays", *words(workdir))
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
    code = (
        "from dcvit.training import trainer as loop; import time; loop.Trainer.stop = lambda self: time.sleep(60);"
        + textwrap.dedent(STUCK)
    )
    workdir = tmp_path / "run"
    process = start(code, "waiting for data", "stays", *words(workdir, ckpt_steps=1))
    until(process, "stuck")
    for number in sent:
        process.send_signal(number)
        time.sleep(preemption.AGAIN_SECONDS + 0.5)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status, err
    assert Checkpointer(workdir).latest() in (3, 4)
    assert metrics.read(workdir / "metrics.jsonl")[-1]["step"] == 4
    assert "Traceback" not in err


def test_handlers_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with preemption.Preemption() as listening:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert listening.listener.is_alive()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not listening.listener.is_alive()
