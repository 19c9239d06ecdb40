"""Verification of kernels by a training run, on a simulated chip whose kernel misbehaves."""

import json
import os
import subprocess
import sys

import jax
import pytest
from trained_workdirs import load_params

from dcvit.dcmha.selection import Selection
from dcvit.runs import steps
from dcvit.training import kernels

TRAIN = ["train", "--config", "vit_digits:attention=dcmha", "--config.total_steps=3", "--config.total_epochs=None"]


def train(kernel, workdir, cache, *words):
    """Run the command; return its exit status and what it wrote."""
    env = {**os.environ, "DCVIT_CACHE": str(cache), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "tests/simulated_chip.py", kernel, *TRAIN, "--workdir", str(workdir), *words]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)
    return run.returncode, run.stdout + run.stderr


def chosen(workdir):
    """Return the implementations that the last checkpoint of a run records."""
    return {*steps.about(workdir / "checkpoints" / "3")["kernels"]["chosen"].values()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["wrong", "raises", "blocks"])
def test_a_run_completes_without_a_kernel_that_misbehaves(kernel, tmp_path):
    words = ["--config.kernels=verify"]
    status, text = train(kernel, tmp_path / "run", tmp_path / "cache", *words)
    assert status == 0, text
    assert "pallas_tpu is not used for float32[64, 16, 4, 16]" in text
    assert "pallas_tpu" not in chosen(tmp_path / "run")
    status, text = train("correct", tmp_path / "plain", tmp_path / "other", "--config.kernels=off")
    assert status == 0, text
    both = [jax.tree.leaves(load_params(tmp_path / name)) for name in ("run", "plain")]
    for x, y in zip(*both, strict=True):
        assert abs(x - y).max() < 1e-3


def test_a_resumed_run_takes_over_the_choice_on_the_same_devices_and_software():
    first = kernels.select("verify", {})
    first.chosen["a case"] = "pallas_tpu"
    about = json.loads(json.dumps({"kernels": kernels.record(first)}))
    assert kernels.select("verify", about).chosen == {"a case": "pallas_tpu"}
    about["kernels"]["environment"]["jax"] = "0.0.0"
    assert kernels.select("verify", about).chosen == {}
    assert kernels.select("off", {}) == Selection("off", share=kernels._share)
