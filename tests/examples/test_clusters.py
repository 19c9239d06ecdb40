"""Runs of the examples for Ray and submitit that lose a process end as a run without interruption."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from markdown_pages import ROOT
from test_examples import load
from trained_workdirs import TINY, load_params

from dcvit.runs import metrics, steps

LONG = TINY | {
    "total_steps": 400, "log_steps": 10, "ckpt_steps": 20, "ckpt_keep": 99, "evals.test.log_steps": 200,
    "evals.test.batch_size": 50,
}  # fmt: skip
SECONDS = 300


def words(workdir):
    return ["--config", "vit_digits", "--workdir", str(workdir), *(f"--config.{k}={v}" for k, v in LONG.items())]


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


STARTED = []


@pytest.fixture(autouse=True)
def kill():
    """Leave no process behind when a test fails."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


def start_process(command, **options):
    STARTED.append(subprocess.Popen(command, **options))
    return STARTED[-1]


def train(workdir, *options):
    """Train without interruption, by one process for each list of options."""
    running = [start_process([sys.executable, "-m", "dcvit.train", *words(workdir), *more]) for more in options]
    assert [process.wait(SECONDS) for process in running] == [0] * len(options)
    return workdir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of two processes without interruption."""
    several = ["--coordinator", free_address(), "--num_processes", "2", "--process_id"]
    return train(tmp_path_factory.mktemp("whole") / "run", [*several, "0"], [*several, "1"])


def reach(workdir, step):
    """Return once a run has logged a step."""
    deadline = time.monotonic() + SECONDS
    while not (rows := metrics.read(workdir / "metrics.jsonl")) or rows[-1]["step"] < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_same(one, other):
    """Check that two runs have the same metrics and parameters, bit for bit."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    a, b = ({"/".join(k): v for k, v in flatten_dict(load_params(run)).items()} for run in (one, other))
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.mark.weekly
@pytest.mark.interop
def test_run_on_ray_resumes_after_a_lost_worker_to_the_same_result(tmp_path, whole):
    """Ray prints the lines of a worker with its process id."""
    pytest.importorskip("ray")
    command = [sys.executable, ROOT / "examples" / "ray_train.py", "--workers", "2", *words(tmp_path / "ray")]
    env = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}  # Ray writes to ~/ray_results
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lost, printed = None, []
    with subprocess.Popen(command, env=env, **pipes) as driver:
        for line in driver.stdout:
            printed.append(line)
            found = re.search(r"RayTrainWorker pid=(\d+)\).* step (\d+)/", line)
            if found and not lost and int(found[2]) >= 50:
                lost = int(found[1])
                os.kill(lost, signal.SIGKILL)
    assert driver.returncode == 0, "".join(printed[-40:])
    workers = {int(pid) for pid in re.findall(r"RayTrainWorker pid=(\d+)\)", "".join(printed))}
    assert lost in workers
    assert len(workers) >= 3, "".join(printed)  # Ray has started others
    assert max(steps.saved_steps(tmp_path / "ray")) == LONG["total_steps"]
    check_same(whole, tmp_path / "ray")


@pytest.mark.weekly
@pytest.mark.interop
def test_job_of_submitit_saves_and_resumes_to_the_same_result(tmp_path):
    pytest.importorskip("submitit")
    workdir = tmp_path / "job"
    job = load("submitit_train").submit(words(workdir), "local", tmp_path / "submitit", timeout_min=10)
    reach(workdir, 50)
    (task,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()  # of submitit's controller
    os.kill(int(task), signal.SIGUSR2)  # as Slurm does before the time limit
    assert job.result() == 0
    assert job.stdout().count("Starting with JobEnvironment") == 2  # it was requeued
    assert "stopped by SIGTERM: step" in job.stderr()
    check_same(train(tmp_path / "whole", []), workdir)
