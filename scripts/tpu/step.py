"""Estimate of the time of a training step on TPUs by the TPU compiler, without a TPU.

    python scripts/tpu/step.py --config vit_i1k:variant=DCViT-S/16 --topology v5e:2x2
    python scripts/tpu/step.py --config vit_i1k:variant=DCViT-S/16 "vit_i1k:variant=ViT-S/16 model.dtype_mm=bfloat16"
    python scripts/tpu/step.py --config lm_pile:preset=DCFormer++-405M,grad_accum=16 --topology v5e:4x4

Compiles the step as `dcvit aot` does, and adds up the cycles of one chip by part of the model and by kind of operation
(scripts/tpu/cycles.py). The cycles are the compiler's static estimates; for Pallas kernels, the bundles of their final
schedule times the steps of their grid, where a conditional part counts in the steps that execute it, or the cycles in
which HBM reads their arguments and writes their results once, if those are more. Collectives have no estimate. Several
configs are compared with the first one. A word after a config overrides a key of this config, --config.KEY=VALUE that
of all configs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import cycles as tpu_cycles
import jax
from cycles import HBM, KINDS, MXU, OTHER, PARTS

from dcvit import cli
from dcvit.errors import ConfigError
from dcvit.parallel import topologies
from dcvit.training import measure
from dcvit.training.setup import load_setup

MEGA = 1e6


class Kernel(TypedDict):
    """A Pallas kernel: mean bundles of a step of its grid, steps of the grid on a core, calls in a training step."""

    bundles: float
    steps: int
    calls: int


class Estimate(TypedDict):
    """The estimate of a training step of a config on one chip of a TPU slice."""

    config: str
    topology: str
    examples: int
    cycles: float
    seconds: float
    table: dict[str, dict[str, float]]  # cycles by part of the model and kind of operation
    matmul_flops: float  # of the compiled matrix products outside of kernels
    utilization: float  # share of the MXUs' peak that these products reach during their own cycles
    kernels: dict[str, Kernel]


def compiled_text(spec: str, overrides: Sequence[str], topology: str) -> tuple[str, int]:
    """Return the optimized HLO of the training step of a config, and the examples of a chip."""
    _, devices = measure.topology_devices(topology)
    setup = load_setup(spec, overrides, devices=devices, stand_in=True)
    return measure.lower(setup)[0].compile().as_text() or "", setup.data.batch_size // len(devices)


def estimate(text: str, schedules: dict[str, str], chip: topologies.Chip) -> Estimate:
    """Return the estimate of a compiled step, without `config`, `topology` and `examples`.

    Args:
      text: the optimized HLO.
      schedules: the final schedules of its kernels by instruction, see `tpu_cycles.schedules`.
      chip: the chip that it was compiled for.
    """
    shares = tpu_cycles.conditions(text)
    bundles = {
        name: (tpu_cycles.bundles(schedule, shares.get(name)), tpu_cycles.grid_steps(schedule))
        for name, schedule in schedules.items()
    }
    clock = chip.peak / MXU[chip.name]
    costs = tpu_cycles.costs(text, {name: n * steps for name, (n, steps) in bundles.items()}, HBM[chip.name] / clock)
    table = {name: dict.fromkeys(KINDS, 0.0) for name in (*PARTS, OTHER)}
    for cost in costs:
        table[cost.part][cost.kind] += cost.cycles
    kernels: dict[str, Kernel] = {}
    for name, (n, steps) in bundles.items():
        calls = sum(c.times for c in costs if c.schedule == name)
        kernels[name] = {"bundles": n, "steps": steps, "calls": calls}
    cycles, matmul = (sum(c.cycles for c in costs if c.kind in kinds) for kinds in (KINDS, ("matmul",)))
    flops = sum(c.flops for c in costs)
    return {
        "config": "", "topology": "", "examples": 0, "cycles": cycles, "seconds": cycles / clock, "table": table,
        "matmul_flops": flops, "utilization": flops / MXU[chip.name] / matmul if matmul else 0.0, "kernels": kernels,
    }  # fmt: skip


def comparison(results: Sequence[Estimate]) -> list[str]:
    """Return the estimates of all configs side by side as the lines of a Markdown table."""
    lines = ["| million cycles | " + " | ".join(r["config"] for r in results) + " |", "|---" * (len(results) + 1) + "|"]
    rows: dict[str, list[float]] = {}
    for name in (*PARTS, OTHER):
        rows[name] = [sum(r["table"][name].values()) for r in results]
    for kind in KINDS:
        rows[f"all: {kind}"] = [sum(row[kind] for row in r["table"].values()) for r in results]
    rows["total"] = [r["cycles"] for r in results]
    for name, values in rows.items():
        if any(values):
            lines.append(f"| {name} | {' | '.join(f'{x / MEGA:.1f}' for x in values)} |")
    ratios = [f"{r['cycles'] / results[0]['cycles']:.2f}" for r in results]
    return [*lines, f"| of the first | {' | '.join(ratios)} |"]


def notes(result: Estimate) -> list[str]:
    """Return the figures of an estimate that the table of the comparison does not have."""
    lines = [
        f"{result['config']}, {result['topology']}, {result['examples']} examples per chip: "
        f"{result['cycles'] / MEGA:.1f} million cycles, {result['seconds'] * 1e3:.0f} ms",
        f"matrix products: {result['matmul_flops'] / 1e12:.2f} TFLOP, "
        f"{result['utilization']:.0%} of the peak of the MXUs while they run",
    ]
    for name, kernel in result["kernels"].items():
        lines.append(f"{name}: {kernel['bundles']:,.0f} bundles × {kernel['steps']} steps × {kernel['calls']} calls")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; see the module's docstring."""
    parser = cli.Parser(prog="scripts/tpu/step.py", description="Estimate the time of a training step on TPUs.")
    parser.add_argument(
        "--config", nargs="+", required=True, help="configs, each with overrides KEY=VALUE after spaces"
    )
    parser.add_argument("--topology", default="v5e:2x2", help="a TPU slice such as v5e:2x2")
    parser.add_argument("--json", type=cli.path, help="JSON file for the results")
    args, overrides = parser.parse(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program has no schedules
    results: list[Estimate] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = tpu_cycles.dump_options(folder)  # before libtpu starts
        chip, _ = measure.topology_devices(args.topology)
        if chip.name not in MXU:
            raise ConfigError(f"--topology: no figures for {chip.name}; known are {', '.join(MXU)}")
        for words in args.config:
            spec, *own = words.split()
            text, examples = compiled_text(spec, [*overrides, *own], args.topology)
            result = estimate(text, tpu_cycles.schedules(folder), chip)
            result |= {"config": words, "topology": args.topology, "examples": examples}
            results.append(result)
            print("\n".join([*notes(result), ""]), flush=True)
            for path in Path(folder).iterdir():  # the next program has kernels of the same names
                path.unlink()
            jax.clear_caches()
            if args.json:  # after each config, because a compilation takes long
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(comparison(results)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
