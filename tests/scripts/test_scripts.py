"""Benchmark scripts count schedules, compile every named model, and measure every implementation of attention."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import bundles as tpu_bundles
import compile_kernels
import dcmha as bench_dcmha
import evidence as gpu_evidence
import pytest
import train as bench_train

from dcvit.models.presets import PRESETS
from dcvit.models.vit import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
# A final schedule: three bundles outside of the inner loop, which has six bundles and runs three times.
SCHEDULE = """
     0x1   :  { %s4 = sld [smem:[#allocation0]] }
     0x2 LB: > { %p7_p0 = scmp.ge.s32.totalorder %s2_s1, 6 /* loop exit test */  ;;  %s9 = smov 0 }
     0x3   : > { %v1 = vld [vmem:[#allocation2]] }
     0x4 LB: >> { %p9_p1 = scmp.ge.s32.totalorder %s3_s2, 3 /* loop exit test */ }
     0x5   : >> { %10 = sbr.rel (!%p9_p1) target bundleno = 4 (0x4), region = 7 }
     0x6   : >> { %v2 = vadd.f32 %v1, %v1 }
     0x7   : >> { %v3 = vadd.f32 %v2, %v1 }
     0x8   : >> { %v4 = vadd.f32 %v3, %v1 }
     0x9   : >> { %v5 = vadd.f32 %v4, %v1 }
     0xa   : > { %11 = sbr.rel (!%p7_p0) target bundleno = 2 (0x2), region = 3 }
"""


def test_bundles_of_inner_loops_count_once_per_iteration():
    assert tpu_bundles.count(SCHEDULE) == 3 + 3 * 6


def test_bundles_of_nested_loops_count_once_per_iteration_of_both():
    around = """
     0x1   :  { %s4 = sld [smem:[#allocation0]] }
     0x2 LB: > { %s9 = smov 0 }
     0x3 LB: >> { %s9 = smov 0 }
     0x4 LB: >>> { %p9_p1 = scmp.ge.s32.totalorder %s3_s2, 3 /* loop exit test */ }
     0x5   : >>> { %10 = sbr.rel (!%p9_p1) target = $region7 }
     0x6   : >> { %v2 = vadd.f32 %v1, %v1 }
     0x7   : >> { %v2 = vadd.f32 %v1, %v1 }
     0x8   : >> { %v2 = vadd.f32 %v1, %v1 }
     0x9   : >> { %p7_p0 = scmp.ge.s32.totalorder (%p9_p1), %s2_s1, 8 /* loop exit test */ }
     0xa   : > { %11 = sbr.rel (!%p7_p0) target = $region3 }
     0xb   : > { %v2 = vadd.f32 %v1, %v1 }
     0xc   : > { %v2 = vadd.f32 %v1, %v1 }
     0xd   : > { %v2 = vadd.f32 %v1, %v1 }
     0xe   : > { %v2 = vadd.f32 %v1, %v1 }
"""
    assert tpu_bundles.count(around) == 1 + 8 * (1 + 3 * 6 + 1 + 4)


# The pipeline skips the kernel in the steps before the first block (region 8). It has conditions of two
# bundles and of six in an inner loop that runs three times; a branch of the pipeline (region 7) writes a block.
CONDITIONAL = """
     0x1   :  { %s4 = sld [smem:[#allocation0]] }
     0x2 LB: > { %s9 = smov 0 } /* Start region 9 */
     0x3   : > { %10 = sbr.rel (%p1_p0) target = $region8 }
     0x4   : > { %11 = sbr.rel (%p2_p0) target = $region5 }
     0x5   : > { %v1 = vld [vmem:[#allocation2]]
second_minor_factor: 1 */ }
     0x6   : > { %v2 = vadd.f32 %v1, %v1 }
     0x7 PF: > { %s3 = smov 0 } /* Start/End empty region 5 :: Start region 50 */
     0x8   : > { %12 = sbr.rel (%p3_p0) target = $region6 }
     0x9 LB: >> { %p9_p1 = scmp.ge.s32.totalorder %s3_s2, 3 /* loop exit test */ } /* Start region 4 */
     0xa   : >> { %13 = sbr.rel (!%p9_p1) target = $region4 }
     0xb   : >> { %v2 = vadd.f32 %v1, %v1 }
     0xc   : >> { %v3 = vadd.f32 %v2, %v1 }
     0xd   : >> { %v4 = vadd.f32 %v3, %v1 }
     0xe   : >> { %v5 = vadd.f32 %v4, %v1 }
     0xf PF: > { %14 = sbr.rel (!%p4_p0) target = $region7 } /* Start/End empty region 6 */
     0x10   : > { %v6 = vst [vmem:[#allocation3]] %v5 }
     0x11 PF: > { %s3 = smov 1 } /* Start/End empty region 7 :: Start/End empty region 8 */
     0x12   : > { %p7_p0 = scmp.ge.s32.totalorder %s2_s1, 6 /* loop exit test */ }
     0x13   : > { %15 = sbr.rel (!%p7_p0) target = $region9 }
"""


def test_conditional_parts_count_in_the_steps_that_execute_them():
    always, first, second = 10, 2, 3 * 6
    assert tpu_bundles.count(CONDITIONAL) == always + first + second
    assert tpu_bundles.count(CONDITIONAL, [1 / 8, 1 / 2]) == always + first / 8 + second / 2
    assert tpu_bundles.count(CONDITIONAL, [1, 1 / 8, 1 / 2]) == tpu_bundles.count(CONDITIONAL, [1 / 8, 1 / 2])
    with pytest.raises(ValueError, match="2 conditional regions, but 1 conditions"):
        tpu_bundles.count(CONDITIONAL, [1 / 8])


@pytest.mark.slow
def test_compiled_kernels_cover_every_named_model():
    models = {name for names in compile_kernels.shapes().values() for name in names}
    assert models == {*PRESETS, *(f"{kind}-{name}" for name in VARIANTS for kind in ("ViT", "DCViT"))}
    for shape, names in compile_kernels.shapes().items():
        plain = [name for name in names if not name.startswith("DC") or name.startswith("DCFlash")]
        assert plain == ([] if shape.composed else names), shape
        assert shape.queries in (1, shape.keys)
        grouped = [name for name in names if name.startswith("DCFlash")]
        assert grouped == (names if shape.key_heads < shape.heads else []), shape
        assert shape.heads == (4 if grouped else 1) * shape.key_heads
    for composed in (True, False):
        batches = {s.batch for s, names in compile_kernels.shapes().items() if f"{'DC' * composed}ViT-S" in names}
        assert batches == {4, 64}


@pytest.mark.weekly
@pytest.mark.parametrize(
    "shape", [bench_dcmha.Shape(1, 8, 2, 8, causal=True), bench_dcmha.Shape(1, 8, 2, 8, step=True)]
)
def test_table_of_attention_compares_every_implementation_with_plain_attention(shape):
    rows = bench_dcmha.table("tiny", shape, rounds=2)
    ours = "decode" if shape.step else "blockwise"
    assert {row["row"] for row in rows} == {
        "plain, XLA", "plain, jax.nn", "DC, reference", f"plain, {ours}", f"DC, {ours}", "grouped, best",
        "folded, best", "DC weights", "folded weights", "combine, sum", "combine, product",
    }  # fmt: skip
    assert all(math.isfinite(row["ratio"]) and row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)


@pytest.mark.slow
def test_table_of_attention_skips_rows_that_need_too_much_memory(monkeypatch, capsys):
    """Plain attention is always measured, because the other rows are divided by it."""
    monkeypatch.setattr(bench_dcmha, "limit", lambda: -1)
    rows = bench_dcmha.table("tiny", bench_dcmha.Shape(1, 8, 2, 8, step=True), rounds=1)
    assert {row["row"] for row in rows} == {"plain, XLA"}
    assert capsys.readouterr().out.count("GiB of temporary memory") == 10


@pytest.mark.parametrize("build", [bench_train.vision(1, "float32"), bench_train.language("405M", 2, 1, "float32")])
@pytest.mark.parametrize(("composed", "plain"), [("DC, best", "plain, best"), ("folded, best", "grouped, best")])
def test_the_rows_of_a_ratio_differ_in_the_composition_only(build, composed, plain):
    """Windows, QK-norm, key heads and rematerialization would change the time, too."""
    first, second = (build(bench_train.ROWS[row])[0] for row in (composed, plain))
    fields = {name for name in vars(first) if not name.startswith("_") and name not in ("parent", "name")}
    differing = {name for name in fields if getattr(first, name) != getattr(second, name)}
    assert "compose" in differing
    assert differing <= {"compose", "branches", "groups", "static"}


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_evidence, "LEAST", 0)
    write = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['WORD'] + str(len(sys.argv)))"
    parts = [
        gpu_evidence.Part("hangs", ("-c", "import time; time.sleep(99)"), 1),
        gpu_evidence.Part("fails", ("-c", "raise SystemExit(3)"), 9),
        gpu_evidence.Part("lacks", ("-c", ""), 9, needs="no_such_module"),
        gpu_evidence.Part("writes", ("-c", write, "{out}/written"), 9, ("--rounds", "0"), "env", ("env", "WORD=a")),
    ]
    rows = gpu_evidence.measure(parts, tmp_path / "out", minutes=1)
    assert [(row["part"], row["state"]) for row in rows] == [
        ("writes, compiling", "done"), ("hangs", "stopped after 1 s"), ("fails", "failed with status 3"),
        ("lacks", "not run: no_such_module is not installed"), ("writes", "done"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == rows
    assert (tmp_path / "out" / "written").read_text() == "a2"
    assert gpu_evidence.measure(parts[3:], tmp_path / "late", minutes=0)[-1]["state"] != "done"


BENCHMARKS = """
import sys
for name in ("ml_collections", "clu", "tensorflow", "tensorflow_datasets", "sklearn", "scipy", "PIL"):
    sys.modules[name] = None
import dcmha, train, equal_time, evidence, dcvit.check_kernels, dcvit.reproduction.rounds
"""


@pytest.mark.slow
def test_the_benchmarks_need_jax_flax_and_optax_only():
    """A machine with a GPU may have no more."""
    path = {"PYTHONPATH": f"{ROOT}/scripts/bench:{ROOT}/scripts/gpu:{ROOT}"}
    subprocess.run([sys.executable, "-c", BENCHMARKS], env={**os.environ, **path}, check=True)
