"""Choice of the implementation of attention, its log, and attention on a mesh of devices."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import on_arrays, output_and_gradients, random_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from marks import exhaustive
from small_models import param_shapes, random_params

from dcvit import dcmha
from dcvit.dcmha import ComposeWeights, device, plan
from dcvit.dcmha.backends.gpu import tiling as gpu_tiling
from dcvit.dcmha.backends.tpu import tiling
from dcvit.dcmha.inputs import Inputs, Options, make_call
from dcvit.models import sharded_attention
from dcvit.models.attention import Attention


def trace(queries, composed=True, keys=256, dtype=jnp.float32, devices=1, **options):
    """Trace attention of 2 heads without running it, on a mesh of so many devices; 0 means that no mesh is set."""
    args, _ = random_case(queries, keys, branches="qpg" if composed else None, dtype=dtype)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]) if devices else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        return jax.eval_shape(lambda *a: dcmha.attention(*a, **options), *args)


@pytest.fixture
def log(caplog):
    """Record of the core's log."""
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        yield caplog


CANDIDATES = {  # of composed attention in bfloat16, plain attention in float32, and of one query; "reference" follows
    "cpu": (("blockwise",), ("blockwise",), ("decode",)),
    "TPU v5 lite": (("pallas_tpu", "blockwise"), ("pallas_tpu", "blockwise"), ("decode",)),
    "9.0": (("pallas_gpu", "elementwise"), (), ("decode",)),
    **dict.fromkeys(("8.0", "12.0"), (("elementwise",), (), ("decode",))),
}


@pytest.mark.parametrize("kind", CANDIDATES)
def test_the_candidates_of_each_kind_of_device(kind, monkeypatch):
    here = "cpu" if kind == "cpu" else "tpu" if kind.startswith("TPU") else "gpu"
    monkeypatch.setattr(device, "platform", lambda: here)
    monkeypatch.setattr(tiling, "device_kind", lambda: kind)
    monkeypatch.setattr(gpu_tiling, "compute_capability", lambda: kind)
    composed, plain, one = CANDIDATES[kind]

    def names(queries, branches, **more):
        (q, k, v, *weights), options = random_case(queries, 256, branches=branches, **more)
        call = make_call(Inputs(q, k, v, *weights), groups=options["groups"])
        with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
            return plan.candidates(call)[0]

    assert names(256, "qpkg", dtype=jnp.bfloat16) == (*composed, "reference")
    assert names(256, None) == (*plain, "reference")
    assert names(1, "qpkg") == (*one, "reference")
    assert names(256, "qpg", groups=2, key_heads=2, heads=4) == ("folded",)


def test_long_rows_with_dropout_are_left_to_the_reference_on_a_gpu(monkeypatch, log):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(plan, "MAX_GPU_SCORES", 100)
    trace(64, dropout=dcmha.Dropout(jax.random.key(0), 0.1))
    assert log.messages[-1].startswith("attention: reference on gpu")


def test_the_choice_is_logged_with_the_reasons_against_others(monkeypatch, log):
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    trace(256)
    message, *kernels = log.messages
    assert message.startswith("attention: pallas_tpu on tpu for float32[1, 256, 2, 8], 256 keys")
    assert len(kernels) == 1  # the TPU kernels say which family they are
    trace(256, composed=False, dtype=jnp.float16)
    assert log.messages[-1].startswith("attention: blockwise on tpu")
    assert "; not pallas_tpu: the TPU kernels support" in log.messages[-1]


