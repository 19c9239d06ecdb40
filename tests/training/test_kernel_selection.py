"""Verification of kernels by a training run, on a simulated chip whose kernel misbehaves."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from trained_workdirs import load_params

from dcvit.dcmha.selection import Selection
from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.runs import steps
from dcvit.training import kernels

TRAIN = [
    "train", "--config", "vit_digits:attention=dcmha", "--config.total_steps=3", "--config.total_epochs=None",
    "--config.model.depth=1", "--config.model.mlp_dim=16", "--config.tensorboard=False",
]  # fmt: skip
STEP_ONLY = "--config.evals={}"


def start(kernel, workdir, cache, *words):
    """Start the command."""
    env = {**os.environ, "KERNEL": kernel, "DCVIT_CACHE": str(cache), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "tests/support/simulated_chip.py", *TRAIN, "--workdir", str(workdir), *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes):
    """Return the exit status of each process and what it wrote."""
    with ThreadPoolExecutor(len(processes)) as pool:
        try:
            texts = list(pool.map(lambda process: process.communicate(timeout=560)[0], processes))
        finally:
            for process in processes:
                process.kill()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def train(kernel, workdir, cache, *words):
    """Run the command; return its exit status and what it wrote."""
    return finish(start(kernel, workdir, cache, *words))[0]


def train_in_two_processes(kernels, workdir, caches):
    """Run the command in two processes with a simulated chip each, whose kernels and verdicts may differ."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    words = [("--coordinator", address, "--num_processes", "2", "--process_id", str(i)) for i in range(2)]
    each = zip(kernels, caches, words, strict=True)
    return finish(*(start(kernel, workdir, cache, STEP_ONLY, *some) for kernel, cache, some in each))


def chosen(workdir):
    """Return the implementations that the last checkpoint of a run records."""
    return {*steps.about(workdir / "checkpoints" / "3")["kernels"]["chosen"].values()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The workdir of a run without kernels."""
    folder = tmp_path_factory.mktemp("plain")
    status, text = train("correct", folder / "run", folder / "cache", "--config.kernels=off")
    assert status == 0, text
    return folder / "run"


@pytest.mark.exhaustive
def test_a_run_completes_without_a_kernel_that_is_wrong(plain, tmp_path):
    status, text = train("wrong", tmp_path / "run", tmp_path / "cache", "--config.kernels=verify")
    assert status == 0, text
    assert "pallas_tpu is not used for float32[64, 16, 4, 16]" in text
    assert "pallas_tpu" not in chosen(tmp_path / "run")
    both = [jax.tree.leaves(load_params(workdir)) for workdir in (tmp_path / "run", plain)]
    for x, y in zip(*both, strict=True):
        assert abs(x - y).max() < 1e-3


@pytest.mark.exhaustive
def test_the_same_command_runs_without_a_kernel_that_blocked_the_device(tmp_path):
    """A command ends at the first call that blocks."""
    for _ in range(4):
        status, text = train("blocks", tmp_path / "run", tmp_path / "cache", "--config.kernels=verify")
        if status == 0:
            break
        assert "the same command will not use it" in text
    assert status == 0, text
    assert "pallas_tpu" not in chosen(tmp_path / "run")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("both", "is_selected", "line"),
    [
        (("wrong", "fast"), False, "pallas_tpu is not used for float32[32, 16, 4, 16]"),
        (("fast", "wrong"), True, "pallas_tpu is used for float32[32, 16, 4, 16]"),
    ],
)
def test_two_processes_that_disagree_run_what_process_0_selects(both, is_selected, line, tmp_path):
    """The kernel is right on one of two chips. Process 1 has a verdict on its own chip.

    The runs have no evaluations, whose kernels are selected by the same function as those of a step.
    """
    caches = [tmp_path / "0", tmp_path / "1"]
    status, text = train(both[1], tmp_path / "alone", caches[1], "--config.input.batch_size=32", STEP_ONLY)
    assert status == 0, text
    runs = train_in_two_processes(both, tmp_path / "run", caches)
    text = "".join(text for _, text in runs)
    assert [status for status, _ in runs] == [0, 0], text
    of_step = [words for words in text.splitlines() if "wrong: " in words and "float32[32" in words]
    assert [line in words for words in of_step] == [True], text
    assert {name == "pallas_tpu" for name in chosen(tmp_path / "run")} == {is_selected}


def test_processes_with_different_policies_do_not_start(monkeypatch):
    monkeypatch.setenv("DCVIT_KERNELS", "trust")
    monkeypatch.setattr(multihost, "gather", lambda name, value: [value, {**value, "policy": "off"}])
    with pytest.raises(ConfigError, match="processes differ in DCVIT_KERNELS: off and trust"):
        kernels.select(None, {})


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
    assert kernels.select("off", {}) == Selection("off", share=kernels._share)
