"""Check of the recipe of configs/vit_i1k.py at its full length, without ImageNet's images.

    python scripts/check_recipe.py [--out runs/recipe] [--json docs/reproduction/recipe.json]

Writes a dataset with the records and shards of ImageNet-1k (scripts/recipe_data.py), and checks against simulations in
numpy that batches at chosen steps of the complete run hold the records that they should, and that the learning rate,
Adam, clipping, weight decay and averaged weights are right over all steps. Measures the speed of the input pipeline and
its memory at the start, in the middle and at the end, without a model. Checks the labels of all evaluation sets, and
those of the sets that exist in --data. Hours of training follow from docs/tpu_step.json. A failed check is an error.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import recipe_data
from bench_input import cpu, resident_megabytes

import input_pipeline
from dcvit.config import load as configs
from dcvit.config.durations import Durations
from dcvit.models import flops
from dcvit.training.model import make_model
from dcvit.training.optim import Schedule
from dcvit.training.plan import make_optimizer
from dcvit.training.setup import Setup, make_setup

ROOT = Path(__file__).parents[1]
CONFIG = "vit_i1k:variant=DCViT-S/16"
ROWS = 64  # of a batch, whose records are checked
AVERAGE = 0.9999  # the decay of averaged weights in the check; the recipe has none
PARAMS = {"head": {"bias": np.ones(4, np.float32), "kernel": np.ones(4, np.float32)}}  # kernels decay
LIMIT = 5e-4  # relative difference of float32 from the simulation in float64, after all steps
TIMED = 4  # batches of a measurement of speed

# Classes of each set: their number, and the first digits of the SHA-256 of their WordNet ids, one per line. Those of
# ImageNet-A and -R are in eval.py of github.com/hendrycks/natural-adv-examples and github.com/hendrycks/imagenet-r.
ALL_CLASSES = (1000, "385e0240499426c0")
EVALUATIONS = {
    "imagenet2012": ALL_CLASSES, "imagenet2012_real": ALL_CLASSES, "imagenet_v2": ALL_CLASSES,
    "imagenet_sketch": ALL_CLASSES, "imagenet_a": (200, "f6aa4b23244554d9"), "imagenet_r": (200, "e19a59d84e3746fa"),
}  # fmt: skip
# Slices of the table of costs: the topology of docs/tpu_step.json whose estimate applies, and the chips.
SLICES = {"v5e-32": ("v5e:2x2", 32), "v6e-8": ("v6e:2x2", 8)}
H100S, H100_PEAK, UTILIZATION = 8, 989e12, 0.4  # FLOP/s of dense bfloat16 products; the share of it is an assumption
EPOCHS = (90, 300)
Carry: TypeAlias = tuple[optax.Params, optax.OptState, optax.Params]  # parameters, state, averaged parameters


class Input(TypedDict):
    """The input pipeline at a step: images/s on all cores, seconds to the first batch, resident memory in MB."""

    step: int
    images_per_second: float
    first_batch_seconds: float
    resident_megabytes: float


class Result(TypedDict):
    """All figures, as `--json` writes them. Differences are relative, in float32 against a simulation in float64."""

    machine: str
    records: int
    total_steps: int
    checked_steps: list[int]
    checked_rows: int
    schedule_difference: float
    parameter_difference: float
    average_difference: float
    clipped_steps: int
    labels: dict[str, str]
    input: list[Input]
    hours: list[dict[str, object]]


class Differences(NamedTuple):
    """Figures of the optimizer, see `Result`."""

    schedule_difference: float
    parameter_difference: float
    average_difference: float
    clipped_steps: int


class FailedError(Exception):
    """A check has failed; the message says which."""


def require(condition: bool, message: str) -> None:
    """Raise FailedError with a message unless a condition holds."""
    if not condition:
        raise FailedError(message)


def order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the simulated order of an epoch: the records sorted by 64 random bits of Philox for each."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
    return np.argsort(generator.bit_generator.random_raw(size), kind="stable")


def check_order(setup: Setup, steps: Sequence[int]) -> int:
    """Check the records of some rows in the batches of some steps by their labels; return the number of rows."""
    size, batch, seed = len(setup.data.source), setup.data.batch_size, setup.seed
    expected_labels, checked = recipe_data.labels(), 0
    orders = functools.lru_cache(2)(functools.partial(order, size, seed))
    for step in steps:
        first = int(np.random.default_rng(step).integers(max(1, batch - ROWS + 1)))
        rows = range(first, min(batch, first + ROWS))
        places = [divmod(step * batch + row, size) for row in rows]
        records = [int(orders(epoch)[place]) for epoch, place in places]
        listed = input_pipeline.batch_ids(setup.data.source, batch, seed, step)
        require([listed[row]["index"] for row in rows] == records, f"step {step}: batch_ids has other records")
        batches = setup.data.batches(step, rows)
        found = next(batches)
        batches.close()
        labels = np.argmax(found["labels"], axis=-1)
        require(np.array_equal(labels, expected_labels[records]), f"step {step}: the batch has other records")
        checked += len(rows)
    return checked


def check_epochs(setup: Setup, epochs: Sequence[int]) -> None:
    """Check that an epoch of the stream has every record exactly once."""
    size = len(setup.data.source)
    for epoch in epochs:
        found = np.array([input_pipeline.shuffle.example_at(epoch * size + i, size, setup.seed) for i in range(size)])
        once = np.array_equal(np.sort(found[:, 1]), np.arange(size)) and set(found[:, 0]) == {epoch}
        require(once, f"epoch {epoch} does not have every record once")


def simulated_factor(step: np.ndarray, total_steps: int, warmup: int) -> np.ndarray:
    """Return the factor of the learning rate in float64: a linear warm-up times a cosine over the other steps."""
    progress = np.clip((step - warmup) / (total_steps - warmup), 0, 1)
    return np.minimum(1, step / warmup) * 0.5 * (1 + np.cos(np.pi * progress))


def gradients(total_steps: int) -> np.ndarray:
    """Return a gradient for each step and parameter, some of which are clipped, float32 of shape (total_steps, 8)."""
    step, parameter = np.arange(total_steps)[:, None], np.arange(8)
    noise = np.random.default_rng(0).normal(size=(total_steps, 8))
    return np.float32(0.15 * np.cos(step * (parameter + 1) / 3000) + 0.15 * noise * (1 + parameter % 3))


def optimized(optimizer: optax.GradientTransformation, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters and their averages after each step of the optimizer, (steps, 8) each; kernels come last."""

    def step(carry: Carry, grad: jax.Array) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        params, state, average = carry
        tree = {"head": {"bias": grad[:4], "kernel": grad[4:]}}
        updates, state = optimizer.update(tree, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1 - AVERAGE)
        flat = [jnp.concatenate([x["head"]["bias"], x["head"]["kernel"]]) for x in (params, average)]
        return (params, state, average), (flat[0], flat[1])

    _, history = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))((PARAMS, optimizer.init(PARAMS), PARAMS))
    return np.asarray(history[0]), np.asarray(history[1])


