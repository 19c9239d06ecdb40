"""Verification of implementations on the device, their selection by verdicts, and the file of the verdicts.

The candidates are functions that misbehave as kernels on a chip can: what examines and selects them is not mocked.
"""

import contextvars
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit import dcmha
from dcvit.dcmha import selection, verdicts
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.selection import Selection, order, selecting
from dcvit.dcmha.verdicts import Verdict, Verdicts
from dcvit.dcmha.verification import Case, DeviceHungError, examine

SHAPES = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in "ab"} | {
    "mask": jax.ShapeDtypeStruct((1, 16, 16), jnp.bool_)
}


def right(x):
    return jnp.where(x["mask"][0], x["a"] @ x["b"], 0.0)


def callback(function, x):
    """Call a function of the host while the program runs."""
    return right(x) + jax.pure_callback(function, jax.ShapeDtypeStruct((), jnp.float32))


def with_wrong_gradient(x):
    out = right(x)
    return out + (x["b"] - jax.lax.stop_gradient(x["b"])) * 0.01


def refuses(x):
    raise UnsupportedError("16 is odd")


def does_not_compile(x):
    raise RuntimeError("Mosaic failed to compile\nmore lines")


def slow(x):
    return callback(lambda: (time.sleep(0.05), np.float32(0))[1], jax.lax.stop_gradient(x)) * 0 + right(x)


calls = iter(range(1000))


def changes(x):
    number = jax.pure_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32))
    return right(x) * (1 + 1e-6 * number)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder of verdicts."""
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path / "kernels"))
    selection._warn_once.cache_clear()
    return tmp_path / "kernels"


def case(*kernels, key="matmul", plain=right):
    named = {kernel.__name__: kernel for kernel in kernels}
    return Case(key, key, SHAPES, named | {"plain": plain}, frozenset(named), right)


def verified(case, seconds=30.0):
    with selecting(Selection("verify", seconds)) as chosen:
        names = order(case)
    return names, chosen.chosen


def verdict(case, name):
    return Verdicts(verdicts.environment(jax.local_devices()[0])).read(case.key)[name]


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        (lambda x: right(x) * 1.01, "wrong", "relative error"),
        (lambda x: right(x) * jnp.nan, "wrong", "nan"),
        (with_wrong_gradient, "wrong", "relative error"),
        (changes, "wrong", "7 of 7 repetitions differ"),
        (does_not_compile, "failed", "compiling raised RuntimeError: Mosaic failed to compile"),
        (lambda x: callback(lambda: 1 / 0, x), "failed", "running raised"),
        (refuses, "unsupported", "16 is odd"),
    ],
    ids=["value", "nan", "gradient", "nondeterministic", "compilation", "running", "unsupported"],
)
def test_a_kernel_that_does_not_pass_is_not_selected(kernel, status, reason, caplog):
    one = case(kernel)
    assert verified(one) == (("plain",), {"matmul": "" if status == "unsupported" else "plain"})
    found = verdict(one, kernel.__name__)
    assert found.status == status
    assert reason in found.reason
    assert any(status in message for message in caplog.messages) == (status != "unsupported")
    assert len([m for m in caplog.messages if "is not used" in m]) <= 1


def test_the_fastest_that_passed_is_selected_and_is_not_verified_again():
    def fast(x):
        return right(x)

    both = case(fast, plain=slow)
    assert verified(both) == (("fast", "plain"), {"matmul": "fast"})
    assert verdict(both, "plain").milliseconds > 50 > verdict(both, "fast").milliseconds
    examined = verdict(both, "fast")
    assert order(both) == ("fast", "plain"), "the verdict is known to code that verifies nothing"
    assert verdict(both, "fast") == examined


def test_verification_works_while_a_function_is_traced():
    one = case(lambda x: right(x) * 2)

    @jax.jit
    def program(x):
        assert verified(one)[0] == ("plain",)
        return x + 1

    assert program(1.0) == 2


def test_without_a_verdict_no_kernel_is_selected_and_one_line_says_what_to_run(caplog):
    with selecting(Selection("known")):
        assert order(case(right)) == order(case(right)) == ("plain",)
    (message,) = caplog.messages
    assert "right" in message
    assert "dcvit check-kernels" in message


def test_policies_without_verdicts():
    with selecting(Selection("trust")):
        assert order(case(right)) == ("right", "plain")
    verified(case(right))
    with selecting(Selection("off")):
        assert order(case(right)) == ("plain",)


def without_selection(function):
    """Call a function as code that is not inside `selecting`."""
    return contextvars.Context().run(function)


@pytest.mark.parametrize(
    ("policy", "names", "verdict"),
    [("verify", "plain", True), ("trust", "wrong plain", False), ("off", "plain", False), ("", "plain", True)],
)
def test_the_environment_sets_the_policy_outside_of_selecting(policy, names, verdict, monkeypatch, cache):
    def wrong(x):
        return right(x) * 2

    monkeypatch.setenv("DCVIT_KERNELS", policy)
    monkeypatch.setattr(selection, "_CHOSEN", {})
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

    with selecting(Selection("verify", share=share)):
        assert order(case(right)) == ("plain",)
    assert asked == ["matmul"]


def test_one_line_says_that_process_0_selected_what_was_wrong_here(caplog):
    one = case(lambda x: right(x) * 2)
    verified(one)
    selection._warn_once.cache_clear()
    caplog.clear()
    for _ in range(2):
        with selecting(Selection("verify", share=lambda key, choose: "<lambda>")):
            assert order(one) == ("<lambda>", "plain")
    (message,) = caplog.messages
    assert "as process 0 selected it, although an earlier verdict on a device of process 0 is: wrong" in message


def test_a_verdict_without_those_of_the_other_implementations_selects_nothing():
    """As after a process that ended between them."""
    store = Verdicts(verdicts.environment(jax.local_devices()[0]))
    store.write("matmul", "slow", Verdict("passed", 0.0, 1e9))
    with selecting(Selection("known")):
        assert order(case(slow)) == ("plain",)
    assert verified(case(slow))[0] == ("plain",)
    assert verdict(case(slow), "plain").passed


def test_a_reference_that_fails_selects_no_kernel_and_leaves_no_verdict(caplog):
    def exhausts(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    one = dataclasses.replace(case(right), reference=lambda x: callback(lambda: 1 / 0, jax.lax.stop_gradient(x)))
    assert verified(one)[0] == ("plain",)
    assert "cannot verify kernels for matmul" in caplog.text
    assert Verdicts(verdicts.environment(jax.local_devices()[0])).read("matmul") == {}
    assert verified(case(exhausts))[0] == ("plain",)


def test_threads_have_the_precision_of_the_caller():
    found = []

    def looks(x):
        found.append(jax.config.jax_default_matmul_precision)
        return right(x)

    with jax.default_matmul_precision("highest"):
        verified(case(looks))
    assert {*found} == {"highest"}


def test_a_kernel_whose_compilation_blocks_is_left_behind():
    def blocks(x):
        time.sleep(3)
        return right(x)

    one = case(blocks)
    assert verified(one, seconds=1)[0] == ("plain",)
    assert verdict(one, "blocks").status == "timed out"


def test_a_kernel_that_blocks_the_device_ends_the_program_once():
    waits = iter([4.0])

    def blocks(x):
        wait = callback(lambda: (time.sleep(next(waits, 0)), np.float32(0))[1], jax.lax.stop_gradient(x))
        return 0 * wait + right(x)

    one = case(blocks)
    with pytest.raises(DeviceHungError, match="blocks did not finish on the device"):
        verified(one, seconds=1)
    assert verified(one)[0] == ("plain",)


def test_a_kernel_that_ends_its_process_is_tried_twice(cache):
    code = """
