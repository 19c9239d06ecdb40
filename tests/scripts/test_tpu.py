"""Estimates by the TPU compiler: bundles of kernels, FLOPs, and cycles of a training step."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import cycles as tpu_cycles
import pytest

from dcvit.models.flops import training_flops
from dcvit.training.setup import load_setup

ROOT = Path(__file__).resolve().parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
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
    assert tpu_cycles.bundles(CONDITIONAL) == always + first + second
    assert tpu_cycles.bundles(CONDITIONAL, [1 / 8, 1 / 2]) == always + first / 8 + second / 2
    assert tpu_cycles.bundles(CONDITIONAL, [1, 1 / 8, 1 / 2]) == tpu_cycles.bundles(CONDITIONAL, [1 / 8, 1 / 2])
    negated = CONDITIONAL.replace("(%p2_p0)", "(!%p2_p0)").replace("(%p3_p0)", "(!%p3_p0)")
    short = negated.replace("sbr.rel (!%p4_p0) target = $region7", "smov 0")
    assert tpu_cycles.bundles(short, [1 / 8, 1 / 2]) == always + first / 8 + second / 2
    with pytest.raises(ValueError, match="2 conditional regions, but 1 conditions"):
        tpu_cycles.bundles(CONDITIONAL, [1 / 8])


@needs_libtpu
@pytest.mark.weekly
def test_a_step_is_compiled_with_all_kernels_and_its_products_have_the_flops_of_the_formula(
    library_promotion, tmp_path
):
    """The script fails unless it finds every conditional part of a kernel with several tiles."""
    plain = "vit_digits:attention=mha model.depth=2 model.implementation=reference"
    tiles = "lm_stdlib model.compose=both model.depth=1 model.num_heads=2 model.width=128 model.window=256"
    tiles += " input.data.context=1024 evals.validation.data.context=1024"
    configs = ["vit_digits:attention=dcmha model.depth=2", plain, tiles]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    words = ["--config", *configs, "--topology", "v5e:2x2", "--json", tmp_path / "rows.json"]
    command = [sys.executable, ROOT / "scripts/tpu/step.py", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "rows.json").read_text())
    kernels = [{name.partition(".")[0] for name in result["kernels"]} for result in results]
    assert kernels[:2] == [{"dcmha_forward", "dcmha_gradients"}, set()]
    assert kernels[2] == {
        "dcmha_matrices", "dcmha_forward", "dcmha_gradient_matrices", "dcmha_delta", "dcmha_gradients",
    }  # fmt: skip
    for result in results:
        assert math.isclose(sum(sum(row.values()) for row in result["table"].values()), result["cycles"])
        assert 0 < result["utilization"] <= 1
    setup = load_setup("vit_digits:attention=mha", ["model.depth=2"], stand_in=True)
    formula = training_flops(setup.model.module, setup.task.example) * results[1]["examples"]
    assert 0.95 < results[1]["matmul_flops"] / formula <= 1  # nothing needs the gradient of the images
