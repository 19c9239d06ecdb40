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


def with_infinite_gradient(x):
    return right(x) + 0 * jnp.sqrt(jnp.sum(0 * x["b"]))


def does_not_compile(x):
    raise RuntimeError("Mosaic failed to compile\nmore lines")


def slow(x):
    return callback(lambda: (time.sleep(0.05), np.float32(0))[1], jax.lax.stop_gradient(x)) * 0 + right(x)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder of verdicts, in a process that has verified nothing."""
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(selection, "_DEFAULT", Selection())
    monkeypatch.setattr(verification, "_threads", [])
    verification.warn_once.cache_clear()
    return tmp_path / "kernels"


def case(*kernels, key="matmul", plain=right):
    named = {kernel.__name__: kernel for kernel in kernels}
    return Case(key, key, SHAPES, named | {"plain": plain}, frozenset(named), right)


def order(case):
    """The selected candidate, and the one that needs no verdict."""
    return tuple(dict.fromkeys([select(case) or "plain", "plain"]))


def verified(case):
    with selecting(Selection("verify")) as chosen:
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
        (with_infinite_gradient, "wrong", "nan"),
        (does_not_compile, "failed", "compiling raised RuntimeError: Mosaic failed to compile"),
        (lambda x: callback(lambda: 1 / 0, x), "failed", "running raised"),
    ],
    ids=["value", "nan", "gradient", "infinite gradient", "compilation", "running"],
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
    assert order(both) == ("fast", "plain")
    assert verdict(both, "fast") == examined


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


def test_an_unknown_policy_in_the_environment_is_an_error_also_without_kernels(monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", "on")
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="DCVIT_KERNELS='on': expected 'verify', 'trust' or 'off'"):
        without_selection(lambda: dcmha.attention(q, q, q))


def test_a_recorded_choice_is_used_without_verification():
    with selecting(Selection("verify", chosen={"matmul": "does_not_compile"})):
        assert order(case(does_not_compile)) == ("does_not_compile", "plain")


def test_processes_agree_by_the_function_that_shares_choices():
    asked = []

    def share(key, choose):
        asked.append(key)
        return "plain"

    with selecting(Selection(share=share)):
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


def test_a_kernel_whose_compilation_blocks_is_left_behind(monkeypatch):
    monkeypatch.setattr(verification, "SECONDS", 1)

    def blocks(x):
        time.sleep(3)
        return right(x)

    one = case(blocks)
    assert verified(one)[0] == ("plain",)
    assert verdict(one, "blocks").status == "timed out"


def test_what_is_wrong_stays_wrong():
    store().write("matmul", "right", Verdict("wrong", 0.5, reason="wrong"))
    assert verified(case(right, plain=slow))[0] == ("plain",)


def test_a_kernel_that_blocks_the_device_ends_the_program_once(monkeypatch):
    waits = iter([4.0])

    def blocks(x):
        wait = callback(lambda: (time.sleep(next(waits, 0)), np.float32(0))[1], jax.lax.stop_gradient(x))
        return 0 * wait + right(x)

    one = case(blocks)
    monkeypatch.setattr(verification, "SECONDS", 1)
    with pytest.raises(DeviceHungError, match="blocks did not finish on the device"):
        verified(one)
    assert verified(one)[0] == ("plain",)


@pytest.mark.parametrize("change", ["device", "jax", "dcvit"])
def test_verdicts_of_another_environment_do_not_count(change):
    here = verdicts.environment(jax.local_devices()[0])
    Verdicts({**here, change: "other"}).write("matmul", "right", passed(1e-9))
    assert store().read("matmul") == {}


def test_a_damaged_file_is_ignored_with_one_line_and_replaced(cache, caplog):
    store().write("matmul", "right", passed(1.0))
    (path,) = cache.glob("*.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert store().read("matmul") == {}
    assert [m for m in caplog.messages if str(path) in m]
    store().write("matmul", "right", passed(1.0))
    assert store().read("matmul") == {"right": passed(1.0)}


def test_arrays_have_padded_keys_and_a_row_without_keys():
    def attends(x):
        empty = jnp.all(~x["mask"][0, 0]) & jnp.all(~x["mask"][..., -2:])
        return jnp.where(empty, right(x), jnp.nan)

    one = case(attends)
    assert examine(one, store())["attends"].passed
