"""The lock of a local workdir."""

import fcntl
import os
import subprocess
import sys

import pytest

from dcvit.errors import ConfigError
from dcvit.runs.workdir import LOCK, WorkdirLock

HOLD = """
import sys
from pathlib import Path
from dcvit.runs.workdir import WorkdirLock
with WorkdirLock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_refused_by_name_until_the_first_is_killed(tmp_path):
    call = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"workdir {tmp_path} is in use by process {process.pid} on "):
            WorkdirLock(tmp_path)
        process.kill()
    assert (tmp_path / LOCK).read_text().startswith(f"process {process.pid} on ")
    with WorkdirLock(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_folder_that_cannot_be_locked_is_one_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=f"workdir {tmp_path} cannot be locked: No locks available"):
        WorkdirLock(tmp_path)
