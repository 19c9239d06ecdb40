"""Benchmark of images of different sizes: packed rows against rows of one padded image, equal in everything else.

    python scripts/bench/native_aspect_ratio.py [--variant S/16] [--images 64] [--rounds 9] [--docs docs]

The images have aspect ratios that are log-uniform in [1/2, 2] and areas that are uniform in [1/4, 1] of `max_tokens`
patches, as the op `patches` rounds them. A padded batch has a row of `max_tokens` tokens for each image. A packed batch
has the fewest rows of `--row` tokens with which no image loses a token. Both compute the same logits. A training step
is the forward and backward pass with softmax cross-entropy, and Adam's update. Every round runs each arm twice and
times the second run. "folded" composes heads that share keys in pairs, "grouped" is plain attention with as many keys.

`--docs FOLDER` writes native_aspect_ratio.json to the folder, and the table into native_aspect_ratio.md there.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results

from dcvit.dcmha.selection import set_default
from dcvit.models import losses, vit
from dcvit.models.packed_images import PackedImages, one_per_row, pack
from dcvit.parallel import runtime
from dcvit.training.timing import device, interleaved
from input_pipeline.preprocess.packing import Packing, place
from input_pipeline.preprocess.patches import grid_of

BEGIN, END = "<!-- written by scripts/bench/native_aspect_ratio.py -->", "<!-- end -->"
CLASSES = 1000
ATTENTION = {  # fields of the model, and the name of its plain counterpart
    "plain": {}, "DC": {"heads": "dcmha"}, "grouped": {"shares_keys": True},
    "folded": {"heads": "folded", "shares_keys": True},
}  # fmt: skip


class Shape(NamedTuple):
    """Sizes: the model's variant, images of a batch, largest number of patches of an image, tokens of a packed row."""

    variant: str
    images: int
    max_tokens: int
    row: int


def mixture(shape: Shape, patch: int) -> np.ndarray:
    """Return the rows and columns of patches of each image, int32 of shape (images, 2)."""
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.uniform(-np.log(2), np.log(2), shape.images))
    areas = rng.uniform(0.25, 1, shape.images) * shape.max_tokens * patch**2
    sizes = np.sqrt([areas / ratios, areas * ratios]).astype(int).T.tolist()
    return np.asarray([grid_of((height, width), patch, shape.max_tokens) for height, width in sizes], np.int32)


def fewest_rows(sizes: Sequence[int], shape: Shape) -> Packing:
    """Return the packing of all images as one group into the fewest rows with which no image loses a token."""
    packings = (Packing(shape.images, rows, shape.row) for rows in itertools.count(1))
    return next(p for p in packings if place(sizes, p)[:, 3].sum() == sum(sizes))


def model(fields: dict[str, object], shape: Shape, dtype: str) -> vit.ViT:
    """Return the model with the attention that `fields` of `ATTENTION` describe."""
    fields = dict(fields)
    size = shape.variant.partition("/")[0]
    shared = {"num_key_heads": vit.VARIANTS[size][3] // 2} if fields.pop("shares_keys", False) else {}
    common = {"pool_type": "gap", "posemb": "sincos2d", "head_zeroinit": False, "dtype_mm": dtype}
    return vit.Model(CLASSES, variant=shape.variant, **common, **fields, **shared)


def functions(net: vit.ViT, inputs: PackedImages, shape: Shape) -> dict[str, Callable[[], object]]:
    """Return the compiled forward pass and training step on `inputs`, as functions without arguments."""
    side = net.patch_size[0] * int(np.sqrt(shape.max_tokens))
    params = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, side, side, 3)))["params"]
    labels = jax.nn.one_hot(jnp.arange(shape.images) % CLASSES, CLASSES)
    adam = optax.adam(1e-3)

    def loss(params: optax.Params, inputs: PackedImages) -> jax.Array:
        return jnp.mean(losses.softmax_xent(net.apply({"params": params}, inputs)[0], labels))

    def update(params: optax.Params, state: optax.OptState, inputs: PackedImages) -> tuple[object, object]:
        change, state = adam.update(jax.grad(loss)(params, inputs), state)
        return optax.apply_updates(params, change), state

    forward = jax.jit(lambda params, inputs: net.apply({"params": params}, inputs)[0])
    step = jax.jit(update, donate_argnums=(0, 1))
    carry = [jax.tree.map(jnp.copy, params), adam.init(params)]

    def train() -> None:
        carry[:] = jax.block_until_ready(step(*carry, inputs))

    calls = {"forward": lambda: jax.block_until_ready(forward(params, inputs)), "training step": train}
    for call in calls.values():
        call()  # compiles
    return calls


