"""Benchmark of attention: each implementation, composed (DC) and plain, next to plain attention of the backend.

    python scripts/bench/dcmha.py                            shapes for this machine; prints a table
    python scripts/bench/dcmha.py --shapes vit_s16 --rounds 31
    python scripts/bench/dcmha.py --shapes decode_405m_b1    one query and 2,048 keys, forward
    python scripts/bench/dcmha.py --shapes 64x16_4x16        a small model: 64 examples of 16 tokens, 4 heads of 16
    python scripts/bench/dcmha.py --lengths 512 1024 2048 --plot docs/attention.png
    python scripts/bench/dcmha.py --shapes --packed 8192     rows of documents, by segment ids and by their mask

The rounds of a shape are interleaved: each round calls every row twice and times the second call, so that other load on
the machine affects all rows equally. Ratios divide medians by the median of plain attention by XLA in the same run.
"grouped" is plain attention with half as many key heads, "folded" the same with a composition inside key heads, both by
the implementation that the package selects, and "combine" the composition of its queries alone, by each form. "DC
weights" and "folded weights" compute the dynamic weights of a layer from its input.
"MiB" is the temporary memory of the compiled program according to XLA. "XLA" is plain attention as XLA compiles einsum,
softmax and einsum (`reference` without compose weights). "jax.nn" is `jax.nn.dot_product_attention`, which uses cuDNN
on a GPU with bfloat16.
"""

import argparse
import functools
import itertools
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha import ComposeWeights, attention, dynamic_weights
from dcvit.dcmha.device import platform as backend
from dcvit.dcmha.folded import combine_heads, multiply_heads
from dcvit.dcmha.inputs import Composition
from dcvit.dcmha.plan import BACKENDS, COMPOSED
from dcvit.parallel import hlo, runtime
from dcvit.training.timing import device, interleaved

Row: TypeAlias = dict[str, Any]  # of a table, for JSON
Kind: TypeAlias = Literal["plain", "DC", "grouped", "folded", "DC weights", "folded weights", "combine"]
Arguments: TypeAlias = tuple[object, ...]  # of a kind
Function: TypeAlias = Callable[..., object]  # of the arguments of a kind


class Shape(NamedTuple):
    """Sizes of self-attention; with `step`, attention of one query to `length` keys, as in decoding."""

    batch: int
    length: int
    heads: int
    width: int
    causal: bool = False
    window: int | None = None
    step: bool = False


CPU = {"vit_s16": Shape(8, 196, 6, 64), "lm_1024": Shape(1, 1024, 16, 64, True)}
GPU = {
    "vit_s16": Shape(256, 196, 6, 64),
    "lm_405m": Shape(8, 2048, 16, 64, True),
    "lm_405m_window": Shape(8, 2048, 16, 64, True, 256),
    "lm_2.8b": Shape(4, 2048, 32, 80, True),
    "lm_2.8b_window": Shape(4, 2048, 32, 80, True, 256),
    "lm_6.9b": Shape(2, 2048, 32, 128, True),
    "lm_6.9b_window": Shape(2, 2048, 32, 128, True, 256),
}
DECODE = {
    f"decode_{size}_b{batch}": Shape(batch, 2048, heads, width, step=True)
    for size, heads, width in (("405m", 16, 64), ("2.8b", 32, 80))
    for batch in (1, 8)
}
# Small models; `dcvit.dcmha.plan` chooses on CPUs by these.
SMALL = {
    f"{batch}x{length}_{heads}x{width}": Shape(batch, length, heads, width, causal=length in (128, 256))
    for batch, length, heads, width in (
        (256, 4, 4, 16), (64, 16, 4, 16), (64, 16, 16, 8), (128, 16, 2, 32), (1, 16, 4, 16), (2, 32, 8, 16),
        (8, 64, 6, 64), (8, 64, 16, 64), (16, 128, 8, 16), (4, 128, 32, 64), (1, 256, 8, 64),
    )
}  # fmt: skip
runtime.skip_absent_tpu()  # before `backend` asks for the devices
tried = [name for name, row in BACKENDS.items() if COMPOSED in row.tried.get(backend(), ()) and name != "reference"]
TILED = tuple(dict.fromkeys(("blockwise", *reversed(tried))))  # the fastest is the last
SHAPES = (GPU if backend() == "gpu" else CPU) | DECODE | SMALL
DTYPE = jnp.float32 if backend() == "cpu" else jnp.bfloat16
DOCUMENT = 500  # mean number of tokens of a document in packed rows
FIRST = "plain, XLA"  # the row that ratios refer to


