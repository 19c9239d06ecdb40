"""`tests/robustness/chaos.py` and `tests/robustness/corrupt.py` with few interruptions and mutations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent


def script(name, *words):
    process = subprocess.run(
        [sys.executable, FOLDER / name, *words], capture_output=True, text=True, cwd=FOLDER.parents[1],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.weekly
@pytest.mark.parametrize(("processes", "model"), [("1", "vit"), ("2", "vit, 2 processes")])
def test_interrupted_run_has_the_result_of_an_uninterrupted_one(processes, model):
    kills = "2" if processes == "1" else "1"  # half a minute passes until the others notice it
    words = ("--processes", processes, "--kills", kills, "--terms", "1", "--interrupts", "1", "--seed", "3")
    header, _, row = script("chaos.py", *words).splitlines()
    names, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, row))
    found = dict(zip(names, cells, strict=True))
    assert [found[name] for name in ("model", "SIGKILL", "SIGTERM", "SIGINT")] == [model, kills, "1", "1"]
    assert [found[name] for name in ("SIGTERM, SIGINT lost", "differences")] == ["0", "none"]


@pytest.mark.weekly
def test_every_mutation_of_a_workdir_is_reported_or_without_effect():
    counts = json.loads(script("corrupt.py", "--mutations", "24"))
    assert counts["mutations"] == 24
    assert (counts["silent"], counts["hangs"], counts["other failures"]) == (0, 0, 0)
    assert counts["kinds"].keys() == {
        "bit flip", "truncation", "deletion", "swap", "exchange", "rename", "link"
    }  # fmt: skip