import os, sys
sys.path.insert(0, "tests/dcmha")
from test_verification import *
def ends(x):
    return callback(lambda: os._exit(3), jax.lax.stop_gradient(x))
print(verified(case(ends))[0])
"""
    statuses = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
        statuses.append(run.returncode)
    assert statuses == [3, 3, 0], run.stderr
    assert run.stdout == "('plain',)\n"
    assert "it ended its process twice" in run.stderr


def test_an_interrupted_verification_is_no_verdict(cache):
    """Ctrl-C, however often, says nothing about the kernel."""
    code = """
import signal, sys, threading
sys.path.insert(0, "tests/dcmha")
from test_verification import *
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process inherits that it is ignored
to_come = []
def interrupt():
    if to_come:
        to_come.pop()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(1)
    return np.float32(0)
def waits(x):
    return 0 * callback(interrupt, jax.lax.stop_gradient(x)) + right(x)
for _ in range(3):
    to_come.append("Ctrl-C")
    with pytest.raises(KeyboardInterrupt):
        verified(case(waits))
    assert "waits" not in Verdicts(verdicts.environment(jax.local_devices()[0])).read("matmul")
"""
    run = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_processes_that_start_together_verify_one_after_the_other(cache):
    code = """
import sys
sys.path.insert(0, "tests/dcmha")
from test_verification import *
logging.basicConfig(level=logging.INFO)
def waits(x):
    time.sleep(2)  # while it is compiled
    return right(x)
