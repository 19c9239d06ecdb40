"""Counts from the machine code of a GPU kernel, and measurements in a limited time with few libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import evidence
import pytest
import sass

ROOT = Path(__file__).resolve().parents[2]

# A wait for a slot of the ring in a small loop, copies of either warpgroup, and products before arithmetic.
LOOP = """
.L_x_1:
   -:-:-:Y:02        /*0010*/                   NOP
.L_x_2:
   -:-:1:Y:02        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR9], R5
   1:-:-:Y:05        /*0030*/              @!P4 BRA `(.L_x_2)
   -:-:-:Y:11        /*0040*/               @P2 BRA `(.L_x_3)
   -:1:-:Y:01        /*0050*/                   @UP0 UTMALDG.4D [UR40], [UR12]
.L_x_3:
   -:-:-:Y:11        /*0060*/               @P3 BRA `(.L_x_4)
   -:1:-:Y:01        /*0070*/                   @UP0 UTMALDG.4D [UR48], [UR12]
.L_x_4:
   -:-:-:Y:01        /*0080*/                   HGMMA.64x16x16.F32.BF16 R64, gdesc[UR8], RZ, !UPT
   -:-:-:Y:01        /*0090*/                   HGMMA.64x80x16.F32.BF16 R24, R96, gdesc[UR8].tnspB, R24, gsb0
   -:-:-:Y:04        /*00a0*/                   LDS.64 R42, [R102+UR26+0x200]
   -:-:-:Y:04        /*00b0*/              @!PT LDS RZ, [RZ]
   -:-:-:Y:04        /*00c0*/                   STS [R214+UR25+0x6820], R97
   -:-:-:Y:04        /*00d0*/                   STSM.16.M88.4 [R223+0x100], R12
ARITHMETIC
   -:-:-:Y:05        /*00e0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x2
   -:-:-:Y:05        /*00f0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0
   5:1:-:Y:06        /*0100*/                   BAR.SYNC.DEFER_BLOCKING R98, 0x80
   -:-:-:Y:05        /*0110*/               @P1 BRA `(.L_x_1)
   -:-:-:Y:01        /*0120*/                   FADD R1, R2, R3
"""


@pytest.mark.parametrize(("floats", "waits"), [(0, "2 (1), 1, 1"), (sass.HIDDEN, "2 (0), 1, 1")])
def test_a_sweep_is_a_loop_with_products_and_the_copies_of_one_warpgroup(floats, waits):
    lines = "".join("   -:-:-:Y:01        /*00d8*/                   FFMA R1, R2, R3, R4\n" for _ in range(floats))
    (loop,) = sass.sweeps(LOOP.replace("ARITHMETIC\n", lines))
    assert len(loop) == 17 + floats - 1  # one of the two copies
    assert sass.waits(loop) == waits
    products = 2 * 16 * (64 + 16) + 2 * 16 * 80  # the left operand of the second one is in registers
    assert sass.kilobytes(loop, 2) * 1024 == 2 * (products + 128 * (8 + 4 + 16))


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
import dcmha, train, evidence, dcvit.check_kernels, rounds, equal_time
"""


@pytest.mark.slow
def test_the_tools_for_gpus_need_jax_flax_and_optax_only():
    """A machine with a GPU may have no more."""
    path = {"PYTHONPATH": f"{ROOT}/scripts/bench:{ROOT}/scripts/gpu:{ROOT}"}
    subprocess.run([sys.executable, "-c", IMPORTS], env={**os.environ, **path}, check=True)
