"""Kernels of commands: the cases of their programs, checks before the devices are opened, and one choice for a run."""

import argparse
import io
import json
import sys

import jax
import pytest

from dcvit import check_kernels, cli
from dcvit.dcmha import check, device
from dcvit.dcmha.backends.tpu import tiling
from dcvit.dcmha.check import ChildError, Verdict
from dcvit.dcmha.plan import Selection, selecting
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.training import kernels

SMALL = ["total_steps=2", "total_epochs=None", "model.depth=1", "model.mlp_dim=16", "input.batch_size=16"]
CONFIG = {"config": "vit_digits:attention=dcmha", "overrides": [*SMALL, "mesh=[('data', 8)]"]}
ALONE = argparse.Namespace(num_processes=None)
PASSED = Verdict(status="passed", error=0.0, ms=1.0, reason="")
SLOWER = Verdict(status="passed", error=0.0, ms=2.0, reason="")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DCVIT_CACHE", str(tmp_path / "kernels"))


@pytest.fixture
def chip(monkeypatch):
    """Take the CPU for a TPU; programs are traced, and not run."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    monkeypatch.setattr(tiling, "device_kind", lambda: "TPU v5 lite")


def cases_of(find, **request):
    with selecting(Selection(verdicts={})) as selection:
        find(**request)
    return [*selection.cases.values()]


@pytest.mark.slow
def test_the_cases_of_a_config_are_those_of_its_step_and_its_evaluators(chip, library_promotion):
    """For the examples of one of 8 devices."""
    cases = cases_of(kernels.cases_of_config, **CONFIG)
    assert sorted(case.arrays["q"][1][0] for case in cases) == [2, 15]
    assert {next(iter(case.candidates)) for case in cases} == {"pallas_tpu"}


@pytest.mark.slow
def test_the_cases_of_a_model_are_those_of_its_evaluators(chip, digits_workdir):
    request = {"checkpoint": None, "config": None, "overrides": [], "image_size": None}
    cases = cases_of(kernels.cases_of_model, place=str(digits_workdir), **request)
    assert [case.arrays["q"][1][0] for case in cases] == [15]


@pytest.fixture
def checked(monkeypatch):
    """The cases that a command checks on a machine with an accelerator, whose programs have the case "a call"."""
    found, case = [], check.Case("a call", {}, {}, {}, {"pallas_tpu": "module:run"})
    monkeypatch.setattr(kernels, "has_accelerator", lambda: True)
    monkeypatch.setattr(check, "run_child", lambda code, request, seconds: [{"device": "chip"}, [[*case]]])
    monkeypatch.setattr(check, "examine", lambda case, environment: found.append((case.label, environment["device"])))
    return found


def test_commands_check_the_kernels_of_their_programs_before_they_open_devices(checked, monkeypatch):
    monkeypatch.setattr(cli, "start_jax", lambda *args, **options: checked.append("start") or exit(3))
    for words in (["train", "--workdir", "absent"], ["benchmark"], ["evaluate", "--checkpoint", "digits"]):
        command = __import__(f"dcvit.{words[0]}", fromlist=["main"])
        with pytest.raises(SystemExit):
            command.main([*words[1:], "--config", "vit_digits"])
    assert checked == [("a call", "chip"), "start"] * 3


@pytest.mark.parametrize(
    ("args", "policy", "variable"),
    [(ALONE, "trust", ""), (ALONE, None, "off"), (argparse.Namespace(num_processes=2), None, "")],
)
def test_nothing_is_checked_for_other_policies_and_in_several_processes(args, policy, variable, checked, monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", variable)
    kernels.check_first(args, CONFIG, policy=policy)
    assert checked == []


def test_a_machine_without_accelerator_starts_no_process(monkeypatch):
    monkeypatch.setattr(check, "run_child", None)
    assert not kernels.has_accelerator()
    monkeypatch.delenv("JAX_PLATFORMS")
    kernels.check_first(ALONE, CONFIG)


def test_a_command_goes_its_way_if_its_cases_are_not_found(checked, monkeypatch, caplog):
    def fails(*args):
        raise ChildError("failed", "its process ended with status 1: ConfigError: x")

    monkeypatch.setattr(check, "run_child", fails)
    kernels.check_first(ALONE, CONFIG)
    assert caplog.messages == ["attention: kernels are not checked: its process ended with status 1: ConfigError: x"]


@pytest.mark.slow
def test_check_kernels_on_a_machine_without_kernels(capsys):
    """Real children list the cases of calls and of a config."""
    assert cli.run(check_kernels.main, ["gates"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 cases with kernels; verdicts: ")
    assert cli.run(check_kernels.main, ["--config", "vit_digits", "--config.batch=1"]) == 2
    assert cli.run(check_kernels.main, ["absent"]) == 2
    assert "no case contains absent" in capsys.readouterr().err


def test_check_kernels_prints_a_row_for_each_implementation(chip, monkeypatch, capsys):
    def run_child(code, request, seconds):
        if "plan_calls" not in code:
            return verdicts.get(request["name"], SLOWER)
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
        check_kernels.plan_calls()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    verdicts = {"pallas_tpu": {**PASSED, "status": "wrong", "reason": "two runs differ"}, "blockwise": PASSED}
    monkeypatch.setattr(check, "run_child", run_child)
    assert cli.run(check_kernels.main, ["--json"]) == 1
    rows = {(row["case"], row["implementation"]): row for row in json.loads(capsys.readouterr().out)}
    assert {case for case, _ in rows} == {*check_kernels.CASES} - {"decoding"}
    assert {key: row["verdict"] for key, row in rows.items() if key[0] == "documents"} == {
        ("documents", "pallas_tpu"): "wrong",
        ("documents", "blockwise"): "fastest",
    }
    verdicts["pallas_tpu"] = PASSED
    assert cli.run(check_kernels.main, ["--json"]) == 1  # the verdict is kept
    assert cli.run(check_kernels.main, ["--json", "--again"]) == 0


def test_all_processes_use_the_verdicts_of_process_0_and_one_policy(monkeypatch):
    table = {"a case": {"pallas_tpu": PASSED}}
    check.write(check.environment(jax.local_devices()[0]), "a case", "pallas_tpu", SLOWER)

    def gather(name, value, policy="verify"):
        return [{"policy": policy, "same": False, "verdicts": table}, value]

    monkeypatch.setattr(multihost, "gather", gather)
    assert kernels.select("verify", {}).verdicts == table
    with pytest.raises(ConfigError, match="processes differ in DCVIT_KERNELS: trust and verify"):
        kernels.select("trust", {})


@pytest.mark.parametrize(("policy", "expected"), [(None, "trust"), ("off", "off")])
def test_the_config_takes_precedence_over_the_environment(policy, expected, monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", "trust")
    assert kernels.select(policy, {}).policy == expected


def test_a_resumed_run_takes_over_the_choice_on_the_same_devices_and_software():
    first = kernels.select("verify", {})
    first.chosen |= {"a case": "pallas_tpu", "without a kernel": ""}
    about = json.loads(json.dumps({"kernels": kernels.record(first)}))
    assert kernels.select("verify", about).chosen == {"a case": "pallas_tpu", "without a kernel": ""}
    about["kernels"]["environment"]["jax"] = "0.0.0"
    assert kernels.select("verify", about).chosen == {}
