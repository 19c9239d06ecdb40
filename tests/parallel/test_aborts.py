"""JAX's report about a lost process becomes one line; everything else that is written to stderr is passed on."""

import signal
import subprocess
import sys

import pytest

POLLED = b"E1122 12:41:53.835220   15054 coordination_service_agent.cc:289] Polled an error from coordination service\n"
CLOSED = (
    POLLED + b"F1122 12:41:53.835777   15054 client.h:80] Terminating process\n*** Check failure stack trace: ***\n"
)
UNHEALTHY = (
    b"E1122 12:42:43.601186   16182 coordination_service.cc:1549] Use error polling: UNAVAILABLE: The following tasks "
    b"are unhealthy (stopped sending heartbeats):\n3\nThe tasks have crashed.\n" + CLOSED
)
FOREIGN = b"F1122 12:42:43.601186   16182 literal.cc:7] Check failed: a == b\n*** Check failure stack trace: ***\n"


def run(tmp_path, text, end):
    """Write a line and a text to file descriptor 2 of a process with a relay, end it; return (status, stderr)."""
    (tmp_path / "text").write_bytes(text)
    script = (
        "import os, pathlib, sys\n"
        "from dcvit.parallel.aborts import StderrRelay\n"
        "relay = StderrRelay(lambda: os._exit(1))\n"
        "print('first', file=sys.stderr, flush=True)\n"
        "os.write(2, pathlib.Path('text').read_bytes())\n" + end
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("report", "process"), [(CLOSED, 0), (UNHEALTHY, 3)])
def test_abort_because_of_a_lost_process_is_one_line(tmp_path, report, process):
    assert run(tmp_path, report, "os.abort()") == (
        1,
        f"first\nerror: stopped because process {process} was lost\n".encode(),
    )


def test_other_abort_keeps_its_output_and_its_status(tmp_path):
    assert run(tmp_path, FOREIGN, "os.abort()") == (-6, b"first\n" + FOREIGN)


@pytest.mark.parametrize("drop", [False, True])
def test_report_without_abort_is_passed_on_unless_it_is_dropped(tmp_path, drop):
    assert run(tmp_path, CLOSED, f"relay.close(drop_report={drop})") == (0, b"first\n" + (b"" if drop else CLOSED))


@pytest.mark.exhaustive
def test_report_is_passed_on_after_some_seconds_without_abort(tmp_path):
    assert run(tmp_path, CLOSED, "import time; time.sleep(6); os.kill(os.getpid(), 9)") == (-9, b"first\n" + CLOSED)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_last_lines_of_a_process_that_crashes_are_not_lost(tmp_path, number):
    assert run(tmp_path, FOREIGN, f"os.kill(os.getpid(), {int(number)})") == (-number, b"first\n" + FOREIGN)


def test_code_that_holds_the_interpreter_lock_can_write_more_than_a_pipe_holds(tmp_path):
    end = "import ctypes; ctypes.PyDLL(None).write(2, b'x' * 200_000, 200_000); relay.close()"
    assert run(tmp_path, b"", end) == (0, b"first\n" + b"x" * 200_000)


def test_long_output_is_complete(tmp_path):
    text = b"x" * 300_000
    assert run(tmp_path, text, "relay.close()") == (0, b"first\n" + text)
