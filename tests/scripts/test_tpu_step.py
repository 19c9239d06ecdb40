"""The estimate of a training step by the TPU compiler: cycles of a program's text, FLOPs, parts, kinds, kernels."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import bundles as tpu_bundles
import cycles as tpu_cycles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step as tpu_step
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcvit.models.flops import training_flops
from dcvit.parallel import hlo, topologies
from dcvit.training import aot
from dcvit.training.setup import load_setup

ROOT = Path(__file__).resolve().parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
MODEL = "jit(update)/transpose(jvp(ViT))/Transformer/encoderblock_0/"
ATTEND = MODEL + "MultiHeadDotProductAttention_0/MultiHeadDotProductAttention_0.attend/"


def estimated(cycles):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


def kernel(number, body):
    return (
        f"  %dcmha_forward.{number} = f32[8,128]{{1,0:T(8,128)}} custom-call(%p), "
        f'custom_call_target="tpu_custom_call", metadata={{op_name="{ATTEND}shard_map/pallas_call"}}, '
        f'backend_config={{"custom_call_config":{{"body":"{body}"}}}}\n'
    )


# A loop of three products and a copy, after a pad in VMEM and two calls of a kernel, one with a pad fused into it.
TEXT = f"""HloModule jit_update, is_scheduled=true

FileNames
1 "/home/me/packing.py"
2 "/home/me/losses.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=64 end_line=64 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=43 end_line=43 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=1}}

%product (a: f32[16,32], b: f32[32,64]) -> f32[16,64] {{
  %a = f32[16,32]{{1,0:T(8,128)}} parameter(0)
  %b = f32[32,64]{{1,0:T(8,128)}} parameter(1)
  %c = f32[16,64]{{1,0:T(8,128)}} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %n = f32[16,64]{{1,0:T(8,128)}} negate(%c)
}}

%narrow (a: f32[64,16]) -> bf16[16,64] {{
  %a = f32[64,16]{{1,0:T(8,128)}} parameter(0)
  %t = f32[16,64]{{0,1:T(8,128)}} transpose(%a), dimensions={{1,0}}
  ROOT %n = bf16[16,64]{{1,0:T(8,128)(2,1)}} convert(%t)
}}

%padded (p: f32[8,100]) -> f32[8,128] {{
  %pad.2 = f32[8,128]{{1,0:T(8,128)}} pad(%p, %z)
{kernel(3, "AAAA")}}}

%body (t: (s32[], f32[16,32])) -> (s32[], f32[16,32]) {{
  %x = f32[16,32]{{1,0:T(8,128)}} get-tuple-element(%t), index=1
  %w = f32[32,64]{{1,0:T(8,128)}} constant(0)
  %f = f32[16,64]{{1,0:T(8,128)}} fusion(%x, %w), calls=%product, metadata={{op_name="{MODEL}MlpBlock_0/dot"}}, {estimated(100)}
  %g = bf16[16,64]{{1,0:T(8,128)(2,1)}} fusion(%f), calls=%narrow, metadata={{op_name="{MODEL}LayerNorm_1/t"}}, {estimated(10)}
}}

%cond (t: (s32[], f32[16,32])) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant(3)
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %bound), direction=LT
}}

%never (t: f32[8,128]) -> f32[8,128] {{
  ROOT %r = f32[8,128]{{1,0:T(8,128)}} copy(%t), {estimated(10**9)}
}}