def limit() -> int:
    """Return the bytes of temporary memory above which a row is skipped: half of the device's, 2 GiB on CPUs."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] // 2 if stats else 2 * 2**30


def arguments(shape: Shape, kind: Kind) -> Arguments:
    """Return random arguments of a row: q, k, v, pre and post, or an input and parameters, or q and matrices."""
    keys = iter(jax.random.split(jax.random.key(0), 40))
    shares_keys = kind.startswith(("grouped", "folded"))
    key_heads = shape.heads // 2 if shares_keys else shape.heads
    tokens = (1 if shape.step else shape.length), shape.length  # numbers of queries and keys

    def normal(*size: int) -> jax.Array:
        return jax.random.normal(next(keys), size, DTYPE)

    def weights() -> ComposeWeights:
        """Return random weights of all dynamic branches; those of folded composition are query-wise."""
        sides = [[normal(shape.batch, n, *inner, shape.heads) for inner in ((2,), (2,), ())] for n in tokens]
        return ComposeWeights(*[0.3 * w for side in sides[: 1 if shares_keys else 2] for w in side])

    if kind.endswith("weights"):
        parameters = composition(shape, kind).parameters(shape.heads, shape.heads * shape.width).items()
        params = {c: {name: 0.1 * normal(*size) for name, (size, _) in parameters} for c in ("pre", "post")}
        return normal(shape.batch, tokens[0], shape.heads * shape.width), params
    q = normal(shape.batch, tokens[0], shape.heads, shape.width)
    if kind == "combine":
        return q, jax.random.normal(next(keys), (*q.shape[:2], shape.heads // 2, 2, 2))
    k, v = (normal(shape.batch, tokens[1], key_heads, shape.width) for _ in range(2))
    return (q, k, v, weights(), weights()) if kind in ("DC", "folded") else (q, k, v, None, None)


def composition(shape: Shape, kind: Kind) -> Composition:
    """Return the composition of a layer of a kind."""
    folds = kind.startswith("folded")
    return Composition("both", branches="q" if folds else "qk", groups=shape.heads // 2 if folds else 1)


def is_supported(f: Function, shape: Shape, kind: Kind) -> bool:
    """Return True if an implementation supports a shape."""
    try:
        jax.eval_shape(f, *jax.eval_shape(lambda: arguments(shape, kind)))
    except ValueError:
        return False
    return True


def functions(shape: Shape) -> dict[str, tuple[Kind, Function]]:
    """Return the kind and the function of each row."""

    def ours(name: str | None, groups: int = 1) -> Function:
        return lambda q, k, v, pre, post: attention(
            q, k, v, pre, post, causal=shape.causal, window=shape.window, groups=groups, implementation=name
        )

    def library(q: jax.Array, k: jax.Array, v: jax.Array, pre: None, post: None) -> jax.Array:
        window = None if shape.window is None else (shape.window - 1, 0)
        cudnn = backend() == "gpu" and jnp.bfloat16 == DTYPE
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=shape.causal, local_window_size=window, implementation="cudnn" if cudnn else None
        )

    def weights(kind: Kind) -> Function:
        sides = composition(shape, kind).branches
        return lambda x, params: dynamic_weights(x, params, sides=sides, heads=shape.heads, gelu="tanh")

    rows: dict[str, tuple[Kind, Function]] = {FIRST: ("plain", ours("reference")), "plain, jax.nn": ("plain", library)}
    tiled = ("decode",) if shape.step else TILED
    for name in ("reference", *tiled):
        if name in tiled and is_supported(ours(name), shape, "plain"):
            rows[f"plain, {name}"] = ("plain", ours(name))
        if is_supported(ours(name), shape, "DC"):
            rows[f"DC, {name}"] = ("DC", ours(name))
    rows["grouped, best"] = ("grouped", ours(None))
    rows["folded, best"] = ("folded", ours(None, shape.heads // 2))
    rows |= {kind: (kind, weights(kind)) for kind in ("DC weights", "folded weights")}
    return rows | {"combine, sum": ("combine", combine_heads), "combine, product": ("combine", multiply_heads)}


def compiled(f: Function, args: Arguments, gradient: bool) -> tuple[Callable[[], object], int]:
    """Compile the forward pass, with `gradient` also all gradients; return a call and its temporary bytes."""

    def cosines(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.cos(jnp.arange(like.size, dtype=jnp.float32)).reshape(like.shape).astype(like.dtype)

    def both(cotangent: object, *args: object) -> tuple[object, object]:
        out, pull = jax.vjp(f, *args)
        return out, pull(cotangent)

    given = (jax.tree.map(cosines, jax.eval_shape(f, *args)), *args) if gradient else args
    program = jax.jit(both if gradient else f).lower(*given).compile()
    return lambda: jax.block_until_ready(program(*given)), program.memory_analysis().temp_size_in_bytes


def measure(
    shape: Shape, gradient: bool, rounds: int, *, only: Sequence[str] = (), always: str = ""
) -> dict[str, tuple[list[float], int]]:
    """Return the seconds of every round and the temporary bytes of each row.

    Args:
      shape: sizes of the attention.
      gradient: measure all gradients too.
      rounds: number of timed calls.
      only: names of the rows to measure; by default all.
      always: name of the row that is measured also above the memory limit.
    """
    calls, temporary = {}, {}
    for name, (kind, f) in functions(shape).items():
        if only and name not in only:
            continue
        call, size = compiled(f, arguments(shape, kind), gradient)
        if size > limit() and name != always:
            print(f"  {name:22} skipped: {size / 2**30:.1f} GiB of temporary memory")
            continue
        calls[name], temporary[name] = call, size
        if rounds:
            call()
    seconds = interleaved(calls, rounds)
    return {name: (seconds[name], temporary[name]) for name in calls}


def table(name: str, shape: Shape, rounds: int) -> list[Row]:
    """Measure a shape, print its rows and return them."""
    rows = []
    for gradient in (False,) if shape.step else (False, True):
        measured = measure(shape, gradient, rounds, always=FIRST)
        if not rounds:
            continue
        first = statistics.median(measured[FIRST][0])
        title = "forward + backward" if gradient else "forward"
        print(f"\n{name} {shape._asdict()}, {title}, {jnp.dtype(DTYPE).name}")
        for row, (seconds, temporary) in measured.items():
            low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
            ratio = middle / 1e3 / first
            print(f"  {row:22} {middle:9.2f} ms ({low:.2f}-{high:.2f})  {ratio:6.2f}x  {temporary / 2**20:9.1f} MiB")
            rows.append(
                {"shape": name, "pass": title, "row": row, "ms": middle, "ms_min": low, "ms_max": high,
                 "ratio": ratio, "temporary_mib": temporary / 2**20}
            )  # fmt: skip
    return rows


def scaling(lengths: Sequence[int], rounds: int) -> list[Row]:
    """Measure forward and backward by length for one example with 4 heads and D = 64, global and with a window."""
    rows = []
    best = TILED[-1]
    for length in lengths:
        for window in (None, 256):
            shape = Shape(1, length, 4, 64, True, window)
            names = [FIRST, "DC, reference", f"plain, {best}", f"DC, {best}"]
            for name, (seconds, temporary) in measure(shape, True, rounds, only=names).items():
                kind = "global" if window is None else f"window {window}"
                row = {"T": length, "layer": kind, "row": name, "ms": 1e3 * statistics.median(seconds)}
                rows.append({**row, "temporary_mib": temporary / 2**20})
                print("  T={T:6d} {layer:10} {row:16} {ms:10.1f} ms {temporary_mib:10.1f} MiB".format(**rows[-1]))
    return rows


def documents(tokens: int) -> jax.Array:
    """Return the ids (1 T) of documents in a packed row; their lengths have a geometric distribution."""
    ends = np.cumsum(np.random.default_rng(0).geometric(1 / DOCUMENT, tokens))
    return jnp.asarray(np.searchsorted(ends, np.arange(tokens), side="right")[None], jnp.int32)


def largest_array(text: str) -> str:
    """Return the largest array that a compiled program holds, outside of its fused loops, with its size in MiB."""
    program, _ = hlo.computations(text)
    fused = {name for lines in program.values() for x in lines if x.op == "fusion" for _, name in hlo.called(x.rest)}
    shapes = [x.shape for name, lines in program.items() if name not in fused for x in lines]
    found = max((array for x in shapes for array in re.findall(r"[a-z]\w*\[[\d,]+\]", x)), key=hlo.size_in_bytes)
    return f"{found}, {hlo.size_in_bytes(found) / 2**20:.1f} MiB"


def packed(tokens: int, rounds: int) -> list[Row]:
    """Measure forward and backward of a packed causal row with 4 heads and D = 64, with segments and with a mask."""
    shape, ids = Shape(1, tokens, 4, 64, True), documents(tokens)
    attend = functools.partial(attention, causal=True, implementation=TILED[-1])

    def by_segments(*args: jax.Array, ids: jax.Array) -> jax.Array:
        return attend(*args, segments=ids)

    def by_mask(*args: jax.Array, ids: jax.Array) -> jax.Array:
        return attend(*args, mask=(ids[:, :, None] == ids[:, None])[:, None])

    def with_gradients(f: Function, args: Arguments, ids: jax.Array) -> tuple[jax.Array, object]:
        out, pull = jax.vjp(functools.partial(f, ids=ids), *args)
        return out, pull(out)

    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], object]] = {}
    for composed, f in itertools.product((False, True), (by_segments, by_mask)):
        given = arguments(shape, "DC" if composed else "plain"), ids
        program = jax.jit(functools.partial(with_gradients, f)).lower(*given).compile()
        row = f"{'DC' if composed else 'plain'}, {'segments' if f is by_segments else 'mask'}"
        calls[row] = lambda program=program, given=given: jax.block_until_ready(program(*given))
        temporary = program.memory_analysis().temp_size_in_bytes / 2**20
        rows[row] = {"T": tokens, "row": row, "temporary_mib": temporary, "largest": largest_array(program.as_text())}
    for row, seconds in interleaved(calls, rounds).items():
        rows[row]["ms"] = 1e3 * statistics.median(seconds)
        print("  T={T:6d} {row:16} {ms:10.1f} ms {temporary_mib:8.1f} MiB, largest array {largest}".format(**rows[row]))
    return [*rows.values()]


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Plot time and memory by length on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    names = list(dict.fromkeys(row["row"] for row in rows))
    for axis, (key, label) in zip(axes, (("ms", "milliseconds"), ("temporary_mib", "temporary MiB")), strict=True):
        for layer in dict.fromkeys(row["layer"] for row in rows):
            for i, name in enumerate(names):
                line = [(row["T"], row[key]) for row in rows if (row["layer"], row["row"]) == (layer, name)]
                style = "-" if layer == "global" else "--"
                axis.plot(*zip(*line, strict=True), style, marker=".", color=f"C{i}", label=f"{name}, {layer}")
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axis.set_xticks(ticks := sorted({row["T"] for row in rows}), [str(t) for t in ticks], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"Forward + backward of one layer's attention, 4 heads, D = 64: {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in SHAPES if name not in SMALL]
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=default, help="shapes to measure")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each row; 0 only compiles --shapes")
    parser.add_argument("--lengths", nargs="*", type=int, default=[], metavar="T", help="measure these lengths")
    parser.add_argument(
        "--packed", nargs="*", type=int, default=[], metavar="T", help="measure packed rows of T tokens"
    )
    parser.add_argument("--plot", type=Path, help="write a plot of --lengths to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    machine = device()
    print(machine)
    result: Row = {"machine": machine, "rounds": args.rounds}
    result["attention"] = [row for name in args.shapes for row in table(name, SHAPES[name], args.rounds)]
    result["scaling"] = scaling(args.lengths, min(args.rounds, 3))
    result["packed"] = [row for length in args.packed for row in packed(length, min(args.rounds, 5))]
    if args.plot:
        plot(result["scaling"], args.plot, machine)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
