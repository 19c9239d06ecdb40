"""Runs of several processes on localhost, with JAX's own runtime."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from trained_workdirs import TINY, load_params

from dcvit import cli
from dcvit.parallel import multihost
from dcvit.runs import metrics, stop

TEXT = {
    "tensorboard": False, "total_steps": 6, "log_steps": 2, "ckpt_steps": 3, "input.batch_size": 16, "model.width": 32,
    "model.depth": 2, "model.num_heads": 4, "model.mlp_dim": 32, "model.window": 8, "model.context": 32,
    "input.data.context": 32, "evals.validation.data.context": 32, "evals.validation.data.limit": 45,
    "evals.validation.batch_size": 7, "evals.validation.log_steps": 3,
}  # fmt: skip
BOTH = {"mesh": [("data", 2), ("fsdp", 2), ("tensor", 2)], "sharding_strategy": "fsdp+tensor"}
ACROSS = BOTH | {"mesh": [("tensor", 2), ("data", 2), ("fsdp", 2)]}  # two processes hold the same rows
# Lines that a command prints. Gloo, which connects JAX's CPU devices, prints others, and splits lines.
PRINTED = re.compile(r"dcvit train: |step \d+/")


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Group:
    """The processes of one run; all are killed at the end."""

    def __init__(self, count, devices, command, *argv):
        address = f"localhost:{free_port()}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        self.processes = []
        for i in range(count):
            words = [word.replace("{process}", str(i)) for word in argv]
            if count > 1:
                words += ["--coordinator", address, "--num_processes", str(count), "--process_id", str(i)]
            call = [sys.executable, "-u", "-m", f"dcvit.{command}", *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(call, env=env, **pipes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for process in self.processes:
            with process:  # closes its pipes
                pass

    def kill(self):
        for process in self.processes:
            process.kill()

    def finish(self, seconds=240):
        """Return (stdout, stderr) of each process once all have ended, or were killed after the timeout."""
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            with ThreadPoolExecutor(len(self.processes)) as pool:  # a process blocks while its pipe is not read
                return list(pool.map(lambda process: process.communicate(), self.processes))
        finally:
            timer.cancel()

    def reach_step(self, step, seconds=240):
        """Return once process 0 has printed a step; fail if it ends before, or after the timeout."""
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        reached = any(f"step {step}/" in line for line in self.processes[0].stdout)
        timer.cancel()
        if not reached:
            self.kill()
            pytest.fail(f"no step {step}: {self.finish()}")

    @property
    def statuses(self):
        return [process.returncode for process in self.processes]


def options(workdir, config="vit_digits", **overrides):
    tiny = TEXT if config == "lm_stdlib" else TINY | {"evals.test.batch_size": 50}
    words = [f"--config.{key}={value}" for key, value in {**tiny, "ckpt_keep": 9, **overrides}.items()]
    return "train", "--config", config, "--workdir", str(workdir), *words


def run(count, devices, workdir, config="vit_digits", **overrides):
    with Group(count, devices, *options(workdir, config, **overrides)) as group:
        printed = group.finish()
    assert group.statuses == [0] * count, printed
    assert [PRINTED.search(out) is not None for out, _ in printed] == [i == 0 for i in range(count)], printed
    return workdir


def check_same(one, other):
    rows, others = metrics.read(one / "metrics.jsonl"), metrics.read(other / "metrics.jsonl")
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for a, b in zip(rows, others, strict=True):
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (a["step"], key)
    for a, b in zip(*(jax.tree.leaves(load_params(workdir)) for workdir in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run of two processes with four devices each."""
    return run(2, 4, tmp_path_factory.mktemp("two") / "run")


@pytest.mark.weekly
def test_two_processes_and_four_on_another_mesh_train_and_evaluate_like_one(two, tmp_path):
    """There are 360 test images in batches of 56: the last batch ends inside the rows of a process."""
    alone = run(1, 8, tmp_path / "alone")
    check_same(alone, two)
    check_same(alone, run(4, 2, tmp_path / "four", **BOTH))