ENTRY %main (p: f32[8,100], q: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,100]{{1,0:T(8,128)S(1)}} parameter(0)
  %pad.1 = f32[8,128]{{1,0:T(8,128)}} pad(%p, %z), metadata={{op_name="{ATTEND}shard_map/jit(_pad)/pad" stack_frame_id=1}}, {estimated(7)}
{kernel(1, "AAAA")}  %dcmha_forward.2 = f32[8,128]{{1,0:T(8,128)}} fusion(%p), calls=%padded, metadata={{op_name="{ATTEND}shard_map/pallas_call"}}
  %w = (s32[], f32[16,32]) while(%t), condition=%cond, body=%body
  %mix = f32[8]{{0:T(128)}} add(%q, %q), metadata={{op_name="jit(update)/add" stack_frame_id=2}}, {estimated(4)}
  ROOT %s = f32[8]{{0:T(128)}} add(%q, %q), metadata={{op_name="jit(update)/add" stack_frame_id=1}}, {estimated(5)}
}}
"""  # noqa: E501

# A final schedule: two bundles of a loop over a grid of four steps, whose pipeline has two more.
SCHEDULE = """
     0x2 LB: > { %p7_p0 = scmp.ge.s32.totalorder %s2_s1, 6 /* loop exit test */  ;;  %s9 = smov 0 }
     0xa   : > { %11 = sbr.rel (!%p7_p0) target bundleno = 2 (0x2), region = 3 }
