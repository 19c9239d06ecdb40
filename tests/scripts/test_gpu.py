"""Measurements on a GPU in a limited time, with few libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import evidence
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "LEAST", 0)
    write = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['WORD'] + str(len(sys.argv)))"
    parts = [
        evidence.Part("hangs", ("-c", "import time; time.sleep(99)"), 1),
        evidence.Part("fails", ("-c", "raise SystemExit(3)"), 9),
        evidence.Part("lacks", ("-c", ""), 9, needs="no_such_module"),
        evidence.Part("writes", ("-c", write, "{out}/written"), 9, ("--rounds", "0"), "env", ("env", "WORD=a")),
    ]
    rows = evidence.measure(parts, tmp_path / "out", minutes=1)
    assert [(row["part"], row["state"].split()[0]) for row in rows] == [
        ("writes, compiling", "done"), ("hangs", "stopped"), ("fails", "failed"), ("lacks", "not"), ("writes", "done"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == rows
    assert (tmp_path / "out" / "written").read_text() == "a2"


IMPORTS = """
import sys
for name in ("ml_collections", "clu", "tensorflow", "tensorflow_datasets", "sklearn", "scipy", "PIL"):
    sys.modules[name] = None
import dcmha, train, evidence, dcvit.check_kernels, equal_time
"""


@pytest.mark.exhaustive
def test_the_tools_for_gpus_need_jax_flax_and_optax_only():
    """A machine with a GPU may have no more."""
    path = {"PYTHONPATH": f"{ROOT}/scripts/bench:{ROOT}/scripts/gpu:{ROOT}"}
    subprocess.run([sys.executable, "-c", IMPORTS], env={**os.environ, **path}, check=True)