def measure(shape: Shape, rounds: int, dtype: str, attention: Sequence[str] = tuple(ATTENTION)) -> dict[str, object]:
    """Return the images per second of each arm (median and quartiles), the gain of packing, and the settings."""
    nets = {name: model(ATTENTION[name], shape, dtype) for name in attention}
    patch = next(iter(nets.values())).patch_size[0]
    grid = mixture(shape, patch)
    sizes = np.prod(grid, axis=1).tolist()
    pixels = np.random.default_rng(1).uniform(-1, 1, (shape.images, shape.max_tokens, patch**2, 3)).astype(np.float32)
    packing, images = fewest_rows(sizes, shape), (jnp.asarray(pixels), jnp.asarray(grid))
    places = jnp.asarray(place(sizes, packing))
    rows = {"padded": one_per_row(*images), "packed": pack(jax.random.key(0), *images, places, packing)}
    arms = {
        f"{name}, {work}, {kind}": call
        for (name, net), (kind, inputs) in itertools.product(nets.items(), rows.items())
        for work, call in functions(net, inputs, shape).items()
    }
    found = []
    seconds = interleaved(arms, rounds)
    for name, work in itertools.product(nets, ("forward", "training step")):
        rates = {kind: [shape.images / time for time in seconds[f"{name}, {work}, {kind}"]] for kind in rows}
        gains = [packed / padded for packed, padded in zip(rates["packed"], rates["padded"], strict=True)]
        quartiles = {kind: [round(x, 4) for x in quarters(values)] for kind, values in {**rates, "gain": gains}.items()}
        found.append({"attention": name, "work": work, **quartiles})
    used = {"tokens": sum(sizes), "padded": shape.images * shape.max_tokens, "packed": packing.rows * packing.tokens}
    settings = {**shape._asdict(), "rows": packing.rows, "tokens": used, "dtype": dtype, "rounds": rounds}
    return {"machine": device(), **settings, "results": found}


def quarters(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def table(result: dict[str, object]) -> str:
    """Return the Markdown table of a result of `measure`, with a line about its settings."""
    used, (variant, images, longest, row) = result["tokens"], (result[key] for key in Shape._fields)
    lines = [
        f"ViT-{variant}, {images} images of {used['tokens'] / images:.0f} tokens on average, {result['dtype']}, "
        f"{result['rounds']} rounds; padded: {images} rows of {longest} tokens, packed: {result['rows']} rows of {row} "
        f"tokens ({result['machine']}). Images per second, and their ratio: median and quartiles.",
        "",
        "| attention | work | padded | packed | packed ÷ padded |",
        "|---|---|---|---|---|",
    ]
    for found in result["results"]:
        cells = [
            f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
            for digits, (low, middle, high) in [(1, found["padded"]), (1, found["packed"]), (2, found["gain"])]
        ]
        lines.append(f"| {found['attention']} | {found['work']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="S/16")
    parser.add_argument("--images", type=int, default=64, help="number of images in a batch")
    parser.add_argument("--max-tokens", type=int, default=256, help="largest number of patches of an image")
    parser.add_argument("--row", type=int, default=1024, help="number of tokens of a packed row")
    parser.add_argument("--dtype", help="dtype of the computation (default: float32 on a CPU, else bfloat16)")
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="small sizes, which show that the script works")
    parser.add_argument("--docs", type=Path, help="folder of the documentation, to write the results to")
    args = parser.parse_args(argv)
    if args.row < args.max_tokens or min(args.images, args.max_tokens, args.rounds) < 1:
        parser.error("expected 1 or more images, tokens and rounds, and rows of at least --max-tokens")
    runtime.skip_absent_tpu()
    set_default("verify")
    shape = Shape(args.variant, args.images, args.max_tokens, args.row)
    if args.tiny:
        shape, args.rounds = Shape("mu/16", 6, 9, 24), 2
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    result = measure(shape, args.rounds, dtype, args.attention)
    print(table(result))
    if args.docs:
        out = args.docs / "native_aspect_ratio.json"
        results.write(result, table(result), out, out.with_suffix(".md"), (BEGIN, END))


if __name__ == "__main__":
    main()
