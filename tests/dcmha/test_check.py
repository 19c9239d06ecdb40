"""Verdicts on kernels by child processes, the file of the verdicts, and the selection of kernels by them."""

import contextlib
import contextvars
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_case

from dcvit import dcmha
from dcvit.dcmha import check, device, plan
from dcvit.dcmha.backends.tpu import api, tiling
from dcvit.dcmha.backends.xla import blockwise
from dcvit.dcmha.check import Verdict
from dcvit.dcmha.inputs import Inputs, make_call
from dcvit.dcmha.plan import Selection, selecting
from dcvit.dcmha.segments import make_segments

ROOT = Path(__file__).parents[2]


def case_of(kernel, tokens=24, **options):
    """A case of attention whose kernel is a function of `fake_kernels`."""
    (q, k, v, pre, post), more = random_case(tokens, **options)
    inputs = Inputs(q, k, v, pre, post, more.pop("mask"), make_segments(more.pop("segments", None)))
    return plan.make_case((), make_call(inputs, **more))._replace(candidates={"pallas_fake": f"fake_kernels:{kernel}"})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder of verdicts, in a process that has warned of nothing; children find the fake kernels."""
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    monkeypatch.setattr(plan, "_DEFAULT", Selection())
    plan.warn_once.cache_clear()
    return tmp_path / "kernels"


@pytest.fixture
def here():
    return check.environment(jax.local_devices()[0])


def test_a_case_has_the_window_of_composition_of_its_call_if_there_is_one():
    """Verdicts of calls without one keep their keys."""
    assert "compose_window" not in case_of("right", causal=True).key
    case = case_of("right", causal=True, compose_window=9)
    call = check.call_of({name: jnp.zeros(shape, dtype) for name, (dtype, shape) in case.arrays.items()}, case.options)
    assert call.options.compose_window == call.composition.compose_window == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        ("right", "passed", ""),
        ("crashes", "failed", "its process ended with status -6"),
        ("hangs", "timed out", "it did not end in 4 s"),
    ],
)
def test_a_kernel_is_checked_in_a_process_of_its_own(kernel, status, reason, here):
    case = case_of(kernel, 8, branches="qg", post=None)
    found = check.examine(case, here, 4 if kernel == "hangs" else 60)["pallas_fake"]
    assert found["status"] == status, found
    assert reason in found["reason"]
    assert check.read(here) == {case.key: {"pallas_fake": found}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        ("right", {"segments": 3, "mask": (1, 1, 24, 24)}, None),
        ("right", {"heads": 4, "key_heads": 2, "groups": 2, "batch": 2, "branches": "qkpgs"}, None),
        ("with_infinite_gradient", {"branches": "qg"}, "error of output and gradients is nan"),
        ("with_nan", {"branches": "qg"}, "error of output and gradients is nan"),
        ("with_wrong_gradient", {"branches": "qg"}, "error"),
        ("ignores_causality", {"branches": "qg", "causal": True}, "error"),
        ("ignores_segments", {"branches": "qg", "segments": 3}, "error"),
        ("skips_by_the_first_example", {"branches": "qg", "segments": 3, "batch": 3}, "error"),
        ("spreads", {"branches": "qg", "mask": (1, 1, 24, 24)}, "error"),
        ("with_zero_last_row", {"branches": "qg", "causal": True, "dtype": jnp.bfloat16}, "error"),
        ("races", {"branches": "qg"}, "two runs differ"),
    ],
)
def test_output_and_all_gradients_are_those_of_the_reference(kernel, options, reason):
    found = check.judge(case_of(kernel, **options), "pallas_fake")
    assert found["status"] == ("wrong" if reason else "passed"), found
    assert (reason or "") in found["reason"]


@pytest.mark.parametrize("kernel", ["does_not_compile", "does_not_compile_without_gradients"])
def test_a_kernel_that_does_not_compile_has_failed(kernel):
    found = check.judge(case_of(kernel), "pallas_fake")
    assert found == {"status": "failed", "reason": "RuntimeError: Mosaic failed to compile"}


def test_a_reference_that_fails_leaves_no_verdict(here, caplog, monkeypatch):
    def exhausts(case):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(check, "reference_of", exhausts)
    case = case_of("right")
    found = check.judge(case, "pallas_fake")
    monkeypatch.setattr(check, "run_child", lambda *args: found)
    assert check.examine(case, here)["pallas_fake"]["status"] == "unchecked"
    assert "the reference raised RuntimeError: RESOURCE_EXHAUSTED" in caplog.text
    assert check.read(here) == {}


def test_what_has_a_verdict_is_not_checked_again(here, monkeypatch):
    case = case_of("right")
    check.write(here, case.key, "pallas_fake", passed(1.0))
    monkeypatch.setattr(check, "run_child", None)
    assert check.examine(case, here) == {"pallas_fake": passed(1.0)}


def passed(milliseconds):
    return Verdict(status="passed", error=0.0, ms=milliseconds, reason="")


def test_verdicts_of_another_environment_do_not_count(here):
    for name in here:
        check.write({**here, name: "other"}, "a case", "pallas_fake", passed(1.0))
    assert check.read(here) == {}


def test_a_damaged_file_is_ignored_with_one_line_and_replaced(here, cache, caplog):
    check.write(here, "a case", "pallas_fake", passed(1.0))
    (path,) = cache.glob("*.json")
    path.write_text(path.read_text()[:40])
    assert check.read(here) == {}
    assert [m for m in caplog.messages if str(path) in m]
    check.write(here, "a case", "pallas_fake", passed(1.0))
    assert check.read(here) == {"a case": {"pallas_fake": passed(1.0)}}


CANDIDATES = ("pallas_tpu", "blockwise", "reference")


@pytest.fixture
def chip(monkeypatch):
    """Take the CPU for a TPU whose kernel computes as `blockwise` does; return the selection's case of a call."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: "TPU v5 lite")
    monkeypatch.setattr(plan, "splits_arrays", lambda: False)
    monkeypatch.setattr(api, "run", blockwise.run)
    attend(found := Selection(verdicts={}))
    (case,) = found.cases.values()
    return case


