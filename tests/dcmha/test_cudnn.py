"""Plain attention by cuDNN, lowered for GPUs on a machine without one."""

import logging

import jax
import jax.numpy as jnp
import pytest
from attention_cases import on_arrays, output_and_gradients, random_case, relative_errors, worst
from jax._src.cudnn import fused_attention_stablehlo

from dcvit import dcmha
from dcvit.dcmha import device
from dcvit.dcmha.backends import cudnn
from dcvit.dcmha.backends.xla import reference

CALL = "__cudnn$fmhaSoftmax"


@pytest.fixture(autouse=True)
def _gpu(monkeypatch, caplog):
    """Let the core and JAX believe that the platform is an NVIDIA GPU with cuDNN, and record the core's caplog."""
    caplog.set_level(logging.INFO, logger="dcvit.dcmha")
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def lowered(args, *, gradient=False, **options):
    """Return the program of attention, or of its gradient, for NVIDIA GPUs."""

    def run(*args):
        return jnp.sum(dcmha.attention(*args, **options).astype(jnp.float32))

    run = jax.grad(run, argnums=(0, 1, 2)) if gradient else run
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def case(queries=128, keys=None, *, branches=None, dtype=jnp.bfloat16, head_dim=64, **options):
    args, options = random_case(queries, keys, branches=branches, heads=4, dtype=dtype, head_dim=head_dim, **options)
    return args, {name: value for name, value in options.items() if name != "scale"}


@pytest.mark.parametrize(
    ("options", "gradient"),
    [({}, True), ({"causal": True}, False), ({"window": 16, "key_heads": 2}, True), ({"dtype": jnp.float16}, False)],
)
def test_plain_attention_of_16_bits_is_one_call_of_cudnn(options, gradient, caplog):
    args, options = case(**options)
    text = lowered(args, gradient=gradient, **options)
    assert text.count(f"@{CALL}") == 1 + gradient
    assert "dot_general" not in text  # no other product: neither scores nor their gradients are in memory
    assert all(message.startswith("attention: cudnn on gpu") for message in caplog.messages)


def test_window_causality_and_scale_reach_cudnn():
    args, options = case(window=16)
    text = lowered(args, scale=0.25, **options).replace(r"\22", "")
    for setting in ("sliding_window_length: 16", "mask_type: CAUSAL", "fmha_scale: 0.25", "dropout_rate: 0.0"):
        assert setting in text
    args, options = case()
    assert "mask_type: NO_MASK" in lowered(args, **options).replace(r"\22", "")


def test_the_middle_of_a_folded_composition_is_cudnn(caplog):
    args, options = case(branches="qpgs", groups=2, key_heads=2)
    assert lowered(args, gradient=True, **options).count(f"@{CALL}") == 2
    assert [message.split(" on ")[0] for message in caplog.messages] == ["attention: folded", "attention: cudnn"]


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"dtype": jnp.float32}, "reference", "cuDNN supports q, k and v of bfloat16 or float16, found float32"),
        ({"mask": (2, 1, 1, 128)}, "reference", "a query without keys would not have the output 0"),
    ],
)
def test_another_plain_case_is_given_to_the_reference_and_the_reason_logged(options, name, reason, caplog):
    args, options = case(**({"batch": 2} | options))
    assert CALL not in lowered(args, **options)
    message = caplog.messages[-1]
    assert message.startswith(f"attention: {name} on gpu")
    assert "; not cudnn: " in message
    assert reason in message


def test_composition_that_does_not_fold_is_refused(caplog):
    args, options = case(branches="qkpg")
    assert CALL not in lowered(args, **options)
    assert caplog.messages[-1].startswith("attention: elementwise on gpu")
    with pytest.raises(ValueError, match="cudnn does not support this case: cuDNN does not compose heads"):
        lowered(args, implementation="cudnn", **options)


def test_without_cudnn_the_reference_attends(monkeypatch, caplog):
    monkeypatch.undo()
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    args, options = case()
    assert CALL not in lowered(args, **options)
    assert "; not cudnn: cuDNN: cuDNN is not detected" in caplog.messages[0]


@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_reference(monkeypatch):
    """XLA computes attention in place of cuDNN, so that the gradients around it run without a GPU, in float32."""
    args, options = random_case(16, branches=None, heads=4, window=5, key_heads=2)
    by_cudnn = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **o: by_cudnn(*a, **o | {"implementation": "xla"}))

    def attention(call):
        return cudnn._attention(call.options, call.inputs)

    right = output_and_gradients(on_arrays(reference.run), args, options)
    errors = relative_errors(output_and_gradients(on_arrays(attention), args, options), right)
    assert worst(errors) < 2e-5, errors
