"""Bits per byte of small language models with plain and composed attention, trained for the same time on a GPU.

    python scripts/gpu/equal_time.py --json equal_time.json          on a GPU, about eight minutes
    python scripts/gpu/equal_time.py --tiny --json rehearsal.json    tiny models and ten steps, on a CPU

The models have 10.6 million parameters: width 384, 6 layers, 6 heads of 64. A step has 64 rows of 1,024 bytes of the
source code of Python's standard library and of the installed packages. First, the time of a step of each arm is
measured in interleaved rounds. Then each arm trains with each of its seeds for as many steps as take SECONDS, with a
complete schedule of the learning rate, by Muon, and is evaluated on other packages. The file has the results after each
run.

The claim, fixed before the first run: folded composition has lower bits per byte than plain grouped queries at equal
time, by the 95 % interval of the differences with the same seed. "mha" has one seed, and is reported without interval.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dcvit.config.durations import Durations
from dcvit.config.keys import KEYS
from dcvit.models import lm
from dcvit.models.head_settings import SETTINGS
from dcvit.models.losses import token_xent
from dcvit.parallel import runtime
from dcvit.runs.seeds import summarize
from dcvit.training.optim import make_optimizer, schedule
from dcvit.training.timing import device, interleaved
from input_pipeline.text import stdlib

SHARED: dict[str, object] = {"num_key_heads": 2, "groups": 2}
ARMS: dict[str, dict[str, object]] = {
    "grouped": {"compose": None, **SHARED},
    "folded": {**SETTINGS["folded"], **SHARED},
    "folded, post": {**SETTINGS["folded_post"], **SHARED},
    "mha": {"compose": None},
}
SEEDS = {"grouped": 3, "folded": 3, "folded, post": 3, "mha": 1}
SECONDS = 40.0
# Those of configs/lm_stdlib.py, with Muon, and a lower rate for compositions; not tuned at this size.
OPTIMIZER = {
    "optax_name": "muon", "optax": {}, "lr": 3e-3, "schedule": {"decay_type": "constant"}, "wd": 0.1,
    "wd_times_lr": True, "grad_clip_norm": 1.0,
    "wd_mults": (("(.*/)?(kernel|embedding|w_q.|w_k.|w_b)", 1.0), (".*", 0.0)),
}  # fmt: skip
OF_COMPOSITIONS = (("(.*/)?(pre|post)/.*", 0.1),)  # docs/optimizers.md


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the models and of their training; a chunk of steps is one program."""

    width: int = 384
    depth: int = 6
    num_heads: int = 6
    mlp_dim: int = 1024
    context: int = 1024
    rows: int = 64
    chunk: int = 20
    evaluated: int = 1024  # rows
    rounds: int = 5


TINY = Size(64, 1, 4, 128, 64, 4, 2, 16, 1)
Carry: TypeAlias = tuple[optax.Params, optax.OptState]


class Arm(NamedTuple):
    """The programs of an arm.

    Fields:
      initial: from a seed to the initial carry.
      train: a chunk of steps, from the carry, the text, the rows of each step and its factor of the learning rate.
      nats: from the parameters and the text held out to the sum of the losses of all tokens.
    """

    initial: Callable[..., Carry]
    train: Callable[..., Carry]
    nats: Callable[..., jax.Array]


def text(split: str, size: Size) -> jax.Array:
    """Return the rows of a split, of `context` + 1 tokens each."""
    tokens = stdlib.Source(split, size.context, packages=True).tokens
    rows = len(tokens) // (size.context + 1)
    return jnp.asarray(tokens[: rows * (size.context + 1)].reshape(rows, -1))


def lowered(
    fields: dict[str, object], size: Size, text: jax.Array, held_out: jax.Array
) -> tuple[jax.stages.Lowered, ...]:
    """Return the programs of an `Arm` with these fields of the model, before they are compiled."""
    net = lm.Model(
        257, width=size.width, depth=size.depth, num_heads=size.num_heads, mlp_dim=size.mlp_dim, context=size.context,
        qk_norm="rmsnorm", init_std=0.02, dtype_mm="float32" if jax.default_backend() == "cpu" else "bfloat16",
        preset=None, **fields,
    )  # fmt: skip
    composes = fields.get("compose", "both") is not None
    changed = {**OPTIMIZER, "lr_mults": OF_COMPOSITIONS if composes else ()}
    config = types.SimpleNamespace(**{name: key.default for name, key in KEYS.items()} | changed)

    def parameters(seed: jax.Array) -> optax.Params:
        params: optax.Params = net.init(jax.random.key(seed), jnp.zeros((1, size.context), jnp.int32))["params"]
        return params

    tx, *_ = make_optimizer(config, jax.eval_shape(parameters, 0), Durations(size.rows, size.rows, 1))

    def nats(params: optax.Params, rows: jax.Array) -> jax.Array:
        tokens = rows.astype(jnp.int32)
        _, out = net.apply({"params": params}, tokens[:, :-1])
        kernel = lm.head_kernel(params)
        return token_xent(lambda x: lm.unembed(x, kernel), out["pre_logits"], tokens[:, 1:])

    def initial(seed: jax.Array) -> Carry:
        params = parameters(seed)
        return params, tx.init(params)

    def steps(carry: Carry, text: jax.Array, order: jax.Array, factors: jax.Array) -> Carry:
        def step(carry: Carry, now: tuple[jax.Array, jax.Array]) -> tuple[Carry, None]:
            (params, state), (rows, factor) = carry, now
            gradient = jax.grad(lambda p: nats(p, text[rows]).mean())(params)
            change, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, jax.tree.map(lambda x: factor * x, change)), state), None

        return jax.lax.scan(step, carry, (order, factors))[0]

    def total(params: optax.Params, parts: jax.Array) -> jax.Array:
        return jax.lax.map(lambda rows: nats(params, rows).sum(), parts).sum()

    seed, order, factors = jnp.int32(0), jnp.zeros((size.chunk, size.rows), jnp.int32), jnp.zeros(size.chunk)
    carry = jax.eval_shape(initial, seed)
    return (
        jax.jit(initial).lower(seed),
        jax.jit(steps, donate_argnums=0).lower(carry, text, order, factors),
        jax.jit(total).lower(carry[0], held_out),
    )


