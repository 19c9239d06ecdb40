"""Memory, FLOPs, time and collectives of compiled training steps and forward passes.

`compile_for` compiles a training step for a TPU slice that is not present: libtpu contains the compiler of real TPUs,
and nothing is executed. `benchmark` times programs on the devices of this machine, on random batches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from dcvit.dcmha import plan
from dcvit.dcmha.plan import Selection, selecting
from dcvit.errors import ConfigError, first_line
from dcvit.models.flops import forward_flops
from dcvit.parallel import hlo, multihost, runtime, topologies
from dcvit.parallel.topologies import GIB
from dcvit.runs.progress import stage
from dcvit.training import kernels, memory
from dcvit.training.setup import Setup, load_setup
from dcvit.training.step import TrainState, init_params, initial_state, step_flops, trace
from dcvit.training.timing import interleaved

LOG = logging.getLogger(__name__)
FITS = "fits"  # verdict of a step that `compile_for` compiled
MODES = ("train", "forward")  # the training step, and the pass from inputs to logits without dropout
# Of a row of `benchmark`; docs/performance.md has their meanings.
COLUMNS = (
    "config", "mode", "batch", "device", "dtype", "attention", "parameters", "gflops", "ms", "ms_q1", "ms_q3", "rate",
    "unit", "tflops", "mfu", "ratio", "memory_mb", "compile_s", "error",
)  # fmt: skip
Row: TypeAlias = dict[str, Any]  # text, numbers and None by name


def lower(setup: Setup) -> tuple[jax.stages.Lowered, TrainState]:
    """Return the training step lowered for the devices of a run's mesh with their kernels, and shapes of its state."""
    with selecting(Selection("trust")), jax.set_mesh(setup.model.mesh):  # the devices are not here to verify them
        traced, state, _ = trace(setup)
        return traced.lower(), state


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


def compile_for(spec: str, overrides: Sequence[str], topology: str) -> Row:
    """Compile the training step of a config for a TPU slice.

    Args:
      spec: "NAME[:key=value,…]", see `dcvit.config.load.load`.
      overrides: "a.b=value" for single keys.
      topology: a TPU slice such as "v5p:4x4x8" or "v5p-256".

    Returns:
      `config`, `topology`, `chips`, `mesh` (its axes larger than 1), `parameters` (their number), `tflops` of a step of
      all chips by formula; GiB of one chip: its `memory`, `params`, and `optimizer` with averaged parameters; the
      `verdict`: `FITS`, or by how much the step does not fit; `compile_seconds`. If it fits, also the GiB of
      `temporaries` and in `total`, and `collectives`: by type, such as "all-gather", their `count`, and the `GiB` that
      a chip receives by them.

    Raises:
      ConfigError: an unknown topology, a missing libtpu, or a config that does not fit the slice; before compilation.
    """
    chip, devices = topology_devices(topology)
    with stage(f"building the model of {spec}", LOG.info, announce=False):
        setup = load_setup(spec, overrides, devices=devices, stand_in=True)
    with stage(f"tracing the training step of {spec} for {topology}", LOG.info):
        lowered, state = lower(setup)
    mesh, flops = setup.model.mesh, step_flops(setup)
    row: Row = {
        "config": spec,
        "topology": topology,
        "chips": len(devices),
        "mesh": " ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "1",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "params": memory.shard_bytes(state.params) / GIB,
        "optimizer": memory.shard_bytes((state.opt_state, state.ema)) / GIB,
        "tflops": flops and float(flops) * setup.data.batch_size / 1e12,
        "memory": chip.memory / GIB,
    }
    started = time.perf_counter()
    try:
        with stage("compiling it", LOG.info):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        row["verdict"] = f"does not fit: {first_line(e)}"  # the compiler says by how much
    else:
        sizes: Any = compiled.memory_analysis()
        totals = hlo.totals(hlo.collectives(compiled.as_text() or ""))
        row |= {"temporaries": sizes.temp_size_in_bytes / GIB, "total": sum(memory.program_bytes(compiled)) / GIB}
        row["verdict"] = FITS
        row["collectives"] = {kind: {"count": count, "GiB": size / GIB} for kind, (count, size) in totals.items()}
    return {**row, "compile_seconds": time.perf_counter() - started}