def attend(selection=None):
    """Return the backend of a call of attention."""
    args, options = random_case(24)
    with selecting(selection) if selection else contextlib.nullcontext(), plan.recording() as names:
        jax.eval_shape(lambda *x: dcmha.attention(*x, **options), *args)
    return names[-1]


WRONG = Verdict(status="wrong", error=0.5, ms=0.5, reason="the largest relative error")


@pytest.mark.parametrize(
    ("verdicts", "name"),
    [
        ([passed(1.0), passed(2.0), passed(3.0)], "pallas_tpu"),
        ([passed(2.0), passed(1.0), passed(3.0)], "blockwise"),
        ([passed(2.0), passed(3.0), passed(1.0)], "reference"),
        ([WRONG, passed(2.0), passed(3.0)], "blockwise"),
        ([passed(1.0), WRONG, WRONG], "pallas_tpu"),
        ([passed(1.0), passed(2.0)], "blockwise"),  # one is missing
        ([], "blockwise"),
    ],
)
def test_the_fastest_that_passed_is_selected_if_all_candidates_have_a_verdict(verdicts, name, chip, here, caplog):
    for candidate, verdict in zip(CANDIDATES, verdicts, strict=False):
        check.write(here, chip.key, candidate, verdict)
    plan.warn_once.cache_clear()
    caplog.clear()
    assert tuple(chip.candidates) == CANDIDATES
    for _ in range(2):  # it warns once
        assert attend(Selection()) == name
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = [f"pallas_tpu is not used for {chip.label}: wrong: the largest"] * (WRONG in verdicts[:1])
    expected += ["`dcvit check-kernels --config CONFIG`"] * (len(verdicts) < len(CANDIDATES))
    assert len(warnings) == len(expected)
    assert all(text in warning for text, warning in zip(expected, warnings, strict=True))


@pytest.mark.parametrize(("policy", "name"), [("verify", "blockwise"), ("trust", "pallas_tpu"), ("off", "blockwise")])
def test_the_environment_sets_the_policy_outside_of_selecting(policy, name, chip, monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", policy)
    assert contextvars.Context().run(attend) == name


def test_an_unknown_policy_in_the_environment_is_an_error_also_without_kernels(monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", "on")
    with pytest.raises(ValueError, match="DCVIT_KERNELS='on': expected 'verify', 'trust' or 'off'"):
        contextvars.Context().run(attend)


def test_a_recorded_choice_is_used_without_verdicts(chip):
    for recorded, name in (("pallas_tpu", "pallas_tpu"), ("reference", "reference"), ("", "blockwise")):
        assert attend(Selection(chosen={chip.key: recorded}, verdicts={})) == name


def test_processes_without_common_verdicts_use_no_kernel(chip, here, monkeypatch, caplog):
    for candidate in CANDIDATES:
        check.write(here, chip.key, candidate, passed(1.0))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert attend(Selection()) == "blockwise"
    assert "several processes could select different kernels" in caplog.text
    assert attend(Selection(verdicts=check.read(here))) == "pallas_tpu"


def test_the_kernel_that_combines_heads_on_a_tpu_needs_a_verdict(chip):
    x, w = jnp.ones((2, 300, 4, 16)), jnp.ones((2, 300, 2, 2, 2))
    with selecting(Selection(verdicts={})) as selection:
        program = str(jax.make_jaxpr(lambda *a: plan.combine_heads(*a))(x, w))
    assert "pallas_call" not in program
    (case,) = selection.cases.values()
    table = {case.key: {"pallas_tpu": passed(1.0), "sum": passed(2.0)}}
    with selecting(Selection(verdicts=table)):
        assert "pallas_call" in str(jax.make_jaxpr(lambda *a: plan.combine_heads(*a))(x, w))
    assert check.judge(case, "sum")["status"] == "passed"


@pytest.mark.parametrize(("platform", "form"), [("cpu", "dot_general"), ("gpu", "mul")])
def test_heads_are_combined_by_products_on_cpus_and_sums_on_gpus(platform, form, monkeypatch):
    """Without a verdict."""
    monkeypatch.setattr(device, "platform", lambda: platform)
    x, w = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 16, 2, 2, 2))
    program = str(jax.make_jaxpr(lambda *a: plan.combine_heads(*a))(x, w))
    assert form in program
    assert ("dot_general" in program) == (platform == "cpu")


@pytest.mark.slow
def test_a_tpu_program_has_no_kernel_if_they_are_off(chip, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: "TPU v5 lite")
    monkeypatch.setattr(plan, "splits_arrays", lambda: False)
    for composition in ("qkpg", "qp"):  # with key-wise branches, and folded, whose heads another kernel combines
        args, options = random_case(300, 300, branches=composition)
        for policy in ("off", "trust"):
            with selecting(Selection(policy)):
                program = jax.jit(lambda *x, o=options: dcmha.attention(*x, **o)).trace(*args)
                text = program.lower(lowering_platforms=("tpu",)).as_text()
            assert ("tpu_custom_call" in text) == (policy == "trust")


def test_long_rows_are_compared_with_blocks(monkeypatch):
    case, arrays = case_of("right"), None
    by_example = check.reference_of(case)
    monkeypatch.setattr(check, "MOST_SCORES", 100)
    arrays = check._random_arrays(case.arrays)
    np.testing.assert_allclose(check.reference_of(case)(arrays), by_example(arrays), atol=1e-4)
