"""Compilation for a TPU slice on any Linux host: `python -m dcvit.aot --config CONFIG --topology v5p:4x4x8`.

The training step of a config, as `dcvit.train` runs it, goes through the real TPU compiler, which libtpu brings, and
what comes out says whether the run fits into the chips' memory and what it exchanges between them. `--all` does so for
every config's models on the slices that the config recommends. Nothing is executed, and no data is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit import cli
from dcvit import config as configs
from dcvit.errors import ConfigError, first_line
from dcvit.models.flops import training_flops
from dcvit.parallel import hlo, topologies
from dcvit.parallel.sharding import batch_sharding, batch_shards
from dcvit.training.setup import Setup, load_setup
from dcvit.training.step import TrainState, jit_update, state_shapes

GIB = topologies.GIB


class Step(NamedTuple):
    """A training step before its compilation: what it takes, and what is known of it from shapes alone."""

    lowered: Any
    mesh: Mesh
    state: TrainState  # shapes with their shardings
    activations: int  # bytes that one device keeps from the forward to the backward pass
    flops: float | None  # of a step, by formula


def lower(setup: Setup) -> Step:
    """Lowers the training step of a run for the devices of its mesh."""
    data, example = setup.data, setup.task.example
    first = next(input_pipeline.train_batches(data.source, data.pp, 1, 0, threads=0))
    batch = {
        key: jax.ShapeDtypeStruct((data.batch_size, *value.shape[1:]), value.dtype, sharding=batch_sharding(setup.mesh))
        for key, value in first.items()
    }
    with jax.set_mesh(setup.mesh):
        state = state_shapes(setup)
        lowered = jit_update(setup, state).lower(state, batch)
    flops = training_flops(setup.model, example)
    size = data.batch_size // setup.grad_accum
    part = {key: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for key, leaf in batch.items()}
    kept = _residual_bytes(setup, state.params, part) // batch_shards(setup.mesh)
    return Step(lowered, setup.mesh, state, kept, flops and float(flops) * data.batch_size)


def _residual_bytes(setup: Setup, params: Any, batch: Any) -> int:
    """Returns the bytes that a forward pass of the whole batch keeps for the backward pass, without the parameters."""
    model: Any = setup.model
    if (model.implementation or "").startswith("pallas_"):
        model = model.clone(implementation=None)  # the kernels keep what the implementation for a CPU keeps
    key = jax.eval_shape(lambda: jax.random.key(0))

    def backward(params: Any, batch: Any, key: Any) -> Any:
        prepared = setup.task.prepare(batch, key)
        return jax.vjp(lambda p: setup.task.loss(model)(p, prepared, key), params)[1]

    residuals = [x for x in jax.tree.leaves(jax.eval_shape(backward, params, batch, key)) if hasattr(x, "dtype")]
    known = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)]
    total = 0
    for leaf in residuals:
        if (leaf.shape, leaf.dtype) in known:
            known.remove((leaf.shape, leaf.dtype))
        else:
            total += leaf.size * leaf.dtype.itemsize
    return total


def compile_for(spec: str, overrides: Sequence[str], topology: str) -> dict[str, Any]:
    """What the TPU compiler says of a config's training step on a slice, as one row.

    Bytes are of one chip, in GiB: `params`; `optimiser`, its state and averaged parameters; `activations`, what a
    forward pass keeps for the backward pass, where the axis "tensor" splits nothing of it; `temporaries`, what else
    the compiler needs; `total`, of `memory`, what it has to give. `tflops` are those of a step, by formula.
    `collectives` are what a chip receives in a step.

    Raises:
      ConfigError: an unknown topology, no libtpu, or a config that does not fit it; nothing was compiled then.
    """
    chip, devices = topology_devices(topology)
    step = lower(load_setup(spec, overrides, devices=devices, stand_in=True))
    row: dict[str, Any] = {
        "topology": topology, "chips": len(devices),
        "mesh": " ".join(f"{name}={size}" for name, size in step.mesh.shape.items() if size > 1) or "1",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(step.state.params)),
        "params": _shard_bytes(step.state.params) / GIB,
        "optimiser": _shard_bytes((step.state.opt_state, step.state.ema)) / GIB,
        "tflops": step.flops and step.flops / 1e12,
    }  # fmt: skip
    started = time.perf_counter()
    try:
        compiled = step.lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return {**row, **_overflow(str(e), chip), "compile_seconds": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    kept = min(step.activations, memory.temp_size_in_bytes)
    moved = hlo.totals(hlo.collectives(compiled.as_text()))
    return {
        **row, "activations": kept / GIB, "temporaries": (memory.temp_size_in_bytes - kept) / GIB, "total": total / GIB,
        "memory": chip.memory / GIB, "verdict": "fits",
        "collectives": {kind: {"count": count, "GiB": size / GIB} for kind, (count, size) in moved.items()},
        "compile_seconds": seconds,
    }  # fmt: skip


def _overflow(message: str, chip: topologies.Chip) -> dict[str, Any]:
    """The numbers of the compiler's refusal: "… required … (45.13G) exceeds available HBM (15.75G)"."""
    sizes = [float(size) for size in re.findall(r"([\d.]+)G\b", message)]
    if len(sizes) < 2:
        raise ConfigError(f"the compiler ran out of memory: {first_line(Exception(message))}")
    over = f"does not fit, over by {sizes[0] - sizes[1]:.2f} GiB"
    return {"total": sizes[0], "memory": chip.memory / GIB, "verdict": over}