class Program:
    """A compiled training step or forward pass of a run.

    Attributes:
      attention: the names of the implementations of attention in it.
      compiled: the program.
      seconds: the time of its compilation.
    """

    def __init__(self, setup: Setup, mode: str, selection: Selection | None = None):
        """Trace and compile a program of `MODES`, with the choices of kernels that programs of a process share.

        Raises:
          TooLargeError: the program does not fit into the free memory.
        """
        self.setup, self.mode = setup, mode
        selection = selection or kernels.select(None, {})
        policy = setup.config.kernels or selection.policy
        chosen = dataclasses.replace(selection, policy=policy)
        with selecting(chosen), jax.set_mesh(setup.model.mesh), plan.recording() as names:
            traced, *self.shapes = trace(setup, mode)
            lowered = traced.lower()
        self.attention = sorted({*names})
        with runtime.without_cache():
            started = time.perf_counter()
            self.compiled: jax.stages.Compiled = lowered.compile()
            self.seconds = time.perf_counter() - started
        if setup.config.check_memory:
            memory.check_programs(setup.model.mesh, [self.compiled])

    def start(self) -> Callable[[], None]:
        """Allocate initial parameters and a random batch, run a step, and return the function that runs another."""
        arguments = self._arguments()

        def step() -> None:
            results = jax.block_until_ready(self.compiled(*arguments))
            if self.mode == "train":
                arguments[0] = results[0]  # the state, whose memory the step has reused

        step()
        return step

    def _arguments(self) -> list[PyTree]:
        """Return the state, or the parameters, and the batch; `image` and `tokens` of the batch are random."""
        setup, key = self.setup, jax.random.key(self.setup.config.seed)
        vocab = getattr(setup.model.module, "vocab_size", 1)

        def noise(like: jax.ShapeDtypeStruct) -> jax.Array:
            if jnp.issubdtype(like.dtype, jnp.floating):
                return jax.random.uniform(key, like.shape, like.dtype, -1, 1)
            if like.dtype == np.uint8:  # pixels
                return jax.random.bits(key, like.shape, like.dtype)
            return jax.random.randint(key, like.shape, 0, vocab, like.dtype)

        def initial() -> PyTree:
            params = init_params(setup, key)
            if self.mode == "forward":
                return params
            teacher = setup.task.distillation and setup.task.distillation.shapes
            zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), teacher)
            return initial_state(setup, params, zeros)

        def batch() -> PyTree:
            if self.mode == "forward":
                return noise(self.shapes[1])
            return {
                name: noise(self.shapes[1][name]) if name in ("image", "tokens") else jnp.asarray(x)
                for name, x in setup.data.repeated().items()
            }

        places = jax.tree.map(lambda x: x.sharding, self.shapes)
        with jax.set_mesh(setup.model.mesh):
            return [jax.jit(make, out_shardings=place)() for make, place in zip((initial, batch), places, strict=True)]


