"""Check of the GPU kernels on a GPU: outputs and gradients compared with the reference in float32, and determinism.

Plain attention by cuDNN is checked, too; its gradients need not be deterministic.

    python scripts/check_gpu.py                 # all cases; prints a table, exit status 1 if any fails
    python scripts/check_gpu.py vit lm64        # cases whose name contains one of these words
    python scripts/check_gpu.py --time          # also milliseconds, forward and forward + backward (median of 20)

The script needs jax, numpy and a Hopper GPU. Errors are |found - reference| / |reference| in the 2-norm. Both sides get
the same random inputs; bfloat16 inputs are rounded before the comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dcvit.dcmha import ComposeWeights, cudnn, reference
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.pallas_gpu import api
from dcvit.dcmha.pallas_gpu.tiling import check_supported
from dcvit.parallel import runtime

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}

PLAIN = {"pre": False, "post": False, "implementation": "cudnn"}

# name: batch, queries, keys, heads, key heads, width, dtype, further options
CASES: dict[str, tuple[Any, ...]] = {
    "vit-s bf16": (8, 196, 196, 6, 6, 64, "bfloat16", {}),
    "vit-s f32": (8, 196, 196, 6, 6, 64, "float32", {}),
    "vit-s 197 bf16": (4, 197, 197, 6, 6, 64, "bfloat16", {}),
    "lm64 window": (1, 2048, 2048, 16, 16, 64, "bfloat16", {"window": 256}),
    "lm64 causal": (1, 2048, 2048, 16, 16, 64, "bfloat16", {"causal": True}),
    "lm64 causal f32": (1, 1024, 1024, 16, 16, 64, "float32", {"causal": True}),
    "lm80 window": (1, 2048, 2048, 32, 32, 80, "bfloat16", {"window": 256}),
    "lm80 causal": (1, 2048, 2048, 32, 32, 80, "bfloat16", {"causal": True}),
    "lm128 window": (1, 2048, 2048, 32, 32, 128, "bfloat16", {"window": 256}),
    "lm128 causal": (1, 2048, 2048, 32, 32, 128, "bfloat16", {"causal": True}),
    "lm128 window f32": (1, 512, 512, 32, 32, 128, "float32", {"window": 256}),
    "grouped queries": (2, 300, 300, 8, 2, 64, "bfloat16", {"causal": True}),
    "cross, mask": (2, 100, 333, 4, 4, 32, "float32", {"mask": True}),
    "head groups": (2, 128, 128, 8, 8, 64, "float32", {"groups": 2}),
    "query-wise only": (2, 256, 256, 8, 8, 64, "bfloat16", {"causal": True, "branches": ("q1", "q2", "qg")}),
    "key-wise only": (2, 256, 256, 8, 8, 64, "bfloat16", {"causal": True, "branches": ("k1", "k2", "kg")}),
    "gates only": (2, 256, 256, 8, 8, 64, "float32", {"causal": True, "branches": ("qg", "kg")}),
    "pre only": (2, 256, 256, 8, 8, 64, "float32", {"causal": True, "post": False}),
    "post only, rank 3": (2, 256, 256, 8, 8, 64, "float32", {"causal": True, "pre": False, "rank": 3}),
    "cudnn vit-s": (8, 196, 196, 6, 6, 64, "bfloat16", PLAIN),
    "cudnn causal": (2, 2048, 2048, 16, 16, 64, "bfloat16", {"causal": True, **PLAIN}),
    "cudnn window": (2, 2048, 2048, 32, 8, 80, "bfloat16", {"window": 256, **PLAIN}),
    "sees nothing": (1, 300, 50, 4, 4, 64, "float32", {"window": 20}),
}


def build(seed: int, case: tuple[Any, ...]) -> tuple[Inputs, jax.Array, Options]:
    """Return the inputs, the cotangent of the output, and the options of a case."""
    batch, queries, keys, heads, key_heads, width, dtype, more = case
    keys_random = iter(jax.random.split(jax.random.key(seed), 32))
    rank, branches = more.get("rank", 2), more.get("branches", ComposeWeights._fields[:6])

    def array(*shape: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(next(keys_random), shape) * scale).astype(dtype)

    def weights(wanted: bool) -> ComposeWeights | None:
        if not wanted:
            return None
        fields = {}
        for name in branches:
            length = queries if name[0] == "q" else keys
            shape = (heads,) if name[1] == "g" else (rank, heads)
            fields[name] = array(batch, length, *shape, scale=0.3)
        return ComposeWeights(**fields)

    inputs = Inputs(
        array(batch, queries, heads, width),
        array(batch, keys, key_heads, width),
        array(batch, keys, key_heads, width),
        weights(more.get("pre", True)),
        weights(more.get("post", True)),
    )
    mask = jax.random.bernoulli(next(keys_random), 0.7, (batch, 1, queries, keys)) if more.get("mask") else None
    options = Options(
        causal=more.get("causal", False) or "window" in more,
        window=more.get("window"),
        groups=more.get("groups", 1),
        scale=width**-0.5,
    )
    return inputs._replace(mask=mask), array(batch, queries, heads, width), options


def with_gradients(function: Callable[[Inputs, Options], jax.Array], options: Options) -> Callable[..., Any]:
    """Return a compiled function (inputs, cotangent) -> (output, gradients)."""

    def run(inputs: Inputs, cotangent: jax.Array) -> tuple[jax.Array, object]:
        out, vjp = jax.vjp(lambda *x: function(Inputs(*x, inputs.mask), options), *inputs[:5])
        return out, vjp(cotangent)

    return jax.jit(run)


def error(found: jax.Array, right: jax.Array) -> float:
    """Return the relative error in the 2-norm, NaN if `found` is not finite."""
    a, b = np.asarray(found, np.float64), np.asarray(right, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) if np.isfinite(a).all() else float("nan")


def milliseconds(function: Callable[..., object], *inputs: object) -> float:
    """Return the median time of 20 calls after three calls of warm-up."""
    times = []
    for _ in range(23):
        start = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times[3:]))


def check(seed: int, case: tuple[Any, ...], timed: bool) -> tuple[bool, str]:
    """Return True if a case passes, and the rest of its row."""
    inputs, cotangent, options = build(seed, case)
    by_cudnn = case[7].get("implementation") == "cudnn"
    attention = cudnn.attention if by_cudnn else api.attention
    try:
        if not by_cudnn:
            check_supported(*inputs[:5], groups=options.groups)
    except UnsupportedError as reason:
        return False, f"not supported: {reason}"
    ours = with_gradients(attention, options)
    found, again = ours(inputs, cotangent), ours(inputs, cotangent)
    wide = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(jnp.float32), (inputs, cotangent))
    with jax.default_matmul_precision("highest"):
        right = with_gradients(reference.attention, options)(*wide)
    errors = [error(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(found[1])]
    worst = int(np.argmax(np.nan_to_num(errors[1:], nan=np.inf)))
    q, k, v = errors[1:4]
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True))
    passes = (same or by_cudnn) and all(e < TOLERANCE[case[6]] for e in errors)
    row = f"{errors[0]:8.1e} {q:8.1e} {k:8.1e} {v:8.1e} {errors[1 + worst]:8.1e} {paths[worst]:<9}"
    if timed:
        forward = jax.jit(lambda inputs: attention(inputs, options))
        row += f" {milliseconds(forward, inputs):8.3f} {milliseconds(ours, inputs, cotangent):8.3f}"
    return passes, row + ("" if same else "  not deterministic")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="run only cases whose name contains one of these")
    parser.add_argument("--time", action="store_true", help="also measure milliseconds")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of the random inputs (default: the clock)"
    )
    args = parser.parse_args()
    runtime.skip_absent_tpu()
    if jax.default_backend() != "gpu":
        print(f"no GPU: JAX's backend is {jax.default_backend()}", file=sys.stderr)
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, seed {args.seed}")
    print(f"{'case':<18} {'forward':>8} {'dq':>8} {'dk':>8} {'dv':>8} {'worst gradient':>18}", end="")
    print(f" {'ms fwd':>8} {'ms both':>8}  status" if args.time else "  status")
    failures = 0
    for name, case in CASES.items():
        if args.names and not any(part in name for part in args.names):
            continue
        try:
            passes, row = check(args.seed, case, args.time)
        except Exception as problem:  # continue with the other cases
            passes, row = False, f"{type(problem).__name__}: {str(problem).splitlines()[0][:150]}"
        failures += not passes
        print(f"{name:<18} {row}  {'ok' if passes else 'FAILED'}", flush=True)
    print(f"{failures} failed" if failures else "all passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
