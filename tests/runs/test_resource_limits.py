"""A save that meets a limit of the system fails with one line, ends, and leaves the earlier checkpoint intact."""

import os
import subprocess
import sys

import pytest

from dcvit.runs import restoring

DRIVER = """
import os, pathlib, resource, sys, threading
import jax.numpy as jnp
from dcvit.runs.checkpointer import Checkpointer
from dcvit.errors import CheckpointError

folder, limit = pathlib.Path(sys.argv[1]), sys.argv[2]
checkpointer = Checkpointer(folder)
tree = {f"w{i}": jnp.full((300,), i) for i in range(40)}
checkpointer.save(1, {"params": tree}, {})
checkpointer.wait()
opened = len(os.listdir("/proc/self/fd"))
if limit == "FSIZE":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
elif limit.startswith("NOFILE"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + int(limit[6:]), opened + int(limit[6:])))
elif limit == "NPROC":
    start = threading.Thread.start
    def refuse(self):
        if self.name != "checkpoint":
            raise RuntimeError("can't start new thread")
        start(self)
    threading.Thread.start = refuse
try:
    checkpointer.save(2, {"params": tree}, {})
    checkpointer.close()
except CheckpointError as e:
    print(e)
    try:
        checkpointer.close()
    except CheckpointError:
        sys.exit(2)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("limit", ["FSIZE", "NOFILE0", "NOFILE1", "NOFILE2", "NPROC"])
def test_failed_save_is_one_line_without_traceback(tmp_path, limit):
    completed = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "run"), limit], capture_output=True, text=True, timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert completed.stderr == ""
    assert completed.stdout.startswith(f"cannot save step 2 to {tmp_path}/run/checkpoints: ")
    assert (completed.returncode, completed.stdout.count("\n")) == (2, 1)
    assert restoring.latest(tmp_path / "run") == 1