def _shard_bytes(tree: Any) -> int:
    """Bytes of one device's parts of a tree of shapes with shardings."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def topology_devices(name: str) -> tuple[topologies.Chip, Sequence[Any]]:
    """The chip and the devices of a TPU slice.

    Raises:
      ConfigError: no such slice, or no libtpu to compile for it.
    """
    try:
        chip, _ = topologies.topology(name)
    except ValueError as e:
        raise ConfigError(f"--topology: {e}") from None
    from jax.experimental.topologies import get_topology_desc

    # libtpu is to look for no TPU on this host, and may be at work for another process.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        found = get_topology_desc(platform="tpu", topology_name=name, chip_config_name=chip.config)
    except Exception as e:
        hint = "" if importlib.util.find_spec("libtpu") else "; it needs libtpu: pip install 'dcvit[tpu]'"
        raise ConfigError(f"cannot compile for {name}: {first_line(e)}{hint}") from None
    return chip, found.devices


def lines(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of `compile_for` as the command shows it: one line for each number."""
    shown = {
        "slice": f"{row['topology']}, {row['chips']} chips, mesh {row['mesh']}",
        "parameters": f"{row['parameters']:,}",
        "FLOPs of a step, by formula": row["tflops"] and f"{row['tflops']:,.1f} TFLOP",
    }
    for key in ("params", "optimiser", "activations", "temporaries", "total", "memory"):
        if key in row:
            shown[f"{key}, a chip"] = f"{row[key]:.2f} GiB"
    for kind, moved in row.get("collectives", {}).items():
        shown[kind] = f"{moved['count']:,} times, {moved['GiB']:.2f} GiB a chip"
    shown |= {"compiled in": f"{row['compile_seconds']:.1f} s", "verdict": row["verdict"]}
    return [{"": key, row["config"]: value} for key, value in shown.items()]


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The README's table of rows of `compile_for`."""
    table = [
        "| model | slice | parameters | state | activations | temporaries | total of memory | |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        model = re.sub(r"^.*?=|,.*", "", row["config"])
        numbers = (row["params"] + row["optimiser"], *(row[key] for key in ("activations", "temporaries", "total")))
        cells = [model, row["topology"], f"{row['parameters']:,}", *(f"{number:.2f}" for number in numbers)]
        table.append(f"| {' | '.join(cells)} of {row['memory']:.1f} | {row['verdict']} |")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Status 1 where a step does not fit."""
    parser = cli.Parser(prog="dcvit aot", description="Compile a config's training step for a TPU slice.")
    parser.add_argument("--config", help="config file or bare name, with :argument=value,…")
    parser.add_argument("--topology", help="a TPU slice such as v5e:4x4 or v5p:4x4x8")
    parser.add_argument("--all", action="store_true", help="all that the package's configs recommend")
    parser.add_argument("--out", type=cli.path, help="JSON file for the rows")
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    args, overrides = parser.parse(argv)
    if args.all == bool(args.config) or bool(args.config) != bool(args.topology):
        raise ConfigError("give --config CONFIG and --topology TOPOLOGY, or --all")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the time of a compilation is one of the results
    rows = []
    for spec, topology in configs.recommended() if args.all else [(args.config, args.topology)]:
        row = {"config": spec, **compile_for(spec, overrides, topology)}
        if args.format == "table":
            cli.show(lines(row), "table")
        rows.append(row)
        jax.clear_caches()  # each leaves hundreds of megabytes behind
        if args.out:  # after each, since all take a while
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.format != "table":
        print(json.dumps(rows, indent=1) if args.format == "json" else "\n".join(markdown(rows)))
    return int(any(row["verdict"] != "fits" for row in rows))


if __name__ == "__main__":
    sys.exit(cli.run(main))