def simulated(config: configs.ConfigDict, factor: np.ndarray, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the same in float64 with Adam's mean in bfloat16, and the number of steps whose gradient is clipped."""
    beta1, beta2, epsilon = config.optax.b1, config.optax.b2, 1e-8
    kept = float(ml_dtypes.bfloat16(beta1))  # optax multiplies the mean by β1 in bfloat16, and so by 0.8984
    params = average = np.ones(8)
    mean, square, clipped = np.zeros(8), np.zeros(8), 0
    decay = np.repeat([0.0, config.wd], 4)
    history = np.empty((2, *grads.shape))
    for step, raw in enumerate(grads.astype(np.float64)):
        norm = math.sqrt((raw**2).sum())
        grad = raw * min(1.0, config.grad_clip_norm / norm)
        clipped += norm > config.grad_clip_norm
        mean, square = kept * mean + (1 - beta1) * grad, beta2 * square + (1 - beta2) * grad**2
        corrected = mean / (1 - beta1 ** (step + 1)), square / (1 - beta2 ** (step + 1))
        update = config.lr * corrected[0] / (np.sqrt(corrected[1]) + epsilon) + decay * params
        params = params - factor[step] * update
        average = AVERAGE * average + (1 - AVERAGE) * params
        mean = mean.astype(ml_dtypes.bfloat16).astype(np.float64)
        history[:, step] = params, average
    return history[0], history[1], clipped


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_optimizer(config: configs.ConfigDict, setup: Setup) -> Differences:
    """Check the schedule, and the optimizer of a model with eight parameters, over all steps."""
    total, warmup = setup.plan.total_steps, config.schedule.warmup_steps
    optimizer, schedule = make_optimizer(
        config, PARAMS, Durations(setup.data.batch_size, len(setup.data.source), total)
    )
    factor = simulated_factor(np.arange(total), total, warmup)
    grads = gradients(total)
    params, average = optimized(optimizer, grads)
    expected, expected_average, clipped = simulated(config, factor, grads)
    found = Differences(
        _schedule_difference(schedule, factor), difference(params, expected), difference(average, expected_average),
        clipped,
    )  # fmt: skip
    for name, value in zip(found._fields[:3], found[:3], strict=True):
        require(value < LIMIT, f"{name} is {value:.1e}, expected less than {LIMIT}")
    return found


def _schedule_difference(schedule: Schedule, factor: np.ndarray) -> float:
    return difference(np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(len(factor)))), factor)