def test_a_named_implementation_raises_for_an_unsupported_case(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    args, options = random_case(16, branches="qg")
    with pytest.raises(ValueError, match=r"implementation pallas_gpu does not support this case: .*found float32"):
        dcmha.attention(*args, **options, implementation="pallas_gpu")


@pytest.mark.slow
def test_no_kernel_is_chosen_on_several_devices_without_a_mesh(monkeypatch, log):
    """The compiler may have to split the program, and it refuses to split kernels. A warning says so, once."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: "TPU v5 lite")
    plan.warn_once.cache_clear()
    for _ in range(2):
        trace(256, devices=0)
    warnings = [record for record in log.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "there are 8 devices and no mesh: call jax.set_mesh" in warnings[0].message
    assert log.messages[-1].startswith("attention: blockwise on tpu")
    assert "cannot split a kernel over several devices, and no mesh is set" in log.messages[-1]
    log.clear()
    trace(256, devices=0, implementation="pallas_tpu")
    assert "as requested" in log.messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [False, exhaustive(True)])
def test_a_layer_on_several_devices_is_lowered_for_tpus_with_and_without_a_mesh(is_set, monkeypatch):
    """Inputs and parameters that are split by `NamedSharding` alone, as in the trainer of big_vision."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: "TPU v5 lite")
    layer = Attention(2, compose="both")
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    x = jax.ShapeDtypeStruct((4, 24, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
    params = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((4, 24, 16)))
    step = jax.jit(jax.grad(lambda params, x: jnp.sum(layer.apply(params, x))))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        text = step.trace(params, x).lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == is_set


@pytest.mark.slow
def test_inputs_split_without_a_mesh_give_the_split_output_of_one_device(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    layer, x = Attention(2, compose="both"), jax.random.normal(jax.random.key(0), (8, 24, 16))
    params = {"params": random_params(param_shapes(layer, x))}
    split = jax.NamedSharding(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), P("data"))
    apply, of_split = jax.jit(layer.apply), jax.device_put(x, split)
    compiled = apply.lower(params, of_split).compile()
    found = compiled(params, of_split)
    assert found.sharding.is_equivalent_to(split, 3)
    np.testing.assert_allclose(found, apply(params, x), rtol=0, atol=1e-5)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(("kind", "x64"), [("TPU v4", False), ("TPU v5 lite", True)])
def test_kernels_are_not_used_on_a_tpu_that_they_were_not_compiled_for(kind, x64, monkeypatch, log):
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: kind)
    with jax.enable_x64(x64):
        trace(256)
    (message,) = log.messages
    assert message.startswith("attention: blockwise on tpu")
    assert ("64-bit" if x64 else "found a TPU v4") in message


@pytest.mark.parametrize(("heads", "tokens", "composed"), [(3, 196, None), (16, 2048, True), (52, 40, True)])
def test_operands_of_products_are_stored_in_complete_tiles_of_16_rows(heads, tokens, composed):
    q = jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, tokens, heads), jnp.bfloat16)
    inputs = Inputs(q, q, q, *[composed and ComposeWeights(kg=gates)] * 2)
    config = tiling.make_config(inputs, Options(causal=True, scale=0.125), tiling.vmem_limit())
    step = config.strip * config.strips_per_step
    assert step % 16 == config.block_k % (2 * step) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        (None, {"branches": "qkpgs", "groups": 2}),
        exhaustive("blockwise", {"branches": None, "key_heads": 1}),
        (None, {"segments": 3}),
    ],
)
def test_output_and_gradients_on_a_mesh_equal_those_of_one_device(implementation, case):
    check_on_a_mesh(implementation, *random_case(24, heads=4, batch=2, causal=True, rank=1, **case))


def check_on_a_mesh(implementation, args, options):
    options = {**options, "implementation": implementation}
    right = output_and_gradients(dcmha.attention, args, options)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        found = output_and_gradients(on_arrays(sharded_attention.attention), args, options)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "options", "refused"),
    [
        ("tpu", {}, None),
        ("tpu", {"dtype": jnp.float16}, "blockwise on tpu .*; not pallas_tpu: the TPU kernels support q, k and v"),
    ],
)
def test_attention_that_is_not_fused_is_refused_on_accelerators_on_request(platform, options, refused, monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: platform)
    options = {"queries": 256} | options
    trace(**options)
    with (
        plan.fused_only(),
        pytest.raises(ValueError, match=f"attention is not fused: {refused}") if refused else contextlib.nullcontext(),
    ):
        trace(**options)


def test_the_platform_is_that_of_the_default_device(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert device.platform() == "gpu"
    for cpu in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(cpu):
            assert device.platform() == "cpu"
