"""Verification of implementations on the device, their selection by verdicts, and the file of the verdicts.

The candidates are functions that misbehave as kernels on a chip can: what examines and selects them is not mocked.
"""

import contextvars
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import dcmha
from dcvit.dcmha import selection, verdicts, verification
from dcvit.dcmha.selection import Selection, select, selecting
from dcvit.dcmha.verdicts import Verdict, Verdicts
from dcvit.dcmha.verification import Case, DeviceHungError, examine

SHAPES = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in "ab"} | {
    "mask": jax.ShapeDtypeStruct((1, 16, 16), jnp.bool_)
}


def passed(milliseconds):
    return Verdict("passed", 0.0, milliseconds, forward_milliseconds=milliseconds)


def right(x):
    return jnp.where(x["mask"][0], x["a"] @ x["b"], 0.0)


def callback(function, x):
    """Call a function of the host while the program runs."""
    return right(x) + jax.pure_callback(function, jax.ShapeDtypeStruct((), jnp.float32))


def with_wrong_gradient(x):
    out = right(x)
    return out + (x["b"] - jax.lax.stop_gradient(x["b"])) * 0.01


def does_not_compile(x):
    raise RuntimeError("Mosaic failed to compile\nmore lines")


def slow(x):
    return callback(lambda: (time.sleep(0.05), np.float32(0))[1], jax.lax.stop_gradient(x)) * 0 + right(x)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder of verdicts, in a process that has verified nothing."""
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(selection, "_DEFAULT", Selection("known"))
    monkeypatch.setattr(verification, "_threads", [])
    verification.warn_once.cache_clear()
    return tmp_path / "kernels"


def case(*kernels, key="matmul", plain=right):
    named = {kernel.__name__: kernel for kernel in kernels}
    return Case(key, key, SHAPES, named | {"plain": plain}, frozenset(named), right)


def order(case):
    """The selected candidate, and the one that needs no verdict."""
    return tuple(dict.fromkeys([select(case) or "plain", "plain"]))


def verified(case, seconds=30.0, **more):
    with selecting(Selection("verify", seconds, **more)) as chosen:
        names = order(case)
    return names, chosen.chosen


def store():
    return Verdicts(verdicts.environment(jax.local_devices()[0]))


def verdict(case, name):
    return store().read(case.key)[name]


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        (lambda x: right(x) * 1.01, "wrong", "relative error"),
        (lambda x: right(x) * jnp.nan, "wrong", "nan"),
        (with_wrong_gradient, "wrong", "relative error"),
        (does_not_compile, "failed", "compiling raised RuntimeError: Mosaic failed to compile"),
        (lambda x: callback(lambda: 1 / 0, x), "failed", "running raised"),
    ],
    ids=["value", "nan", "gradient", "compilation", "running"],
)
def test_a_kernel_that_does_not_pass_is_not_selected(kernel, status, reason, caplog):
    one = case(kernel)
    assert verified(one) == (("plain",), {"matmul": "plain"})
    found = verdict(one, kernel.__name__)
    assert found.status == status
    assert reason in found.reason
    (message,) = [m for m in caplog.messages if "is not used" in m]
    assert status in message


def test_the_fastest_that_passed_is_selected_and_is_not_verified_again():
    def fast(x):
        return right(x)

    both = case(fast, plain=slow)
    assert verified(both) == (("fast", "plain"), {"matmul": "fast"})
    assert verdict(both, "plain").milliseconds > 50 > verdict(both, "fast").milliseconds
    examined = verdict(both, "fast")
    assert order(both) == ("fast", "plain"), "the verdict is known to code that verifies nothing"
    assert verdict(both, "fast") == examined


def test_without_a_verdict_no_kernel_is_selected_and_one_line_says_what_to_run(caplog):
    with selecting(Selection("known")):
        assert order(case(right)) == order(case(right)) == ("plain",)
    (message,) = caplog.messages
    assert "right" in message
    assert "dcvit check-kernels" in message


def without_selection(function):
    """Call a function as code that is not inside `selecting`."""
    return contextvars.Context().run(function)


@pytest.mark.parametrize(
    ("policy", "names", "verdict"),
    [
        ("verify", "plain", True),
        ("trust", "wrong plain", False),
        ("off", "plain", False),
    ],
)
def test_the_environment_sets_the_policy_outside_of_selecting(policy, names, verdict, monkeypatch, cache):
    def wrong(x):
        return right(x) * 2

    monkeypatch.setenv("DCVIT_KERNELS", policy)
    assert without_selection(lambda: order(case(wrong))) == tuple(names.split())
    assert cache.exists() == verdict
    with selecting(Selection("off")):
        assert order(case(wrong)) == ("plain",)


def test_verified_calls_are_used_in_the_same_process():
    """Also if the library has traced the call before, without a verdict."""
    one = case(right, plain=slow)
    assert without_selection(lambda: order(one)) == ("plain",)
    assert dcmha.verify(lambda: (select(one), jnp.zeros(()))[1]) == {"matmul": "right"}
    assert without_selection(lambda: order(one)) == ("right", "plain")


def test_an_unknown_policy_in_the_environment_is_an_error_also_without_kernels(monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", "on")
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="DCVIT_KERNELS='on': expected 'verify', 'known', 'trust' or 'off'"):
        without_selection(lambda: dcmha.attention(q, q, q))


def test_a_recorded_choice_is_used_without_verification():
    with selecting(Selection("verify", chosen={"matmul": "does_not_compile"})):
        assert order(case(does_not_compile)) == ("does_not_compile", "plain")


def test_processes_agree_by_the_function_that_shares_choices():
    asked = []

    def share(key, choose):
        asked.append(key)
        return "plain"

    with selecting(Selection("verify", share=share)):
        assert order(case(right)) == ("plain",)
    assert asked == ["matmul"]


def test_a_reference_that_fails_selects_no_kernel_and_leaves_no_verdict(caplog):
    def exhausts(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    one = dataclasses.replace(case(right), reference=lambda x: callback(lambda: 1 / 0, jax.lax.stop_gradient(x)))
    assert verified(one)[0] == ("plain",)
    assert "cannot verify kernels for matmul" in caplog.text
    assert store().read("matmul") == {}
    assert verified(case(exhausts))[0] == ("plain",)


def test_a_kernel_whose_compilation_blocks_is_left_behind():
    def blocks(x):
        time.sleep(3)
        return right(x)

    one = case(blocks)
    assert verified(one, seconds=1)[0] == ("plain",)
    found = verdict(one, "blocks")
    assert (found.status, found.seconds) == ("timed out", 1)


def test_what_is_wrong_stays_wrong():
    store().write("matmul", "right", Verdict("wrong", 0.5, reason="wrong", seconds=1))
    assert verified(case(right, plain=slow))[0] == ("plain",)


def test_a_kernel_that_blocks_the_device_ends_the_program_once():
    waits = iter([4.0])

    def blocks(x):
        wait = callback(lambda: (time.sleep(next(waits, 0)), np.float32(0))[1], jax.lax.stop_gradient(x))
        return 0 * wait + right(x)

    one = case(blocks)
    with pytest.raises(DeviceHungError, match="blocks did not finish on the device"):
        verified(one, seconds=1)
    assert verified(one)[0] == ("plain",)


@pytest.mark.parametrize("change", ["device", "jax", "code"])
def test_verdicts_of_another_environment_do_not_count(change):
    here = verdicts.environment(jax.local_devices()[0])
    Verdicts({**here, change: "other"}).write("matmul", "right", passed(1e-9))
    with selecting(Selection("known")):
        assert order(case(right)) == ("plain",)


def test_a_damaged_file_is_ignored_with_one_line_and_replaced(cache, caplog):
    verdicts_of_right = [(name, passed(1.0 + (name == "plain"))) for name in ("right", "plain")]
    for name, found in verdicts_of_right:
        store().write("matmul", name, found)
    (path,) = cache.glob("*.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with selecting(Selection("known")):
        assert order(case(right)) == ("plain",)
    assert [m for m in caplog.messages if str(path) in m]
    for name, found in verdicts_of_right:
        store().write("matmul", name, found)
    with selecting(Selection("known")):
        assert order(case(right)) == ("right", "plain")


def test_arrays_have_padded_keys_and_a_row_without_keys():
    def attends(x):
        empty = jnp.all(~x["mask"][0, 0]) & jnp.all(~x["mask"][..., -2:])
        return jnp.where(empty, right(x), jnp.nan)

    one = case(attends)
    assert examine(one, store(), 30)["attends"].passed
