"""Several processes that make one run: how they find each other, which one speaks, and how they end together.

The engine is JAX's own runtime, `jax.distributed`. Where one process fails, it leaves its message with the coordinator,
and every other process, whatever it waits for, prints it and ends. A process that is killed leaves none: the others
notice after `HEARTBEAT_SECONDS`, and at once where it was the coordinator, process 0.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from dcvit.errors import ConfigError, first_line

HEARTBEAT_SECONDS = 30
FAILURE, STOP = "dcvit/failure", "dcvit/stop"  # the coordinator's keys: the first failure, the wish that all stop
GATHER_SECONDS = 1800  # how long one waits for the others, which may be slow to open their data
ENDED = threading.Event()  # this process is at its end, well or not
POLL_SECONDS = 0.5
EXIT_SECONDS = 60  # how long one that stops waits for the others to have stopped
FAREWELL_SECONDS = 2.0  # how long the failed coordinator stays, so that all hear why


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a run by several processes; Slurm, Open MPI and Cloud TPU pods need none of them."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, of a run by several processes"
    )
    parser.add_argument("--num_processes", type=int, metavar="N")
    parser.add_argument("--process_id", type=int, metavar="I", help="0 to N-1")


def initialize(args: Any) -> None:
    """Joins the processes of this run, as the options of `add_options` or the cluster's environment say; all but
    process 0 fall silent on stdout. Does nothing for a run of one process.

    Raises:
      ConfigError: some of the options without the others, or processes that do not find each other.
    """
    given = {name: getattr(args, name) for name in ("coordinator", "num_processes", "process_id")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ConfigError(f"--coordinator, --num_processes and --process_id go together; missing {', '.join(missing)}")
    if missing and not (in_cluster() or on_tpu_vm()):
        return
    host, _, port = (given["coordinator"] or ":1").rpartition(":")
    known = host and port.isdecimal() and 0 < int(port) < 2**16
    if not missing and not (known and 0 <= given["process_id"] < given["num_processes"]):
        raise ConfigError("expected --coordinator HOST:PORT and --process_id from 0 to --num_processes - 1")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from this process
    try:
        jax.distributed.initialize(
            given["coordinator"], given["num_processes"], given["process_id"],
            cluster_detection_method=None if missing else "deactivate", heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
    except (RuntimeError, ValueError) as e:
        if missing and not in_cluster():  # a TPU VM whose metadata name no others
            return
        raise ConfigError(f"cannot join the other processes: {first_line(e)}") from None
    watcher = threading.Thread(target=_watch, daemon=True)
    watcher.start()
    atexit.register(watcher.join)  # before JAX's own exit, which waits for all processes
    atexit.register(ENDED.set)
    if not is_first():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - to the end of the process


def in_cluster() -> bool:
    """Whether Slurm (`srun`) or Open MPI started this as one of several processes."""
    counts = [os.environ.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    return any(count.isdigit() and int(count) > 1 for count in counts)


def on_tpu_vm() -> bool:
    """Whether JAX runs on the chips of a Cloud TPU VM, whose metadata tell of other workers."""
    from jax._src import cloud_tpu_init  # JAX's own answer, for which it has no public name

    return cloud_tpu_init.running_in_cloud_tpu_vm and "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return index() == 0


def index() -> int:
    """The number of this process, from 0. Asks no backend, which may hang while it is set up."""
    from jax._src import distributed

    return int(distributed.global_state.process_id)


def is_single_process() -> bool:
    """Whether this process makes the run by itself; asks no backend, so that JAX is not yet set up by the question."""
    return _client() is None


def wait_for_all(what: str) -> None:
    """Returns once every process has come here, by the same name."""
    if not is_single_process():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def agree(values: Mapping[str, Any]) -> None:
    """Checks that every process has the same values, which JSON can hold: what each decides by itself.

    Raises:
      ConfigError: process 0 has another one, which is named with both.
    """
    first = gather("agreed", values)[0]
    for name, value in json.loads(json.dumps(values)).items():
        if first.get(name) != value:
            here, there = str(value)[:60], str(first.get(name))[:60]
            raise ConfigError(f"processes differ in {name}: {here} here, {there} in process 0")


def gather(name: str, value: Any, seconds: int = GATHER_SECONDS) -> list[Any]:
    """What every process, in order, gave under this name, which is used once; JSON can hold it. No device takes part,
    so that any thread may ask, whatever the others of its process are at."""
    if is_single_process():
        return [value]
    from jax._src import distributed

    client, count = _client(), distributed.global_state.num_processes
    client.key_value_set(f"dcvit/{name}/{index()}", json.dumps(value))
    return [json.loads(client.blocking_key_value_get(f"dcvit/{name}/{i}", seconds * 1000)) for i in range(count)]


def request_stop() -> None:
    """Makes `stop_requested` true in every process of this run."""
    if not is_single_process():
        with contextlib.suppress(Exception):  # another process has asked already
            _client().key_value_set(STOP, str(index()))


def stop_requested() -> bool:
    """Whether a process of this run has asked all others to stop."""
    if is_single_process():
        return False
    try:
        return bool(_client().key_value_try_get(STOP))
    except Exception:  # not there, or the coordinator is lost, which `_watch` notices
        return False


def exit_process(status: int) -> NoReturn:
    """Ends this process at once, whatever its other threads are at; of several, all do so together."""
    ENDED.set()
    if not is_single_process():
        with contextlib.suppress(Exception):  # nobody is left to wait for
            gather("left", True, EXIT_SECONDS)
        if is_first():
            time.sleep(FAREWELL_SECONDS)
    _exit(status)


def fail(message: str, status: int) -> NoReturn:
    """Ends this process, one of several, without waiting for the others, and tells them why."""
    ENDED.set()
    with contextlib.suppress(Exception):  # nobody is left to be told
        try:
            _client().key_value_set(FAILURE, f"process {index()}: {message}")
        except Exception:  # another failure stands there already, of which this one may be no more than a consequence
            print(f"error: stopped with {_client().key_value_try_get(FAILURE)}", file=sys.stderr)
    if is_first():
        time.sleep(FAREWELL_SECONDS)
    _exit(status)


def _exit(status: int) -> NoReturn:
    """Ends the process without waiting for its threads; a terminal gets its cursor back, which a live bar hides."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                if stream.isatty():
                    stream.write("\x1b[?25h")
                stream.flush()
    finally:
        os._exit(status)


def _client() -> Any:
    """The connection to the coordinator, for which JAX has no public name."""
    from jax._src import distributed

    return distributed.global_state.client


def _watch() -> None:
    """Until the run has ended, looks for the failure of another process; prints it and ends this one."""
    while not ENDED.wait(POLL_SECONDS):
        try:
            message = _client().key_value_try_get(FAILURE)
        except Exception as e:
            if "NOT_FOUND" in str(e):
                continue
            message = f"lost process 0, the coordinator: {first_line(e)}"
        if not ENDED.is_set():
            with contextlib.suppress(OSError, ValueError):
                print(f"error: stopped with {message}", file=sys.stderr, flush=True)
            _exit(1)
