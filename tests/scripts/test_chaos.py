"""scripts/chaos.py and scripts/corrupt.py with few disturbances."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name, *words):
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, *words], capture_output=True, text=True, cwd=SCRIPTS.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_disturbed_run_ends_as_an_undisturbed_one():
    row = script("chaos.py", "--model", "vit", "--kills", "3", "--terms", "2", "--seed", "3").splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["vit", "3", "2"]
    assert cells[5:7] == ["0", "none"]  # steps lost by SIGTERM, differences


@pytest.mark.exhaustive
def test_every_mutation_of_a_checkpoint_is_reported():
    counts = json.loads(script("corrupt.py", "--mutations", "24"))
    assert counts["mutations"] == 24
    assert (counts["silent"], counts["hangs"], counts["other failures"]) == (0, 0, 0)
    assert len(counts["kinds"]) == 4