def benchmark(
    specs: Sequence[str],
    overrides: Sequence[str] = (),
    modes: Sequence[str] = MODES,
    batch_sizes: Sequence[int] = (),
    rounds: int = 10,
) -> list[Row]:
    """Measure configs in interleaved rounds, and return a row with `COLUMNS` for each, by batch size and mode.

    All programs are compiled before the first is timed. A program that needs more memory than there is gives a row with
    an `error`; so do all programs, if the memory does not hold the arrays of all of them at once.

    Args:
      specs: "NAME[:key=value,…]", see `dcvit.config.load.load`. Data need not exist: batches are random.
      overrides: "a.b=value" for single keys of all configs.
      modes: what is measured, of `MODES`.
      batch_sizes: the batch sizes instead of the config's.
      rounds: timed calls of each program.

    Raises:
      ConfigError, InputError: a config is invalid, or leaves sizes to data that is missing; before compilation.
    """
    opened = [
        (spec, load_setup(spec, [*overrides, *([f"input.batch_size={size}"] if size else [])], stand_in=True))
        for spec in specs
        for size in batch_sizes or (None,)
    ]
    rows, programs, selection = list[Row](), dict[int, Program](), kernels.select(None, {})
    for spec, setup in opened:
        for mode in modes:
            rows.append(row := {**dict.fromkeys(COLUMNS), "config": spec, "mode": mode, **_facts(setup, mode)})
            try:
                with stage(f"compiling {mode} of {spec}, batch {row['batch']}", LOG.info):
                    programs[len(rows) - 1] = program = Program(setup, mode, selection)
            except Exception as e:
                row["error"] = _lack_of_memory(e)
            else:
                row |= {"attention": " + ".join(program.attention) or None, "compile_s": program.seconds}
                row["memory_mb"] = sum(memory.program_bytes(program.compiled)) / 1e6
    try:
        if len(programs) > 1 and all(setup.config.check_memory for _, setup in opened):
            memory.check_programs(opened[0][1].model.mesh, [program.compiled for program in programs.values()])
        with stage(f"timing {len(programs)} programs in {rounds} rounds", LOG.info):
            timed = interleaved({number: program.start() for number, program in programs.items()}, rounds)
    except Exception as e:
        message = _lack_of_memory(e)
        for number in programs:
            rows[number]["error"] = message
    else:
        for number, seconds in timed.items():
            rows[number] |= _figures(programs[number], rows[number]["gflops"], seconds)
    for row in rows:
        first = next((r for r in rows if r["rate"] and (r["mode"], r["unit"]) == (row["mode"], row["unit"])), row)
        row["ratio"] = first["rate"] / row["rate"] if row["rate"] else None
    return rows


def _facts(setup: Setup, mode: str) -> Row:
    """Return the fields of a row of `benchmark` that are known before compilation."""
    module, devices, (unit, tokens) = setup.model.module, setup.model.mesh.devices.flatten(), setup.task.rate
    flops = step_flops(setup) if mode == "train" else forward_flops(module, setup.task.example)
    return {
        "batch": setup.data.batch_size,
        "device": f"{len(devices)} × {devices[0].device_kind}",
        "dtype": str(getattr(module, "dtype_mm", None)),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes)),
        "gflops": flops and flops / tokens / 1e9,
        "unit": unit,
    }


def _figures(program: Program, gflops: float | None, seconds: Sequence[float]) -> Row:
    """Return the fields of a row of `benchmark` that follow from the seconds of each round."""
    setup = program.setup
    low, median, high = np.percentile(seconds, [25, 50, 75]).tolist()
    rate = setup.data.batch_size * setup.task.rate[1] / median
    devices = setup.model.mesh.devices.flatten()
    tflops, chip = gflops and gflops * rate / 1e3, topologies.chip(devices[0].device_kind)
    mfu = 100 * 1e12 * tflops / (chip.peak * len(devices)) if tflops and chip else None
    times = {"ms": 1e3 * median, "ms_q1": 1e3 * low, "ms_q3": 1e3 * high}
    return {**times, "rate": rate, "tflops": tflops, "mfu": mfu}


def _lack_of_memory(error: Exception) -> str:
    """Return the message about too little memory. Raise the error if it is another one, or if there are more processes.

    Another process might have enough memory, and wait for this one forever.
    """
    text = str(error).lower()
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) and ("resource_exhausted" in text or "out of memory" in text)
    if not (of_jax or isinstance(error, MemoryError | memory.TooLargeError)) or not multihost.is_single_process():
        raise error
    return f"out of memory: {first_line(error)}"