@pytest.mark.weekly
def test_two_processes_train_on_text_like_one(tmp_path):
    one = run(1, 8, tmp_path / "one", "lm_stdlib")
    check_same(one, run(2, 4, tmp_path / "two", "lm_stdlib", **ACROSS))
    last = metrics.read(one / "metrics.jsonl")[-1]
    assert last["validation/tokens"] == 45 * 32


@pytest.mark.weekly
def test_two_processes_evaluate_like_one(two, tmp_path):
    """The first process writes the report, also of images that other processes read."""
    rows, reports = [], []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        report = str(folder / "{process}.html")
        argv = ["evaluate", "--workdir", str(two), "--format", "json", "--report", report]
        with Group(count, 8 // count, *argv) as group:
            printed = group.finish()
        assert group.statuses == [0] * count, printed
        out = printed[0][0]
        rows.append(json.JSONDecoder().raw_decode(out, out.index("[\n  {"))[0])
        assert all("evaluation" not in other for other, _ in printed[1:])
        assert [path.name for path in folder.iterdir()] == ["0.html"]
        reports.append((folder / "0.html").read_text())
    matrices = [text.split("Confusion matrix")[2].split("</table>")[0] for text in reports]
    assert matrices[0] == matrices[1]
    pictures = [set(re.findall(r'<img [^>]*src="([^"]+)"', text)) for text in reports]
    assert len(pictures[0]) == 24
    assert len(pictures[0] & pictures[1]) >= 22  # mistakes of nearly equal confidence may be ranked differently
    for one, other in zip(*rows, strict=True):
        assert one.pop("images_per_second")
        assert other.pop("images_per_second")
        assert one["n"] == 360
        for key, value in one.items():
            assert other[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


@pytest.mark.exhaustive
def test_process_that_fails_ends_the_others_with_its_message(tmp_path):
    """Process 1 has another workdir."""
    with Group(2, 2, *options(f"{tmp_path}/{{process}}")) as group:
        (_, first), (_, second) = group.finish()
    assert group.statuses == [1, 2]
    assert "error: workdir" in second
    assert "stopped because process 1 failed: workdir" in first
    assert "not on a file system that all processes share" in first


@pytest.mark.weekly
def test_processes_with_different_data_are_refused(tmp_path):
    data = {"total_steps": "none", "total_epochs": 1, "input.data.limit": "70{process}"}
    with Group(2, 2, *options(tmp_path / "run", **data)) as group:
        (_, first), (_, second) = group.finish()
    assert 2 in group.statuses
    assert 0 not in group.statuses
    assert "processes differ in" in first + second


@pytest.mark.exhaustive
def test_signal_to_one_process_saves_the_same_step_in_all_and_one_process_resumes_to_the_same_result(tmp_path, two):
    workdir = tmp_path / "run"
    words = options(workdir)
    with Group(2, 4, *words) as group:
        group.reach_step(2)
        group.processes[1].send_signal(signal.SIGTERM)
        printed = group.finish()
    assert group.statuses == [stop.SAVED] * 2, printed
    saved = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())
    assert re.search(rf"stopped by SIGTERM.*\b{saved}\b", printed[0][1]), printed[0][1]
    check_same(two, run(1, 8, workdir))


@pytest.mark.weekly
@pytest.mark.parametrize(("lost", "sent"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_process_ends_after_another_one_was_lost_and_the_run_resumes_to_the_same_result(tmp_path, two, lost, sent):
    """JAX aborts the process, or its communication fails before."""
    workdir = tmp_path / "run"
    with Group(2, 4, *options(workdir)) as group:
        group.reach_step(4)
        group.processes[lost].send_signal(sent)
        group.processes[1 - lost].wait(timeout=4 * multihost.HEARTBEAT_SECONDS)
        group.kill()
        printed = group.finish()
    assert group.statuses[1 - lost] in (1, -signal.SIGABRT)
    if group.statuses[1 - lost] == 1:
        assert "error: stopped because the connection to another process was lost" in printed[1 - lost][1]
    run(2, 4, workdir)
    check_same(two, workdir)


SLURM = {"SLURM_JOB_ID": "70000", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SALLOC = {**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "localhost"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "localhost"}
ENVIRONMENTS = {
    "no launcher": ({}, False),
    "srun of eight tasks": ({**SALLOC, "SLURM_STEP_NUM_TASKS": "8"}, True),
    "mpirun in a shell of salloc": ({**SALLOC, "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
    "pod": (POD, False),
}


@pytest.fixture
def environment(monkeypatch):
    """A function that replaces the variables of launchers by others."""

    def replace(variables):
        for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_"))]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return replace


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_cluster_is_detected_by_its_environment(environment, name):
    variables, several = ENVIRONMENTS[name]
    environment(variables)
    assert multihost.in_cluster() is several


@pytest.mark.parametrize("index", [0, 1])
def test_pod_without_the_client_of_kubernetes_runs_alone_and_says_so(environment, monkeypatch, caplog, index):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    environment({**POD, "JOB_COMPLETION_INDEX": str(index)})
    assert not multihost.in_cluster()
    assert [record.message[:6] for record in caplog.records] == ["pod 1 "] * index


CONNECT = """
import argparse
from dcvit.parallel import multihost
multihost.initialize(argparse.Namespace(coordinator=None, num_processes=None, process_id=None))
print(multihost.gather("indices", multihost.index()))

"""
TASK = {**SALLOC, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.exhaustive
def test_tasks_of_a_launcher_connect_without_options(environment):
    environment({})
    port = str(free_port())

    def start(index):
        env = {**os.environ, **TASK, "SLURM_PROCID": index, "SLURM_LOCALID": index, "JAX_COORDINATOR_PORT": port}
        return subprocess.Popen([sys.executable, "-c", CONNECT], env=env, stdout=subprocess.PIPE, text=True)

    processes = [start("0"), start("1")]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["[0, 1]", ""]
    assert [process.returncode for process in processes] == [0, 0]


@pytest.fixture
def store(monkeypatch):
    """The coordinator's key-value store, as process 0 of two sees it; `monkeypatch` replaces exits and pauses."""

    def leave(status):
        raise SystemExit(status)

    values = {}

    def key_value_set(key, value):
        if key in values:
            raise RuntimeError("ALREADY_EXISTS")
        values[key] = value

    def blocking_key_value_get(key, timeout_in_ms):
        if key not in values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return values[key]

    client = types.SimpleNamespace(
        key_value_set=key_value_set, key_value_try_get=values.__getitem__, blocking_key_value_get=blocking_key_value_get
    )
    state = types.SimpleNamespace(client=client, process_id=0, num_processes=2)
    monkeypatch.setattr(multihost, "process_state", lambda: state)
    monkeypatch.setattr(multihost.os, "_exit", leave)
    monkeypatch.setattr(multihost.time, "sleep", lambda _: None)
    return values


def failing(error):
    def main(argv):
        raise error

    return main


def test_first_failure_is_sent_to_the_other_processes_which_have_time_to_read_it(store, monkeypatch):
    slept = []
    monkeypatch.setattr(multihost.time, "sleep", slept.append)
    for message, status in (("broken", 2), ("connection closed by peer", 1)):
        with pytest.raises(SystemExit, match=str(status)):
            multihost.fail(message, status)
    assert store[multihost.FAILURE] == "process 0 failed: broken"
    assert slept == [multihost.FAREWELL_SECONDS] * 2


def test_process_that_waits_for_one_that_failed_prints_the_message_of_that_one(store, capsys):
    store[multihost.FAILURE] = "process 1 failed: broken"
    with pytest.raises(SystemExit, match="1"):
        cli.run(lambda argv: multihost.gather("ready", True))
    assert capsys.readouterr().err == "error: stopped because process 1 failed: broken\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), "the connection to another process"),
        (RuntimeError("a bug"), None),
    ],
)
def test_lost_connection_is_one_line_and_a_bug_has_its_traceback(store, capsys, error, line):
    with pytest.raises(SystemExit, match="1"):
        cli.run(failing(error))
    printed = capsys.readouterr().err
    assert (printed.count("\n") == 1) is (line is not None)
    assert (f"error: stopped because {line} was lost: " if line else "Traceback") in printed


@pytest.mark.slow
def test_tpu_vm_is_detected_unless_jax_uses_another_platform(monkeypatch):
    from jax._src import cloud_tpu_init

    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not multihost.on_tpu_vm()
    monkeypatch.delenv("JAX_PLATFORMS")
    assert multihost.on_tpu_vm()
