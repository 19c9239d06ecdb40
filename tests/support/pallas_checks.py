"""TPU kernels without a TPU: JAX's interpreter with race detection, and the real compiler in a process of its own.

The interpreter evaluates the program that the compiler gets. It has no rule for reshaped references, through which the
kernels read and write interleaved tokens; this module adds it.
"""

import inspect
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpreter
from jax._src.state.types import ReshapeTransform
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha import ComposeWeights

# Two cores, as a chip may have; a race needs two. From JAX 0.11 on, a race is an error unless it is to be a warning.
RACES = {"detect_races": True, "num_cores_or_threads": 2}
if "on_race" in inspect.signature(pltpu.InterpretParams).parameters:
    RACES["on_race"] = "warn"
DETECT_RACES = pltpu.InterpretParams(**RACES)


def with_reshape_rule(to_range):
    """Return JAX's private `to_range`, from the transforms of a reference to a range of its buffer, for reshapes too.

    They have the form `ref.at[:, n].reshape(rows, lanes)[some_rows, :]`, where the range is one slice along each axis.
    """

    def rule(transforms):
        at = next((n for n, x in enumerate(transforms) if isinstance(x, ReshapeTransform)), None)
        if at is None:
            return to_range(transforms)
        whole, shape, some = to_range(transforms[:at]), transforms[at - 1].get_indexer_shape(), transforms[at + 1 :]
        rows, lanes = to_range(some)
        assert (lanes.start, lanes.stop, lanes.step) == (0, shape[-1], 1)
        numbers = np.unravel_index(np.arange(rows.start, rows.stop, rows.step), shape[:-1])
        found = iter([*map(axis_range, numbers), lanes])
        out = tuple(x if isinstance(x, int) else next(found) for x in whole)
        assert [x.stop for x in whole if not isinstance(x, int)] == list(shape), (whole, shape)
        return out

    return rule


def axis_range(numbers):
    """Return numbers along an axis, which are equal or consecutive, as an integer or as a slice."""
    first, count = int(numbers[0]), len(numbers)
    if count > 1 and (numbers == first).all():
        return first
    assert (numbers == first + np.arange(count)).all(), numbers
    return slice(first, first + count, 1)


interpreter.to_range = with_reshape_rule(interpreter.to_range)


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
