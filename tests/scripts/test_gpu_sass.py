"""Counts from the machine code of a GPU kernel: loops, waits and bytes of shared memory."""

import pytest
import sass as gpu_sass

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


@pytest.mark.parametrize(("floats", "waits"), [(0, "2 (1), 1, 1"), (gpu_sass.HIDDEN, "2 (0), 1, 1")])
def test_a_sweep_is_a_loop_with_products_and_the_copies_of_one_warpgroup(floats, waits):
    lines = "".join("   -:-:-:Y:01        /*00d8*/                   FFMA R1, R2, R3, R4\n" for _ in range(floats))
    (loop,) = gpu_sass.sweeps(LOOP.replace("ARITHMETIC\n", lines))
    assert len(loop) == 17 + floats - 1  # one of the two copies
    assert gpu_sass.waits(loop) == waits
    products = 2 * 16 * (64 + 16) + 2 * 16 * 80  # the left operand of the second one is in registers
    assert gpu_sass.kilobytes(loop, 2) * 1024 == 2 * (products + 128 * (8 + 4 + 16))
