"""Time, memory and FLOP/s of the compiled training step and forward pass of configs, on random batches."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from dcvit.dcmha import plan
from dcvit.dcmha.plan import Selection, selecting
from dcvit.errors import first_line
from dcvit.models import Params
from dcvit.models.flops import forward_flops
from dcvit.parallel import multihost, runtime, topologies
from dcvit.parallel.sharding import batch_sharding, shardings, with_shardings
from dcvit.runs.progress import stage
from dcvit.training import kernels, memory
from dcvit.training.aot import trace
from dcvit.training.evaluation import predictor
from dcvit.training.setup import Setup, load_setup
from dcvit.training.step import TrainState, init_params, initial_state, step_flops
from dcvit.training.timing import interleaved

LOG = logging.getLogger(__name__)
MODES = ("train", "forward")
Step = Callable[[], None]


class Options(NamedTuple):
    """Choice of the measurements of each config.

    Fields:
      modes: names in `MODES`: the training step, or the forward pass from inputs to logits without dropout.
      batch_sizes: the batch sizes instead of the config's.
      rounds: timed calls of each program.
    """

    modes: Sequence[str] = MODES
    batch_sizes: Sequence[int] = ()
    rounds: int = 10


@dataclasses.dataclass
class Row:
    """The measurements of one config, batch size and mode; None means not known.

    Fields:
      config: the config.
      mode: "train" or "forward".
      batch: the images or rows of tokens of a step, over all devices.
      device: the number of devices and their kind.
      dtype: the dtype of the model's matrix products.
      attention: the implementations of attention that the program uses.
      parameters: the number of parameters.
      gflops: 10⁹ operations for one image or token by `dcvit.models.flops`; training counts three forward passes, and
        one of a teacher.
      ms: median milliseconds of a step.
      ms_q1, ms_q3: its quartiles.
      rate: images or tokens per second, by the median.
      unit: "img/s" or "tok/s".
      tflops: 10¹² operations per second of all devices together.
      mfu: model FLOPs utilization: `tflops` in percent of the peak of the devices.
      ratio: time of an image or token, divided by that of the first row with the same mode and unit.
      memory_mb: 10⁶ bytes that the compiled program allocates on each device, arguments included.
      compile_s: seconds of the compilation.
      error: why nothing was measured: too little memory.
    """

    config: str
    mode: str
    batch: int | None = None
    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    parameters: int | None = None
    gflops: float | None = None
    ms: float | None = None
    ms_q1: float | None = None
    ms_q3: float | None = None
    rate: float | None = None
    unit: str | None = None
    tflops: float | None = None
    mfu: float | None = None
    ratio: float | None = None
    memory_mb: float | None = None
    compile_s: float | None = None
    error: str | None = None


class Program:
    """A compiled training step or forward pass of a run.

    Attributes:
      attention: the names of the implementations of attention in it.
      compiled: the program.
      seconds: the time of its compilation.
    """

    def __init__(self, setup: Setup, mode: str, selection: Selection | None = None):
        """Trace and compile.

        Args:
          setup: the run.
          mode: a name in `MODES`.
          selection: the choices of kernels that several programs of a process share; by default its own.

        Raises:
          TooLargeError: the program does not fit into the free memory.
        """
        self.setup, self.mode = setup, mode
        selection = selection or kernels.select(None, {})
        policy = setup.options.kernels or selection.policy
        with (
            selecting(dataclasses.replace(selection, policy=policy)),
            jax.set_mesh(setup.model.mesh),
            plan.recording() as names,
        ):
            traced, *shapes = trace(setup) if mode == "train" else self._trace_forward()
            lowered = traced.lower()
        self.attention, self.places = sorted({*names}), jax.tree.map(lambda x: x.sharding, shapes)
        self.param_places = shardings(setup.model.shapes, setup.model.mesh, setup.model.strategy)
        with runtime.without_cache():
            started = time.perf_counter()
            self.compiled: jax.stages.Compiled = lowered.compile()
            self.seconds = time.perf_counter() - started
        if setup.options.check_memory:
            memory.check_programs(setup.model.mesh, [self.compiled])

    def start(self) -> Step:
        """Allocate initial parameters and a random batch, run a step, and return the function that runs another."""
        arguments = self._arguments()

        def step() -> None:
            results = jax.block_until_ready(self.compiled(*arguments))
            if self.mode == "train":
                arguments[0] = results[0]  # the state, whose memory the step has reused

        step()
        return step

    def _trace_forward(self) -> tuple[jax.stages.Traced, Params, jax.ShapeDtypeStruct]:
        """Return the function from all parameters and a batch of inputs to logits, traced, and their shapes."""
        model, example = self.setup.model, self.setup.task.example
        predict, rows = predictor(model.module), batch_sharding(model.mesh)
        params = with_shardings(model.shapes, model.mesh, model.strategy)
        shape = (self.setup.data.batch_size, *example.shape[1:])
        inputs = jax.ShapeDtypeStruct(shape, example.dtype, sharding=rows)
        logits = jax.jit(lambda params, inputs: predict(params, inputs)[0], out_shardings=rows)
        return logits.trace(params, inputs), params, inputs

    def _arguments(self) -> list[PyTree]:
        """Return the state, or the parameters, and the batch; `image` and `tokens` of the batch are random."""
        setup, rows = self.setup, self.setup.data.batch_size
        model, example, key = setup.model, setup.task.example, jax.random.key(setup.seed)
        vocab = getattr(model.module, "vocab_size", 1)

        def noise(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
            if jnp.issubdtype(dtype, jnp.floating):
                return jax.random.uniform(key, (rows, *shape), dtype, -1, 1)
            if dtype == np.uint8:  # pixels
                return jax.random.bits(key, (rows, *shape), dtype)
            return jax.random.randint(key, (rows, *shape), 0, vocab, dtype)

        def batch() -> PyTree:
            if self.mode == "forward":
                return noise(example.shape[1:], example.dtype)
            return {
                name: noise(x.shape[1:], x.dtype) if name in ("image", "tokens") else jnp.asarray(x)
                for name, x in setup.data.repeated().items()
            }

        places, batch_places = self.places
        with jax.set_mesh(model.mesh):
            initial = jax.jit(lambda: init_params(setup, key), out_shardings=self.param_places)()
            if self.mode == "train":  # from a program that other modes and batch sizes share, in JAX's cache
                teacher = setup.task.distillation

                def state(params: PyTree) -> TrainState:
                    shapes = teacher and teacher.shapes
                    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
                    return initial_state(setup, params, zeros)

                initial = jax.jit(state, donate_argnums=0, out_shardings=places)(initial)
            return [initial, jax.jit(batch, out_shardings=batch_places)()]


def benchmark(specs: Sequence[str], overrides: Sequence[str], options: Options) -> list[Row]:
    """Measure configs in interleaved rounds, and return a row for each, by batch size and mode.

    All programs are compiled before the first is timed. A program that needs more memory than there is gives a row with
    an `error`. If the memory does not hold the arrays of all programs at once, each is timed alone.

    Args:
      specs: "NAME[:key=value,…]", see `dcvit.config.load.load`. Data need not exist: batches are random.
      overrides: "a.b=value" for single keys of all configs.
      options: what is measured.

    Raises:
      ConfigError, InputError: a config is invalid, or leaves sizes to data that is missing; before compilation.
    """
    opened = [
        (spec, size, load_setup(spec, [*overrides, *([f"input.batch_size={size}"] if size else [])], stand_in=True))
        for spec in specs
        for size in options.batch_sizes or (None,)
    ]
    rows, programs, selection = list[Row](), dict[int, Program](), kernels.select(None, {})
    for spec, size, setup in opened:
        for mode in options.modes:
            rows.append(row := Row(spec, mode, size))
            _describe(row, setup)
            try:
                with stage(f"compiling {mode} of {spec}, batch {row.batch}", LOG.info):
                    programs[len(rows) - 1] = program = Program(setup, mode, selection)
            except Exception as e:
                row.error = _lack_of_memory(e)
            else:
                row.attention, row.compile_s = " + ".join(program.attention) or None, program.seconds
                row.memory_mb = sum(memory.program_bytes(program.compiled)) / 1e6
    with stage(f"timing {len(programs)} programs in {options.rounds} rounds", LOG.info):
        measured = _timed(programs, options.rounds)
    for number, found in measured.items():
        if isinstance(found, str):
            rows[number].error = found
        else:
            _fill(rows[number], programs[number], found)
    for row in rows:
        first = next((r for r in rows if r.rate and (r.mode, r.unit) == (row.mode, row.unit)), row)
        row.ratio = first.rate / row.rate if first.rate and row.rate else None
    return rows


def _describe(row: Row, setup: Setup) -> None:
    """Set the fields of a row that are known before compilation."""
    module, devices = setup.model.module, setup.model.mesh.devices.flatten()
    row.batch, row.unit = setup.data.batch_size, setup.task.rate[0]
    row.device, row.dtype = f"{len(devices)} × {devices[0].device_kind}", str(getattr(module, "dtype_mm", None))
    row.parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
    flops = step_flops(setup) if row.mode == "train" else forward_flops(module, setup.task.example)
    row.gflops = flops and flops / setup.task.rate[1] / 1e9


def _fill(row: Row, program: Program, seconds: Sequence[float]) -> None:
    """Set the fields of a row that follow from the seconds of each round."""
    low, median, high = np.percentile(seconds, [25, 50, 75]).tolist()
    row.ms_q1, row.ms, row.ms_q3 = (1e3 * each for each in (low, median, high))
    row.rate = rate = program.setup.data.batch_size * program.setup.task.rate[1] / median
    row.tflops = row.gflops and row.gflops * rate / 1e3
    devices = program.setup.model.mesh.devices.flatten()
    chip = topologies.chip(devices[0].device_kind)
    if row.tflops and chip:
        row.mfu = 100 * 1e12 * row.tflops / (chip.peak * len(devices))


def _timed(programs: Mapping[int, Program], rounds: int) -> dict[int, list[float] | str]:
    """Return the seconds of a step in each round, or why a program does not fit into the memory, by its number."""
    together = len(programs) < 2 or all(multihost.gather("together", _fit_together([*programs.values()])))
    if together:
        try:
            return dict(interleaved({number: program.start() for number, program in programs.items()}, rounds))
        except Exception as e:
            message = _lack_of_memory(e)
        if len(programs) < 2:
            return dict.fromkeys(programs, message)
    LOG.warning("the memory does not hold the arrays of all programs at once: each is timed alone, not in turn")
    found: dict[int, list[float] | str] = {}
    for number, program in programs.items():
        gc.collect()  # the arrays of the last one
        found |= _timed({number: program}, rounds)
    return found


def _fit_together(programs: Sequence[Program]) -> bool:
    """Return True if the free memory holds the arguments of all programs, and what one of them needs more."""
    try:
        memory.check_programs(programs[0].setup.model.mesh, [program.compiled for program in programs])
    except memory.TooLargeError:
        return False
    return True


def _lack_of_memory(error: Exception) -> str:
    """Return the message about too little memory. Raise the error if it is another one, or if there are more processes.

    Another process might have enough memory, and wait for this one forever.
    """
    if not memory.is_exhausted(error) or not multihost.is_single_process():
        raise error
    return f"out of memory: {first_line(error)}"
