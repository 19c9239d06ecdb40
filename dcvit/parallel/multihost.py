"""Runs of several processes: how they connect, exchange values, and end together.

JAX's runtime, `jax.distributed`, connects the processes to the coordinator, process 0. A process that fails writes its
message to the coordinator's key-value store, where the others find it when they wait in `gather` or get an error. If a
process was killed or does not answer for `HEARTBEAT_SECONDS`, JAX aborts all others.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dcvit.errors import ConfigError, first_line
from dcvit.versions import Value, cluster_size, on_cloud_tpu, process_state

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 30  # silence of a process after which JAX aborts all others
FAILURE = "dcvit/failure"  # key of the message of the first failure
GATHER_SECONDS = 1800  # timeout of `gather`; other processes may take long to open their data
POLL_SECONDS = 1  # interval at which `gather` checks if another process failed
FAREWELL_SECONDS = 2.0  # how long the coordinator stays, so that the others can read its messages
LAUNCHED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # variables with the number of processes that were started
HINT = "; give --coordinator, --num_processes and --process_id"
_uses: collections.Counter[str] = collections.Counter()  # calls of `gather`, by name
LOST_CONNECTION = re.compile("Gloo|NCCL|UNAVAILABLE|Connection (reset|closed|refused)|Socket closed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run of several processes; launchers that JAX detects need none of them."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 in a run of several processes")
    parser.add_argument("--num_processes", type=int, metavar="N", help="number of processes of the run")
    parser.add_argument("--process_id", type=int, metavar="I", help="0 to N-1")


def initialize(args: argparse.Namespace, *, preemptible: bool = False) -> None:
    """Connect the processes of this run, given by the options of `add_options` or the cluster's environment.

    In all processes except process 0, stdout is discarded. Does nothing for a run of one process.

    Args:
      args: the options.
      preemptible: SIGTERM makes `reached_stop` return True, instead of ending the process.

    Raises:
      ConfigError: some of the options are missing or invalid, or the processes do not find each other.
    """
    given = {name: getattr(args, name) for name in ("coordinator", "num_processes", "process_id")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ConfigError(
            f"--coordinator, --num_processes and --process_id must be given together; missing {', '.join(missing)}"
        )
    detected = bool(missing) and in_cluster()
    if missing and not (detected or on_tpu_vm()):
        return
    host, _, port = (given["coordinator"] or ":1").rpartition(":")
    is_address = host and port.isdecimal() and 0 < int(port) < 2**16
    if not missing and not (is_address and 0 <= given["process_id"] < given["num_processes"]):
        raise ConfigError("expected --coordinator HOST:PORT and --process_id from 0 to --num_processes - 1")
    import jax  # not at the top, so that --help of a command does not wait for it

    jax.config.update("jax_enable_preemption_service", preemptible)  # it handles SIGTERM
    try:
        jax.distributed.initialize(
            given["coordinator"], given["num_processes"], given["process_id"],
            cluster_detection_method=None if missing else "deactivate", heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
    except (RuntimeError, ValueError) as e:
        if missing and not detected:  # the metadata of this TPU VM list no other workers
            return
        hint = HINT if missing else ""
        raise ConfigError(f"cannot connect to the other processes: {first_line(e).rstrip('.')}{hint}") from None
    if not is_first():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends


def in_cluster() -> bool:
    """Return True if a launcher that JAX detects started this process as one of several, except on Cloud TPU VMs.

    The counts of Slurm and Open MPI have precedence. In a shell of `salloc`, JAX would wait for all tasks of the
    allocation. Before version 0.12 it does not detect Open MPI 5, and connecting ends with an error.

    Raises:
      ConfigError: the detection fails, such as in a pod that may not ask Kubernetes for the number of pods.
    """
    counts = [int(count) for name in LAUNCHED if (count := os.environ.get(name, "")).isdecimal()]
    if counts or on_cloud_tpu():
        return max(counts, default=1) > 1
    pod = os.environ.get("JOB_COMPLETION_INDEX", "")
    if pod and not importlib.util.find_spec("kubernetes"):
        if pod != "0":  # a Job of one pod needs no warning
            logger.warning(f"pod {pod} of a Kubernetes Job runs alone{HINT} to connect the pods")
        return False
    try:
        return cluster_size() > 1
    except Exception as e:
        raise ConfigError(f"cannot detect the other processes: {first_line(e).rstrip('.')}{HINT}") from None


def on_tpu_vm() -> bool:
    """Return True if JAX uses the chips of a Cloud TPU VM, whose metadata list the other workers."""
    return on_cloud_tpu() and "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")


def is_first() -> bool:
    """Return True in process 0, which writes files and prints for all processes."""
    return index() == 0


def index() -> int:
    """Return the index of this process, from 0."""
    return int(process_state().process_id)


def is_single_process() -> bool:
    """Return True if the run has one process."""
    return _coordinator() is None


def wait_for_all(name: str) -> None:
    """Return when every process has called this with the same name."""
    gather(name, True)


def agree(values: Mapping[str, Any]) -> None:
    """Check that all processes have computed the same values, which are serializable as JSON.

    Raises:
      ConfigError: a value differs from that of process 0; the message has both.
    """
    first = gather("agreed", values)[0]
    for name, value in json.loads(json.dumps(values)).items():
        if first.get(name) != value:
            here, there = str(value)[:60], str(first.get(name))[:60]
            raise ConfigError(f"processes differ in {name}: {here} in process {index()}, {there} in process 0")


def gather(name: str, value: Any, seconds: int = GATHER_SECONDS) -> list[Any]:
    """Return the values that all processes passed with this name, in the order of the processes.

    No device takes part, so any thread can call this at any time.

    Args:
      name: a name, which all processes use equally often.
      value: serializable as JSON.
      seconds: the timeout.

    Raises:
      RuntimeError: another process failed, is lost, or did not call this in time.
    """
    coordinator = _coordinator()
    if coordinator is None:
        return [value]
    _uses[name] += 1
    key = f"dcvit/{name}/{_uses[name]}"
    coordinator.key_value_set(f"{key}/{index()}", json.dumps(value))
    deadline = time.monotonic() + seconds
    return [_await(coordinator, f"{key}/{i}", deadline) for i in range(process_state().num_processes)]


def _await(coordinator: Value, key: str, deadline: float) -> Any:
    """Return the value of a key once it is set in the store. RuntimeError after the deadline or a process's failure."""
    while True:
        try:
            return json.loads(coordinator.blocking_key_value_get(key, POLL_SECONDS * 1000))
        except RuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e) or time.monotonic() > deadline:
                raise
        if failure := _reported_failure():
            raise RuntimeError(failure)