def build(size: Size, text: jax.Array, held_out: jax.Array) -> dict[str, Arm]:
    """Return the compiled programs of each arm. They compile side by side."""
    programs = {name: lowered(fields, size, text, held_out) for name, fields in ARMS.items()}
    with ThreadPoolExecutor(3 * len(programs)) as pool:
        compiling = {name: [pool.submit(x.compile) for x in found] for name, found in programs.items()}
        return {name: Arm(*(x.result() for x in found)) for name, found in compiling.items()}


def step_times(arms: dict[str, Arm], size: Size, text: jax.Array) -> dict[str, list[float]]:
    """Return the times of steps of each arm in seconds, each the mean of a chunk."""
    order, factors = jnp.zeros((size.chunk, size.rows), jnp.int32), jnp.zeros(size.chunk)
    carries = {name: arm.initial(jnp.int32(0)) for name, arm in arms.items()}

    def chunk(name: str) -> None:
        carries[name] = jax.block_until_ready(arms[name].train(carries[name], text, order, factors))

    seconds = interleaved({name: functools.partial(chunk, name) for name in arms}, size.rounds)
    return {name: [time / size.chunk for time in times] for name, times in seconds.items()}


def train(arm: Arm, seed: int, steps: int, size: Size, text: jax.Array) -> optax.Params:
    """Train for a number of steps, rounded up to whole chunks, and return the parameters."""
    chunks = -(-steps // size.chunk)
    total, rows = chunks * size.chunk, len(text)
    rng = np.random.default_rng(seed)
    epochs = [rng.permutation(rows) for _ in range(-(-total * size.rows // rows))]  # one if the text suffices
    order = np.concatenate(epochs)[: total * size.rows].reshape(chunks, size.chunk, size.rows).astype(np.int32)
    factors = schedule(total, warmup_steps=total // 20, end=0.1)(jnp.arange(total)).reshape(chunks, size.chunk)
    carry = arm.initial(jnp.int32(seed))
    for number in range(chunks):
        carry = arm.train(carry, text, jnp.asarray(order[number]), factors[number])
    return carry[0]


def differences(bits: dict[str, dict[int, float]]) -> dict[str, dict[str, object]]:
    """Return the mean differences to the best plain arm with several seeds, and half of their 95 % intervals."""
    shared = {name: found for name, found in bits.items() if len(found) > 1}
    plain = [name for name in shared if ARMS[name].get("compose", "") is None]
    if not plain:
        return {}
    best = min(plain, key=lambda name: statistics.fmean(shared[name].values()))
    values = {
        f"seed {seed}": {name: found[seed] - shared[best][seed] for name, found in shared.items() if seed in found}
        for seed in shared[best]
    }
    return {
        str(row["metric"]): {"mean": row["mean"], "± 95 %": row["± 95 %"], "to": best} for row in summarize(values)
    }  # fmt: skip


def main() -> None:
    """Run the script; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="training of a run, without compilation")
    parser.add_argument("--tiny", action="store_true", help="tiny models and ten steps, to rehearse on a CPU")
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds}: expected a number above 0")
    runtime.skip_absent_tpu()
    size = TINY if args.tiny else Size()
    rows, held_out = text("train", size), text("validation", size)
    held_out = held_out[: size.evaluated].reshape(-1, size.rows, size.context + 1)
    count = int((held_out[..., 1:] < 256).sum())  # of bytes, without the ends of files
    arms = build(size, rows, held_out)
    seconds = step_times(arms, size, rows)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    counts = {name: 10 if args.tiny else max(1, round(args.seconds / time)) for name, time in medians.items()}
    bits: dict[str, dict[int, float]] = {name: {} for name in ARMS}
    result = {
        "machine": device(), "size": dataclasses.asdict(size), "text": rows.size, "optimizer": OPTIMIZER["optax_name"],
        "learning rate": OPTIMIZER["lr"], "multipliers of compositions": OF_COMPOSITIONS,
        "seconds per step": seconds, "steps": counts, "bits per byte": bits,
    }  # fmt: skip
    print(*(f"{name}: {1e3 * time:.2f} ms per step" for name, time in medians.items()), sep="\n", flush=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    for seed in range(max(SEEDS.values())):
        for name in (name for name in ARMS if seed < SEEDS[name]):
            params = train(arms[name], seed, counts[name], size, rows)
            bits[name][seed] = float(arms[name].nats(params, held_out)) / count / math.log(2)
            print(f"{name}, seed {seed}: {bits[name][seed]:.4f} bits per byte, {counts[name]} steps", flush=True)
            args.json.write_text(json.dumps({**result, "differences": differences(bits)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
