"""`scripts/chaos.py` and `scripts/corrupt.py` with few interruptions and mutations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name, *words):
    process = subprocess.run(
        [sys.executable, SCRIPTS / name, *words], capture_output=True, text=True, cwd=SCRIPTS.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.exhaustive
def test_interrupted_run_has_the_result_of_an_uninterrupted_one():
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