"""


def test_cycles_count_as_often_as_the_loop_runs_and_go_to_part_and_kind():
    found = {cost.name: cost for cost in tpu_cycles.costs(TEXT, {"dcmha_forward.1": 50.0})}
    assert {name: (cost.part, cost.kind, cost.cycles, cost.times) for name, cost in found.items()} == {
        "f": ("MLP", "matmul", 300, 3),
        "g": ("norms and residuals", "relayout", 30, 3),
        "pad.1": ("attention core", "relayout", 7, 1),
        "dcmha_forward.1": ("attention core", "kernel", 50, 1),
        "dcmha_forward.2": ("attention core", "kernel", 50, 1),  # has the body of the other one
        "mix": ("input", "elementwise", 4, 1),
        "s": ("optimizer", "elementwise", 5, 1),
    }
    assert found["f"].flops == 3 * 2 * 16 * 32 * 64
    assert found["g"].moved == 3 * (2 + 2) * 16 * 64
    assert found["pad.1"].moved == 4 * 8 * 128  # it reads VMEM
    assert found["pad.1"].source == "packing.py:64"


def test_a_kernel_takes_at_least_the_time_of_its_arrays_in_hbm():
    kernels = {name: c for name, c in in_hbm(4.0).items() if c.kind == "kernel"}
    # 4 KiB of results each; the arguments of the first are in VMEM, those of the other one have no known place
    assert {name: c.cycles for name, c in kernels.items()} == {"dcmha_forward.1": 1024, "dcmha_forward.2": 1024}
    assert all(c.cycles == 50 for c in in_hbm(1000.0).values() if c.kind == "kernel")
    assert {c.schedule for c in kernels.values()} == {"dcmha_forward.1"}


def test_an_unknown_estimate_is_replaced_by_the_time_of_hbm():
    text = TEXT.replace(estimated(7), estimated(tpu_cycles.UNKNOWN))
    found = {cost.name: cost.cycles for cost in tpu_cycles.costs(text, {"dcmha_forward.1": 50.0}, 4.0)}
    assert found["pad.1"] == 4 * 8 * 128 / 4.0
    assert (found["mix"], found["s"]) == (4, 5)


def in_hbm(bytes_per_cycle):
    return {cost.name: cost for cost in tpu_cycles.costs(TEXT, {"dcmha_forward.1": 50.0}, bytes_per_cycle)}


def test_a_kernel_without_a_schedule_is_an_error():
    with pytest.raises(KeyError, match="no cycles of dcmha_forward"):
        tpu_cycles.costs(TEXT, {})


def test_estimate_adds_up_all_instructions():
    result = tpu_step.estimate(TEXT, {"dcmha_forward.1": SCHEDULE}, topologies.topology("v5e:2x2")[0], top=3)
    assert result["kernels"] == {"dcmha_forward.1": {"bundles": 2, "steps": 4, "calls": 2}}
    assert result["cycles"] == 300 + 30 + 7 + 2 * 8 + 4 + 5
    assert sum(sum(row.values()) for row in result["table"].values()) == result["cycles"]
    assert [cost["name"] for cost in result["costs"]] == ["f", "g", "dcmha_forward.1"]
    assert result["utilization"] == pytest.approx(2 * 16 * 32 * 64 / (100 * 4 * 2 * 128 * 128))
    result |= {"config": "a", "topology": "v5e:2x2", "examples": 2}
    assert tpu_step.markdown(result)[-1] == "| total | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 100.0% |"
    assert "dcmha_forward.1: 2 bundles × 4 steps × 2 calls" in tpu_step.notes(result)
    assert (
        tpu_step.comparison([result, result | {"cycles": 3 * result["cycles"]}])[-1] == "| of the first | 1.00 | 3.00 |"
    )


CONVOLUTIONS = {
    "padding": dict(window_strides=(2, 1), padding=((1, 2), (0, 3))),
    "holes": dict(window_strides=(1, 3), padding=((5, 0), (2, 3)), lhs_dilation=(1, 2), rhs_dilation=(2, 1)),
    "groups": dict(window_strides=(1, 1), padding="SAME", feature_group_count=2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flops_of_a_convolution_are_those_of_xla(name):
    """Products of many heads are convolutions with padding on TPUs, whose windows are mostly empty."""
    options = CONVOLUTIONS[name]
    features = 6 // options.get("feature_group_count", 1)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, **options, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    lowered = jax.jit(convolve).lower(jnp.zeros((2, 9, 8, 6)), jnp.zeros((3, 2, features, 4)))
    program, _ = hlo.computations(
        lowered.as_text(dialect="hlo").replace("ENTRY main.1 {", "ENTRY main.1 () -> f32[] {")
    )
    (instructions,) = program.values()
    shapes = {x.name: x.shape for x in instructions}
    expected = lowered.cost_analysis()["flops"]
    assert expected > 0
    assert sum(tpu_cycles.flops(x, shapes) for x in instructions) == expected


@needs_libtpu
@pytest.mark.weekly
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_estimates_of_a_scan_respect_the_hardware(topology):
    """Two layers in a scan: no product is faster than the matrix units, and no relayout faster than the memory."""
    layers, batch, width = 2, 4096, 1024
    chip, devices = aot.topology_devices(topology)
    place = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())

    def step(x, w):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return jax.lax.optimization_barrier(x.T).reshape(2, width // 2, batch).swapaxes(1, 2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=place) for s in [(batch, width), (layers, width, width)]]
    found = tpu_cycles.costs(jax.jit(step).lower(*shapes).compile().as_text(), {})
    products = [cost for cost in found if cost.kind == "matmul"]
    assert {cost.times for cost in products} == {layers}
    flops = sum(cost.flops for cost in products)
    assert flops == layers * 2 * batch * width**2
    assert 0.3 < flops / tpu_cycles.MXU[chip.name] / sum(cost.cycles for cost in products) <= 1
    relayouts = [cost for cost in found if cost.kind == "relayout" and cost.moved]
    assert relayouts
    clock = chip.peak / tpu_cycles.MXU[chip.name]
    assert all(cost.moved / tpu_cycles.HBM[chip.name] * clock <= cost.cycles for cost in relayouts)


@pytest.fixture
def tpu_step_rows(library_promotion, tmp_path):
    """Run the script in a process of its own; return its rows and its output."""

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
        command = [sys.executable, ROOT / "scripts/tpu/step.py", *words, "--json", tmp_path / "rows.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "rows.json").read_text()), done.stdout

    return run


@needs_libtpu
@pytest.mark.weekly
def test_script_compiles_a_step_with_kernels_and_writes_all_figures(tpu_step_rows):
    configs = ["vit_digits:attention=dcmha", "vit_digits:attention=mha model.implementation=reference"]
    words = ["--config", *configs, "--config.model.depth=2", "--topology", "v5e:2x2", "--top", "5"]
    (composed, plain), printed = tpu_step_rows(*words)
    steps = {name.partition(".")[0]: (kernel["steps"], kernel["calls"]) for name, kernel in composed["kernels"].items()}
    assert steps == dict.fromkeys(("dcmha_forward", "dcmha_gradients"), (composed["examples"], 2))
    assert not plain["kernels"]
    for result in (composed, plain):
        assert math.isclose(sum(sum(row.values()) for row in result["table"].values()), result["cycles"])
        assert 0 < result["utilization"] <= 1
        other = result["table"]["other"]  # mostly copies that the compiler inserts without the name of an operation
        assert other["matmul"] + other["elementwise"] < 0.05 * result["cycles"]
    setup = load_setup(configs[1].split()[0], ["model.depth=2"], stand_in=True)
    formula = training_flops(setup.model.module, setup.task.example) * plain["examples"]
    assert 0.95 < plain["matmul_flops"] / formula <= 1  # nothing needs the gradient of the images
    assert "| of the first | 1.00 |" in printed


@pytest.mark.weekly
@needs_libtpu
def test_conditions_of_compiled_kernels_are_counted(tpu_step_rows):
    """Kernels with several tiles skip those that no query attends to; the script fails unless it finds every part."""
    config = "lm_stdlib model.compose=both model.depth=1 model.num_heads=2 model.width=128 model.window=256"
    contexts = [f"--config.{data}.context=1024" for data in ("input.data", "evals.validation.data")]
    (result,), _ = tpu_step_rows("--config", config, "--topology", "v5e:2x2", *contexts)
    assert {name.partition(".")[0] for name in result["kernels"]} == {
        "dcmha_matrices", "dcmha_forward", "dcmha_gradient_matrices", "dcmha_delta", "dcmha_gradients",
    }  # fmt: skip


def test_shares_of_conditions_are_read_from_metadata_on_several_lines():
    stated = 'frontend_attributes={kernel_metadata={\n"conditions":"4 20 4",\n"steps":"64"\n}}, backend_config'
    text = TEXT.replace("backend_config", stated, 1)
    assert tpu_cycles.conditions(text) == {"dcmha_forward.3": [4 / 64, 20 / 64, 4 / 64]}
    kernels = {"dcmha_forward.1": 1000.0, "dcmha_forward.3": 10.0}
    assert tpu_cycles.costs(text, kernels) == tpu_cycles.costs(TEXT, kernels)


def test_steps_of_the_grid_do_not_count_the_stages_of_the_pipeline():
    assert tpu_bundles.steps(SCHEDULE) == 4


# A core without steps jumps over the loop to a place without a name. Step by step, the pipeline jumps over the kernel
# (region 8), whose condition is region 9.
CONDITIONAL = """
     0x1   :  { %16 = sbr.rel (%p1_p0) target = $region4 }
     0x2 LB: > { %p7_p0 = scmp.ge.s32.totalorder %s2_s1, 6 /* loop exit test */ }
     0x3   : > { %17 = sbr.rel (%p2_p1) target = $region8 }
     0x4   : > { %18 = sbr.rel (%p3_p2) target = $region9 }
     0x5   : > { %19 = vst }
     0x6   : > { %20 = vst }
     0x7 PF: > { %21 = vst } /* Start/End empty region 9 */
     0x8 PF: > { %22 = vst } /* Start region 8 */
     0x9   : > { %11 = sbr.rel (!%p7_p0) target = $region3 } /* Start region 3 */
"""


def test_a_conditional_part_counts_in_its_share_of_the_steps_on_a_core_that_may_have_none():
    assert tpu_bundles.conditional_regions(CONDITIONAL) == [range(4, 6)]
    assert tpu_bundles.count(CONDITIONAL, [0.25]) == tpu_bundles.count(CONDITIONAL) - 2 * 0.75
