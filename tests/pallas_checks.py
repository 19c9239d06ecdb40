"""Race detection in interpreted TPU kernels, and compilation by the real TPU compiler in one process."""

import inspect
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha import ComposeWeights

# Two cores, as a chip may have; a race needs two. From JAX 0.11 on, a race is an error unless it is to be a warning.
RACES = {"detect_races": True, "num_cores_or_threads": 2}
if "on_race" in inspect.signature(pltpu.InterpretParams).parameters:
    RACES["on_race"] = "warn"
DETECT_RACES = pltpu.InterpretParams(**RACES)


def watch_races(monkeypatch):
    """Return a list that collects the race detection state of every kernel that is interpreted afterwards.

    JAX's public API does not report races, so that the private class of the state is replaced.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    watched, state = [], interpret_pallas_call.RaceDetectionState
    monkeypatch.setattr(
        interpret_pallas_call, "RaceDetectionState", lambda **options: watched.append(state(**options)) or watched[-1]
    )
    return watched


def compile_in_subprocess(module, cases):
    """Call `compile_for(topology, *shape)` of a test module for every shape of every topology, in one new process.

    libtpu reads its environment when it is loaded, so that a process of its own is needed.
    """
    calls = [(topology, *shape) for topology, shapes in cases.items() for shape in shapes]
    environment = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                   "TPU_WORKER_HOSTNAMES": "localhost", "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    script = f"import json, sys, {module} as t; [t.compile_for(*call) for call in json.loads(sys.argv[1])]"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("compiled") == len(calls)


def one_chip(topology):
    """Return a mesh of one chip of a topology, and a function (*shape, dtype) -> ShapeDtypeStruct on it."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_compilation_cache", False)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(chips[:1]), ("x",))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    return mesh, array


def weights_like(array, batch, queries, keys, heads, rank=2):
    """ComposeWeights with all dynamic branches, made by `array(*shape)`."""
    sides = [
        (array(batch, n, rank, heads), array(batch, n, rank, heads), array(batch, n, heads)) for n in (queries, keys)
    ]
    return ComposeWeights(*sides[0], *sides[1])