print(verified(case(waits, plain=slow))[0])
"""
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = [process.communicate() for process in [subprocess.Popen(command, **pipes) for _ in range(3)]]
    assert [out for out, _ in found] == ["('waits', 'plain')\n"] * 3, found
    assert sum("attention: verifying" in err for _, err in found) == 1


def test_a_plain_implementation_that_is_slow_is_no_hung_device():
    def sluggish(x):
        return callback(lambda: (time.sleep(0.5), np.float32(0))[1], jax.lax.stop_gradient(x)) * 0 + right(x)

    assert verified(case(right, plain=sluggish), seconds=1)[0] == ("right", "plain")


def test_choices_for_a_device_that_is_not_attached_are_not_those_of_the_attached_one(monkeypatch):
    monkeypatch.setattr(selection, "_CHOSEN", {})
    other = jax.sharding.AbstractDevice("TPU v6 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=other)

    def lowered():
        with jax.sharding.use_abstract_mesh(mesh):
            return order(case(right, plain=slow))

    both = lambda: (lowered(), order(case(right, plain=slow)), lowered())  # noqa: E731
    assert without_selection(both) == (("plain",), ("right", "plain"), ("plain",))


@pytest.mark.parametrize("change", ["jax", "backend", "driver", "device", "code"])
def test_verdicts_of_another_environment_do_not_count(change):
    here = verdicts.environment(jax.local_devices()[0])
    Verdicts({**here, change: "other"}).write("matmul", "right", Verdict("passed", 0.0, 1e-9))
    with selecting(Selection("known")):
        assert order(case(right)) == ("plain",)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 10_000,
        lambda text: text.replace('"passed"', '"perfect"'),
        lambda text: text.replace('"milliseconds"', '"seconds"'),
        lambda text: json.dumps({**json.loads(text), "format": 0}),
        lambda text: json.dumps({**json.loads(text), "cases": []}),
        lambda text: re.sub('"milliseconds": [^,]*', '"milliseconds": 1' + "0" * 400, text),
        lambda text: re.sub('"milliseconds": [^,]*', '"milliseconds": -1.0', text),
        lambda text: re.sub('"error": [^,]*', '"error": 0.5', text),
        lambda text: text.replace('"reason": ""', '"reason": "it is wrong"'),
        lambda text: text.replace('"right": {', '"right": {}, "right": {'),
        lambda text: text + " " * verdicts.MAX_BYTES,
    ],
    ids=["cut", "nested", "status", "field", "format", "cases", "huge", "negative", "wrong", "reason", "twice", "long"],
)
def test_a_damaged_file_is_ignored_with_one_line(damage, cache, caplog):
    verified(case(right))
    (path,) = cache.glob("*.json")
    path.write_text(damage(path.read_text()))
    caplog.clear()
    with selecting(Selection("known")):
        assert order(case(right)) == ("plain",)
    assert [m for m in caplog.messages if str(path) in m]
    assert verified(case(right))[0][0] in ("right", "plain")
    assert verdict(case(right), "right").passed


@pytest.mark.parametrize("suffix", [".json", ".tmp", ".lock"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("victim")], ids=["pipe", "link"])
def test_pipes_are_not_opened_and_links_not_followed(make, suffix, cache, caplog):
    cache.mkdir()
    (cache / "victim").write_text("untouched")
    store = Verdicts({"device": "chip"})
    make(store.path.with_suffix(suffix))
    for name in ("one", "two"):
        store.write(name, "kernel", Verdict("passed", 0.0, 1.0))
    assert [bool(store.read(name)) for name in ("one", "two")] == [suffix != ".lock"] * 2
    assert (cache / "victim").read_text() == "untouched"
    assert bool(caplog.messages) == (suffix != ".tmp")


def test_writers_at_the_same_time_lose_no_verdict(cache):
    code = """
import sys, time
from pathlib import Path
from dcvit.dcmha.verdicts import Verdict, Verdicts
store, (here, other) = Verdicts({"device": "chip"}), sys.argv[1:]
Path(here).touch()
while not Path(other).exists():
    time.sleep(0.001)
for i in range(100):
    store.write(f"{here} {i}", "kernel", Verdict("passed", 0.0, 1.0))
"""
    cache.mkdir()
    names = [str(cache / name) for name in ("one", "two")]
    writers = [
        subprocess.Popen([sys.executable, "-c", code, *order], stderr=subprocess.PIPE, text=True)
        for order in (names, names[::-1])
    ]
    assert [writer.communicate()[1] for writer in writers] == ["", ""]
    store = Verdicts({"device": "chip"})
    assert all(store.read(f"{name} {i}") for name in names for i in range(100))
    assert not [*cache.glob("*.tmp")]


def test_a_folder_that_cannot_be_written_costs_one_verification_each_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path / "file" / "folder"))
    assert verified(case(lambda x: right(x) * 2))[0] == ("plain",)
    assert any("verdicts are not kept" in message for message in caplog.messages)


def test_arrays_have_padded_keys_and_a_row_without_keys():
    def attends(x):
        empty = jnp.all(~x["mask"][0, 0]) & jnp.all(~x["mask"][..., -2:])
        return jnp.where(empty, right(x), jnp.nan)

    one = case(attends)
    store = Verdicts(verdicts.environment(jax.local_devices()[0]))
    assert examine(one, store, 30)["attends"].passed


def test_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="dcvit.dcmha"):
        verified(case(right))
        verified(case(right))
    assert len([m for m in caplog.messages if "verifying" in m]) == 1