def digest(names: Sequence[str]) -> str:
    """Return the first digits of the SHA-256 of WordNet ids, one per line."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def check_labels(data: Path | None) -> dict[str, str]:
    """Check the label names of all evaluation sets, and the classes that occur in those that are prepared."""
    import tensorflow_datasets as tfds

    found = {}
    for name, (count, classes) in EVALUATIONS.items():
        features = tfds.builder(name, data_dir="/nonexistent").info.features
        key = "original_label" if "original_label" in features else "label"
        label = features[key]
        require(digest(label.names) == ALL_CLASSES[1], f"{name}: its labels are not ImageNet's, in their order")
        found[name] = "names"
        if data is not None and (data / name).is_dir():
            split = "train" if name == "imagenet2012" else "validation" if name == "imagenet2012_real" else "test"
            source = input_pipeline.open_source("tfds", name=name, split=split, data_dir=str(data))
            present = sorted({int(source[i][key]) for i in range(len(source))})
            ids = [label.names[i] for i in present]
            require((len(ids), digest(ids)) == (count, classes), f"{name}: {len(ids)} classes, not the published ones")
            found[name] = f"names and {count} classes of {len(source):,} images"
    return found


def measure_input(setup: Setup, steps: Sequence[int]) -> list[Input]:
    """Measure the batches from some steps on."""
    found = []
    for step in steps:
        started = time.perf_counter()
        batches = setup.data.batches(step)
        next(batches)
        first, started = time.perf_counter() - started, time.perf_counter()
        for _ in range(TIMED):
            next(batches)
        speed = TIMED * setup.data.batch_size / (time.perf_counter() - started)
        batches.close()
        found.append(
            Input(
                step=step, images_per_second=speed, first_batch_seconds=first, resident_megabytes=resident_megabytes()
            )
        )
    return found


def speeds(variant: str) -> dict[str, float]:
    """Return the images/s of a model on each slice, without collectives and input.

    Those of TPUs follow from the compiler's estimates in docs/tpu_step.json for 256 images a chip, those of GPUs from
    the FLOPs of the model and `UTILIZATION`.
    """
    spec, found = f"vit_i1k:variant={variant}", {}
    estimates = json.loads((ROOT / "docs/tpu_step.json").read_text())
    for name, (topology, chips) in SLICES.items():
        (one,) = [x for x in estimates if (x["config"], x["topology"]) == (spec, topology)]
        found[name] = chips * one["examples"] / one["seconds"]
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    each = flops.training_flops(make_model(configs.load(spec)), image)
    assert each is not None
    found[f"{H100S} × H100"] = H100S * H100_PEAK * UTILIZATION / each
    return found


def hours(images: int) -> list[dict[str, object]]:
    """Return the hours of training on each slice: epochs · images / (images/s · 3600)."""
    rows = []
    for variant in ("ViT-S/16", "DCViT-S/16"):
        for name, speed in speeds(variant).items():
            row: dict[str, object] = {"model": variant, "slice": name, "images/s": round(speed)}
            rows.append(row | {f"{epochs} epochs, h": epochs * images / speed / 3600 for epochs in EPOCHS})
    return rows


def check(out: Path, data: Path | None = None, words: Sequence[str] = ()) -> Result:
    """Run all checks and measurements; see the module's docstring.

    Args:
      out: the folder of the generated dataset.
      data: a folder of prepared datasets whose classes are checked.
      words: overrides of the config.

    Raises:
      FailedError: a check has failed.
    """
    recipe_data.prepare(out)
    config = configs.load(CONFIG, [f"input.data.data_dir={out}", *words])
    setup = make_setup(config, evaluate=False)
    size, total = len(setup.data.source), setup.plan.total_steps
    per_epoch = size / setup.data.batch_size
    borders = (int(k * per_epoch) for k in (1, 2, config.total_epochs // 2, config.total_epochs - 1))
    steps = sorted({0, 1, *borders, total // 2, total - 1})
    rows = check_order(setup, steps)
    check_epochs(setup, (0, config.total_epochs - 1))
    return Result(
        machine=f"{os.cpu_count()} cores ({cpu()})", records=size, total_steps=total, checked_steps=steps,
        checked_rows=rows, **check_optimizer(config, setup)._asdict(), labels=check_labels(data),
        input=measure_input(setup, (0, total // 2, total - TIMED - 1)), hours=hours(size),
    )  # fmt: skip


def lines(result: Result) -> list[str]:
    """Return the report in Markdown, as docs/reproduction.md contains it."""
    found = [
        "| check over all steps | figure |",
        "|---|---|",
        f"| records of train[:99%], steps | {result['records']:,}, {result['total_steps']:,} |",
        f"| records of {result['checked_rows']} rows at steps {', '.join(f'{s:,}' for s in result['checked_steps'])} "
        "| as simulated |",
        f"| learning rate | {result['schedule_difference']:.1e} |",
        f"| parameters ({result['clipped_steps']:,} steps are clipped) | {result['parameter_difference']:.1e} |",
        f"| averaged parameters | {result['average_difference']:.1e} |",
        "",
        "| from step | images/s | first batch after s | memory MB |",
        "|---|---|---|---|",
    ]
    for one in result["input"]:
        found.append(
            f"| {one['step']:,} | {one['images_per_second']:.0f} | {one['first_batch_seconds']:.1f} "
            f"| {one['resident_megabytes']:,.0f} |"
        )
    columns = list(result["hours"][0])
    found += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in result["hours"]:
        cells = [f"{x:.1f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row.values()]
        found.append(f"| {' | '.join(cells)} |")
    return found


def main() -> int:
    """Run the checks and print the report; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"), help="folder for the dataset, 0.4 GB")
    parser.add_argument("--data", type=Path, help="folder of datasets whose classes are checked, by default none")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    try:
        result = check(args.out, args.data)
    except FailedError as e:
        print(f"error: {e}")
        return 1
    print("\n".join(lines(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
