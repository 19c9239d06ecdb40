"""Selection of kernels by `dcvit.dcmha.attention` on a simulated TPU, whose kernels misbehave as those of a chip can.

The CPU is taken for a TPU, and `pallas_tpu` is replaced; all else is the code that runs on a chip.
"""

import dataclasses
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_case

from dcvit import dcmha
from dcvit.dcmha import device, folded, plan, verification
from dcvit.dcmha.backends.tpu import api, tiling
from dcvit.dcmha.backends.xla import blockwise, reference
from dcvit.dcmha.selection import Selection, selecting

right = blockwise.run


def correct(call):
    return right(call)


def with_arrays(call, **arrays):
    return dataclasses.replace(call, inputs=call.inputs._replace(**arrays))


def ignores_causality(call):
    return correct(dataclasses.replace(call, options=dataclasses.replace(call.options, causal=False, window=None)))


def ignores_segments(call):
    return correct(with_arrays(call, segments=None))


def slow(call):
    wait = jax.pure_callback(lambda: (time.sleep(0.03), np.float32(0))[1], jax.ShapeDtypeStruct((), jnp.float32))
    return correct(call) + wait.astype(call.inputs.q.dtype)


@pytest.fixture
def chip(monkeypatch, tmp_path):
    """Make the CPU a TPU whose kernel is the given function."""
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: "TPU v5 lite")
    monkeypatch.setattr(plan, "splits_arrays", lambda: False)
    verification.warn_once.cache_clear()

    def use(kernel):
        monkeypatch.setattr(api, "run", kernel)

    return use


def outcome(policy="verify", **options):
    """Return the implementations that attention selects; its output and gradient must be those of the reference."""
    args, more = random_case(40, 40, **options)
    if more["mask"] is not None:
        more["mask"] = more["mask"].at[:, :, 0].set(False)

    def attend(q, implementation=None):
        return jnp.sum(dcmha.attention(q, *args[1:], **more, implementation=implementation) ** 2)

    with selecting(Selection(policy)) as found:
        value, gradient = jax.jit(jax.value_and_grad(attend))(args[0])
    expected = jax.value_and_grad(lambda q: attend(q, "reference"))(args[0])
    np.testing.assert_allclose(value, expected[0], rtol=1e-4)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-3)
    return [*found.chosen.values()]


def test_training_with_a_kernel_that_misbehaves_uses_another_implementation(chip, caplog):
    chip(ignores_causality)
    (name,) = outcome(causal=True)
    assert name != "pallas_tpu"
    lines = [m for m in caplog.messages if "pallas_tpu is not used" in m]
    assert len(lines) == 1, caplog.messages


def test_a_correct_kernel_is_used_if_it_is_the_fastest(chip, monkeypatch, caplog):
    chip(correct)
    monkeypatch.setattr(blockwise, "run", slow)
    monkeypatch.setattr(reference, "run", slow)
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        assert outcome(causal=True) == ["pallas_tpu"]
    assert "attention: pallas_tpu on tpu" in caplog.text


def test_a_mask_with_an_empty_row_is_verified(chip):
    def spreads(call):
        """Attend to all keys where a query attends to none."""
        mask = call.inputs.mask
        return correct(with_arrays(call, mask=mask | ~jnp.any(mask, axis=-1, keepdims=True)))

    chip(spreads)
    (name,) = outcome(mask=(1, 1, 40, 40))
    assert name != "pallas_tpu"


def test_calls_with_segments_are_verified_with_segments(chip):
    """The case of a call without segments is another one."""
    chip(ignores_segments)
    (name,) = outcome(segments=3)
    assert name != "pallas_tpu"
    chip(correct)
    assert len(outcome()) == 1


def test_a_wrong_last_row_of_a_long_text_is_noticed_in_bfloat16(chip, caplog):
    """The norm of causal outputs falls with the position, so that a single row hardly counts in that of all."""
    chip(lambda call: correct(call).at[:, -1].set(0))
    args, options = random_case(128, dtype=jnp.bfloat16, causal=True)
    with selecting(Selection()) as found:
        jax.eval_shape(lambda *x: dcmha.attention(*x, **options), *args)
    assert [name for name in found.chosen.values() if name not in ("", "pallas_tpu")]
    assert "wrong: the largest relative error" in caplog.text


def test_a_tpu_program_has_no_kernel_if_they_are_off(chip):
    for composition in ("qkpg", "qp"):  # with key-wise branches, and folded, whose heads another kernel combines
        args, options = random_case(300, 300, branches=composition)
        lowered = {}
        for chosen in ("off", "trust"):
            with selecting(Selection(chosen)):
                program = jax.jit(lambda *x, o=options: dcmha.attention(*x, **o)).trace(*args)
                lowered[chosen] = program.lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in lowered["trust"]
        assert "tpu_custom_call" not in lowered["off"]


def test_the_form_that_combines_heads_on_a_gpu_is_measured(chip, monkeypatch):
    """Without verification, it is the sum."""
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    x, w = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 16, 2, 2, 2))
    exact = folded.combine_heads

    def delay(x, w):
        wait = jax.pure_callback(lambda: (time.sleep(0.05), np.float32(0))[1], jax.ShapeDtypeStruct((), jnp.float32))
        return exact(x, w) + wait

    monkeypatch.setattr(folded, "combine_heads", delay)
    used = {}
    for policy in ("off", "trust", "verify"):
        with selecting(Selection(policy)):
            program = str(jax.make_jaxpr(lambda x, w: plan.combine_heads(x, w))(x, w))
        used[policy] = "einsum" if "dot_general" in program else "sum"
    assert used == {"off": "sum", "trust": "sum", "verify": "einsum"}
