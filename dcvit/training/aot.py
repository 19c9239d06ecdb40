"""Ahead-of-time compilation of a training step for a TPU slice that is not present.

libtpu contains the compiler of real TPUs. It states whether the step fits in the memory of the chips, and which data
the chips exchange. Nothing is executed.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax

from dcvit.dcmha.plan import Selection, selecting
from dcvit.errors import ConfigError, first_line
from dcvit.parallel import hlo, topologies
from dcvit.parallel.sharding import batch_sharding
from dcvit.parallel.topologies import GIB
from dcvit.runs.progress import stage
from dcvit.training.memory import program_bytes, shard_bytes
from dcvit.training.setup import Setup, load_setup
from dcvit.training.step import TrainState, jit_update, state_shapes, step_flops

LOG = logging.getLogger(__name__)
FITS = "fits"
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Collective(TypedDict):
    """All collectives of one type in a training step: their number, and the GiB that a chip receives by them."""

    count: int
    GiB: float


class CompiledStep(TypedDict, total=False):
    """The result of the compilation of a training step; sizes are of one chip, in GiB.

    Fields:
      config: the config.
      topology: the TPU slice.
      chips: the number of chips.
      mesh: the axes of the mesh that are larger than 1.
      parameters: the number of parameters.
      params: size of the parameters.
      optimizer: size of the optimizer state and of averaged parameters.
      tflops: 10^12 floating-point operations of a step of all chips, by formula; None if the model has no formula.
      temporaries: size of all other values that the compiler allocates, activations among them.
      total: size of everything.
      memory: size of the chip's memory.
      verdict: "fits", or by how much the step does not fit.
      collectives: the collectives (exchanges of data between chips) of a step, by type, such as "all-gather".
      compile_seconds: the time of the compilation.
    """

    config: str
    topology: str
    chips: int
    mesh: str
    parameters: int
    params: float
    optimizer: float
    tflops: float | None
    temporaries: float
    total: float
    memory: float
    verdict: str
    collectives: dict[str, Collective]
    compile_seconds: float


def compile_for(spec: str, overrides: Sequence[str], topology: str) -> CompiledStep:
    """Compile the training step of a config for a TPU slice.

    Args:
      spec: "NAME[:key=value,…]", see `dcvit.config.load.load`.
      overrides: "a.b=value" for single keys.
      topology: a TPU slice such as "v5p:4x4x8" or "v5p-256".

    Raises:
      ConfigError: an unknown topology, a missing libtpu, or a config that does not fit the slice; before compilation.
    """
    chip, devices = topology_devices(topology)
    with stage(f"building the model of {spec}", LOG.info, announce=False):
        setup = load_setup(spec, overrides, devices=devices, stand_in=True)
    with stage(f"tracing the training step of {spec} for {topology}", LOG.info):
        lowered, state, _ = lower(setup)
    mesh, flops = setup.model.mesh, step_flops(setup)
    result = CompiledStep(
        config=spec,
        topology=topology,
        chips=len(devices),
        mesh=" ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "1",
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        params=shard_bytes(state.params) / GIB,
        optimizer=shard_bytes((state.opt_state, state.ema)) / GIB,
        tflops=flops and float(flops) * setup.data.batch_size / 1e12,
    )
    started = time.perf_counter()
    try:
        with stage("compiling it", LOG.info):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return {**result, **_overflow(str(e), chip), "compile_seconds": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    return {**result, **_usage(compiled, chip), "compile_seconds": seconds}


def trace(setup: Setup) -> tuple[jax.stages.Traced, TrainState, Shapes]:
    """Return the training step traced for the devices of a run's mesh, and the shapes of its state and batch."""
    mesh = setup.model.mesh
    batch = {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=batch_sharding(mesh))
        for key, array in setup.data.repeated().items()
    }
    with jax.set_mesh(mesh):
        state = state_shapes(setup)
        return jit_update(setup, state).trace(state, batch), state, batch


def lower(setup: Setup) -> tuple[jax.stages.Lowered, TrainState, Shapes]:
    """Return the training step lowered for the devices of a run's mesh with their kernels, and shapes as `trace`."""
    with selecting(Selection("trust")):  # the devices are not here to verify them
        traced, state, batch = trace(setup)
        with jax.set_mesh(setup.model.mesh):
            return traced.lower(), state, batch


def topology_devices(name: str) -> tuple[topologies.Chip, Sequence[jax.Device]]:
    """Return the chip and the devices of a TPU slice.

    Raises:
      ConfigError: an unknown slice, or libtpu is not installed.
    """
    try:
        chip, sides = topologies.topology(name)
    except ValueError as e:
        raise ConfigError(f"--topology: {e}") from None
    from jax.experimental.topologies import get_topology_desc

    # libtpu should not search for TPUs of this machine, and another process may use it at the same time.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # By default, a host has 2x2 chips, which a slice of a single chip does not.
    host = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sides) == 1 else {}
    known = topologies.jax_name(chip, sides)
    try:
        found = get_topology_desc(platform="tpu", topology_name=known, chip_config_name=chip.config, **host)
    except Exception as e:
        hint = "" if importlib.util.find_spec("libtpu") else "; it needs libtpu: pip install 'dcvit[tpu]'"
        raise ConfigError(f"cannot compile for {name}: {first_line(e)}{hint}") from None
    return chip, found.devices


def _usage(compiled: jax.stages.Compiled, chip: topologies.Chip) -> CompiledStep:
    """Return the fields of `CompiledStep` about memory and collectives, for a step that fits; sizes in GiB."""
    memory: Any = compiled.memory_analysis()
    totals = hlo.totals(hlo.collectives(compiled.as_text() or ""))
    return {
        "temporaries": memory.temp_size_in_bytes / GIB,
        "total": sum(program_bytes(compiled)) / GIB,
        "memory": chip.memory / GIB,
        "verdict": FITS,
        "collectives": {kind: {"count": count, "GiB": size / GIB} for kind, (count, size) in totals.items()},
    }


def _overflow(message: str, chip: topologies.Chip) -> CompiledStep:
    """Return total, memory and verdict from the error "… required … (45.13G) exceeds available HBM (15.75G)"."""
    found = re.findall(r"([\d.]+)([KMGT])\b", message)
    sizes = [float(size) * 1024.0 ** ("KMGT".index(unit) - 2) for size, unit in found]
    if len(sizes) < 2 or "hbm" not in message.lower():  # of another memory
        raise ConfigError(f"the compiler ran out of memory: {first_line(Exception(message))}")
    verdict = f"does not fit, over by {sizes[0] - sizes[1]:.2f} GiB"
    return {"total": sizes[0], "memory": chip.memory / GIB, "verdict": verdict}