def reached_stop(boundary: int) -> bool:
    """Return True at the step boundary at which all processes of a run stop, after one of them received SIGTERM.

    Args:
      boundary: the number of the boundary, 1, 2, …; every process calls this at each of them.
    """
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(boundary))


def fail(message: str, status: int) -> NoReturn:
    """End this process without waiting for its other threads or for other processes, and send these the message."""
    if coordinator := _coordinator():
        with contextlib.suppress(Exception):  # another process failed before, or the coordinator has exited
            coordinator.key_value_set(FAILURE, f"process {index()} failed: {message}")
        if is_first():
            time.sleep(FAREWELL_SECONDS)
    _exit(status)


def peer_failure(error: Exception) -> str | None:
    """Return one line about another process's failure that caused this error; None if no failure is known."""
    if failure := _reported_failure():
        return failure
    lost = LOST_CONNECTION.search(str(error))
    return f"the connection to another process was lost: {first_line(error)}" if lost else None


def _reported_failure() -> str | None:
    """Return the message of the first process that failed, if there is one and the coordinator answers."""
    coordinator = _coordinator()
    try:
        return coordinator.key_value_try_get(FAILURE) if coordinator else None
    except Exception:
        return None


def _exit(status: int) -> NoReturn:
    """End the process without waiting for its threads, and show the cursor, which a live progress bar hides."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has exited
                if stream.isatty():
                    stream.write("\x1b[?25h")
                stream.flush()
    finally:
        os._exit(status)


def _coordinator() -> Value:
    """Return JAX's client of the coordinator's key-value store; None in a run of one process.

    `key_value_set` raises an exception if the key exists, `key_value_try_get` if it does not exist.
    """
    return process_state().client
