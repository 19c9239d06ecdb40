"""Benchmark of training steps: models with composed attention (DC) and plain ones, equal in everything else.

    python scripts/bench/train.py --model vit_s16            DCViT-S/16 and ViT-S/16
    python scripts/bench/train.py --model 405M --batch 8     DCFormer++ and DCFlash of a size of the paper
    python scripts/bench/train.py --model 6.9B --depth 4 --rows "plain, best" "DC, best"    a stack of its layers

A step consists of the forward and backward pass on random data with softmax cross-entropy, and Adam's update. It is
compiled as one program whose state stays on the device. Every round runs two steps of each model and times the second.
"XLA" is the reference implementation, which XLA compiles from einsum, softmax and einsum; "best" is the implementation
that the package selects. "grouped" and "folded" have fewer key heads: those of DCFlash, or half of the heads of a ViT.
A plain row is the composed model with compose=None: windows, QK-norm, key heads and rematerialization
(`full_but_attention`, as in configs/lm_pile.py) are the same. scripts/bench/peers.py compares with PyTorch.

On Linux, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment gives the memory of a step huge pages, if the kernel
permits programs to ask for them ("madvise" in /sys/kernel/mm/transparent_hugepage/enabled).
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from dcvit.models import lm, vit
from dcvit.models.presets import SIZES
from dcvit.parallel import runtime
from dcvit.training.timing import device, interleaved

CONTEXT = 2048


class Row(NamedTuple):
    """The attention of a row: whether heads are composed, whether they share keys, and the implementation."""

    composed: bool
    shares_keys: bool = False
    implementation: str | None = None


ROWS = {
    "plain, XLA": Row(composed=False, implementation="reference"),
    "plain, best": Row(composed=False),
    "DC, best": Row(composed=True),
    "grouped, best": Row(composed=False, shares_keys=True),
    "folded, best": Row(composed=True, shares_keys=True),
}
RATIOS = [
    ("DC, best", "plain, XLA"), ("DC, best", "plain, best"), ("folded, best", "grouped, best"),
    ("folded, best", "plain, best"),
]  # fmt: skip
Build = Callable[[Row], tuple[nn.Module, jax.Array, jax.Array]]
Function = Callable[..., Any]  # of arrays


def vision(batch: int, dtype: str) -> Build:
    """Return a function from a row of `ROWS` to ViT-S/16, images and labels."""

    def build(row: Row) -> tuple[nn.Module, jax.Array, jax.Array]:
        heads = {"heads": "folded" if row.shares_keys else "dcmha"} if row.composed else {}
        shared = {"num_key_heads": vit.VARIANTS["S"][3] // 2} if row.shares_keys else {}
        fields = {"pool_type": "gap", "posemb": "sincos2d", "rep_size": True, "dtype_mm": dtype} | heads | shared
        net = vit.Model(1000, variant="S/16", implementation=row.implementation, **fields)
        images = jax.random.uniform(jax.random.key(1), (batch, 224, 224, 3), minval=-1)
        return net, images, jax.random.randint(jax.random.key(2), (batch,), 0, 1000)

    return build


def language(size: str, depth: int | None, batch: int, dtype: str) -> Build:
    """Return a function from a row of `ROWS` to a model of the paper, tokens and next tokens."""

    def build(row: Row) -> tuple[nn.Module, jax.Array, jax.Array]:
        preset = f"{'DCFlash' if row.shares_keys else 'DCFormer++'}-{size}"
        fields = {"depth": depth} if depth else {}
        fields |= {"scan": True, "remat": "full_but_attention", "dtype_mm": dtype, "context": CONTEXT}
        if not row.composed:
            fields |= {"compose": None}
        net = lm.Model(50_257, preset=preset, implementation=row.implementation, **fields)
        tokens = jax.random.randint(jax.random.key(1), (batch, CONTEXT + 1), 0, 50_257)
        return net, tokens[:, :-1], tokens[:, 1:]

    return build


def lowered(net: nn.Module, inputs: jax.Array, targets: jax.Array) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Return the programs of the initial parameters and optimizer, and of a training step, before compilation."""
    tx = optax.adam(1e-3)

    def update(
        params: optax.Params, state: optax.OptState, inputs: jax.Array, targets: jax.Array
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        def loss(params: optax.Params) -> jax.Array:
            logits, _ = net.apply({"params": params}, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        change, state = tx.update(gradient, state)
        return optax.apply_updates(params, change), state, value

    def initial(inputs: jax.Array) -> list[optax.Params | optax.OptState]:
        params = net.init(jax.random.key(0), inputs)["params"]
        return [params, tx.init(params)]

    step = jax.jit(update, donate_argnums=(0, 1)).lower(*jax.eval_shape(initial, inputs[:1]), inputs, targets)
    return jax.jit(initial).lower(inputs[:1]), step


def stepper(initial: Function, update: Function, inputs: jax.Array, targets: jax.Array) -> Callable[[], jax.Array]:
    """Return a function that runs one training step and returns its loss."""
    carry = initial(inputs[:1])

    def step() -> jax.Array:
        *carry[:], value = update(*carry, inputs, targets)
        return jax.block_until_ready((carry, value))[1]

    step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["vit_s16", *SIZES], default="vit_s16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, help="number of layers of a language model, if not all fit")
    parser.add_argument("--dtype", help="dtype of the computation (default: float32 on a CPU, else bfloat16)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="if not all fit into the memory")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each row; 0 only compiles")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if args.depth is not None and (args.model == "vit_s16" or args.depth < 1):
        parser.error(f"--depth {args.depth}: expected 1 or more layers of a language model")
    images = args.model == "vit_s16"
    build = vision(args.batch, dtype) if images else language(args.model, args.depth, args.batch, dtype)
    built = {name: build(ROWS[name]) for name in args.rows}
    before = {name: lowered(*row) for name, row in built.items()}
    with ThreadPoolExecutor() as pool:
        compiling = {name: [pool.submit(x.compile) for x in programs] for name, programs in before.items()}
        programs = {name: (first.result(), step.result()) for name, (first, step) in compiling.items()}
    if not args.rounds:
        return
    steps = {name: stepper(*programs[name], *row[1:]) for name, row in built.items()}
    memory = {name: update.memory_analysis() for name, (_, update) in programs.items()}
    seconds = interleaved(steps, args.rounds)
    machine = device()
    if "GLIBC_TUNABLES" in os.environ:
        machine += f", GLIBC_TUNABLES={os.environ['GLIBC_TUNABLES']}"
    print(f"{args.model}, batch {args.batch}, {dtype}, {args.rounds} rounds; {machine}")
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, high = 1e3 * min(times), 1e3 * max(times)
        size = memory[name].temp_size_in_bytes / 2**20
        print(f"  {name:14} {1e3 * median[name]:9.1f} ms ({low:.1f}-{high:.1f})  {size:9.1f} MiB temporary")
    ratios = {f"{a} / {b}": median[a] / median[b] for a, b in RATIOS if a in median and b in median}
    print("  " + "  ".join(f"{name}: {ratio:.3f} of the time" for name, ratio in ratios.items()))
    if args.json:
        result = {"model": args.model, "batch": args.batch, "dtype": dtype, "machine": machine, "depth": args.depth}
        args.json.write_text(json.dumps({**result, "seconds": seconds, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
