"""Counts of instructions in the machine code of a GPU kernel, and measurements in a limited time with few libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import evidence
import pytest
import sass

ROOT = Path(__file__).resolve().parents[2]

# A wait in a small loop, inside a sweep with a conditional copy and a product.
LOOP = """
.L_x_1:
   -:-:-:Y:02        /*0010*/                   NOP
.L_x_2:
   -:-:1:Y:02        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR9], R5
   1:-:-:Y:05        /*0030*/              @!P4 BRA `(.L_x_2)
   -:-:-:Y:11        /*0040*/               @P2 BRA `(.L_x_3)
   -:1:-:Y:01        /*0050*/                   @UP0 UTMALDG.4D [UR40], [UR12]
.L_x_3:
   -:-:-:Y:01        /*0060*/                   HGMMA.64x16x16.F32.BF16 R64, gdesc[UR8], RZ, !UPT
   -:-:-:Y:05        /*0070*/               @P1 BRA `(.L_x_1)
   -:-:-:Y:01        /*0080*/                   FADD R1, R2, R3
"""


def test_a_sweep_is_a_loop_with_products():
    (names,) = sass.sweeps(LOOP)
    assert names == {"NOP": 1, "SYNCS": 1, "BRA": 3, "UTMALDG": 1, "HGMMA": 1}


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
