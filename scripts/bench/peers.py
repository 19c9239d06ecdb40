"""Benchmark against other libraries: equal work and sizes, float32, one thread, interleaved, in CPU seconds.

    python scripts/bench/peers.py                                all rows; prints a table in Markdown
    python scripts/bench/peers.py --rows vit_step decode_1 --rounds 9 --json peers.json

The extra `interop` installs the other libraries. They write models with random weights, which `dcvit.load` reads, and
losses, probabilities, tokens and arrays of both sides must agree before they are timed. A round calls both sides twice
and takes the user and system time of the second call. The process stays on one CPU, which should be idle otherwise.

`pip install timm` brings no validate.py: `evaluate` compares with a loop over timm's transforms and model.
"""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import input as bench_input
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import train as bench_train
from PIL import Image

import dcvit
import input_pipeline as ip
from dcvit import cli
from dcvit.config.values import replaced
from dcvit.errors import ConfigError
from dcvit.hub.open import open_model
from dcvit.inference import generation
from dcvit.inference.sampling import Sampling
from dcvit.runs import restoring
from dcvit.runs.checkpointer import Checkpointer
from dcvit.training.evaluation import open_evaluators
from dcvit.training.timing import device, interleaved

try:
    import timm
    import torch
    import torchvision
    import transformers
except (ImportError, RuntimeError) as e:  # builds of PyTorch and torchvision may not fit each other
    sys.exit(f'error: {e}: pip install "dcvit[interop]"')

Call: TypeAlias = Callable[[], object]  # does the work and returns its result
Pair: TypeAlias = tuple[Call, Call]  # ours, and the other
Net: TypeAlias = Any  # a module of PyTorch or flax


class Sizes(NamedTuple):
    """Sizes of the models, whose heads are 64 wide, and of their data."""

    side: int = 224  # of images
    width: int = 384
    depth: int = 12
    batch: int = 8
    photos: int = 32
    lm_width: int = 512
    vocab: int = 32_000
    length: int = 512  # of rows of text
    new: int = 64  # tokens


def check(what: str, ours: object, theirs: object, tolerance: float) -> None:
    """Raise ConfigError if two results differ by more than a tolerance, relative to the largest number of an array."""
    sides = ([np.asarray(x, np.float64) for x in jax.tree.leaves(side)] for side in (ours, theirs))
    found = max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in zip(*sides, strict=True))
    if not found <= tolerance:
        raise ConfigError(f"{what}: the results differ by {found:.2g} of the largest number, at most {tolerance}")


def timm_vit(sizes: Sizes, folder: Path, classes: int = 1000) -> Net:
    """Return timm's ViT with random weights, and write it to a folder."""
    fields = {"img_size": sizes.side, "embed_dim": sizes.width, "depth": sizes.depth, "num_heads": sizes.width // 64}
    net = timm.create_model("vit_small_patch16_224", num_classes=classes, **fields).eval()
    timm.models.save_for_hf(net, folder, safe_serialization=True)
    return net


def llama(sizes: Sizes, folder: Path) -> Net:
    """Return LLaMA of transformers with two layers and random weights, and write it to a folder."""
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.lm_width, intermediate_size=sizes.lm_width * 11 // 4,
        num_hidden_layers=2, num_attention_heads=sizes.lm_width // 64, max_position_embeddings=2048,
        initializer_range=0.05, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).eval()
    net.save_pretrained(folder)
    return net


def write_photos(folder: Path, count: int) -> list[Path]:
    """Write JPEGs of 500×375 pixels into folders of four classes, and return their paths."""
    paths = [folder / f"class{i % 4}" / f"{i}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bench_input.photo(i))
    return paths


def our_step(net: Net, params: Any, inputs: np.ndarray, targets: np.ndarray) -> Call:
    """Return a training step of a model of ours, from parameters or, for None, from its initial ones."""
    given = jnp.asarray(inputs), jnp.asarray(targets, jnp.int32)
    initial, update = bench_train.lowered(net, *given)
    start = (lambda _: [params, optax.adam(1e-3).init(params)]) if params else initial.compile()
    return bench_train.stepper(start, update.compile(), *given)


def their_step(net: Net, apply: Callable[[torch.Tensor], torch.Tensor], batch: tuple[np.ndarray, np.ndarray]) -> Call:
    """Return a training step of a model of PyTorch, of which `apply` returns the logits; it returns the loss."""
    optimizer = torch.optim.Adam(net.train().parameters(), 1e-3, fused=True)
    inputs, targets = map(torch.from_numpy, batch)

    def step() -> object:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(apply(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    step()  # as `bench_train.stepper`
    return step


def train_step(sizes: Sizes, folder: Path, text: bool, composed: bool = False) -> Pair:
    """Return training steps of a ViT with a third of the layers, or of a language model; if composed, both ours."""
    rng = np.random.default_rng(0)
    if text:
        net, tokens = llama(sizes, folder), rng.integers(0, sizes.vocab, (2, sizes.length + 1))
        batch = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    else:
        net = timm_vit(sizes._replace(depth=sizes.depth // 3), folder)
        images = rng.uniform(-1, 1, (sizes.batch, sizes.side, sizes.side, 3)).astype(np.float32)
        batch = images, rng.integers(0, 1000, sizes.batch)
    ours = dcvit.load(folder)
    if composed:
        return our_step(ours.module.clone(compose="both"), None, *batch), our_step(ours.module, None, *batch)
    apply = (lambda x: net(x, use_cache=False).logits) if text else (lambda x: net(x.permute(0, 3, 1, 2).contiguous()))
    return our_step(ours.module, ours.params, *batch), their_step(net, apply, batch)


def predict(sizes: Sizes, folder: Path, library: str) -> Pair:
    """Return predictions of an image file by a ViT: the probabilities of the five best classes."""
    (photo,) = write_photos(folder / "photos", 1)
    if library == "timm":
        net = timm_vit(sizes, folder / "model")
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net, {"img_size": sizes.side}))
    else:
        config = transformers.ViTConfig(
            hidden_size=sizes.width, num_hidden_layers=sizes.depth, num_attention_heads=sizes.width // 64,
            intermediate_size=4 * sizes.width, image_size=sizes.side, num_labels=1000,
        )  # fmt: skip
        net = transformers.ViTForImageClassification(config).eval()
        processor = transformers.ViTImageProcessor(size={"height": sizes.side, "width": sizes.side})
        net.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
    model = dcvit.load(folder / "model")
    same = np.random.default_rng(0).uniform(-1, 1, (1, sizes.side, sizes.side, 3)).astype(np.float32)
    with torch.inference_mode():
        found = net(torch.from_numpy(same.transpose(0, 3, 1, 2)))
    check("logits of equal pixels", model.features(same, "logits"), getattr(found, "logits", found), 1e-4)

    def theirs() -> object:
        image = Image.open(photo).convert("RGB")
        with torch.inference_mode():
            if library == "timm":
                logits = net(transform(image)[None])
            else:
                logits = net(**processor(image, return_tensors="pt")).logits
            return logits.softmax(-1).topk(5).values[0]

    return lambda: np.array([found.probability for found in model.predict(photo)[0]]), theirs


def decode(sizes: Sizes, folder: Path, batch: int) -> Pair:
    """Return greedy continuations of prompts: the new tokens."""
    net, model = llama(sizes, folder), dcvit.load(folder)
    prompts = np.random.default_rng(0).integers(0, sizes.vocab, (batch, 16))
    tokens, options = torch.from_numpy(prompts), generation.Options(sizes.new, Sampling(temperature=0))

    def ours() -> object:
        return np.transpose([*generation.generate(model.module, model.params, prompts.tolist(), options)])

    def theirs() -> object:
        mask = torch.ones_like(tokens)
        return net.generate(tokens, attention_mask=mask, max_new_tokens=sizes.new, do_sample=False)[:, 16:]

    return ours, theirs


def attend(sizes: Sizes, _: Path, length: int, composed: bool = False) -> Pair:
    """Return attention, forward and backward: plain and that of JAX, or composed and plain."""
    import dcmha as bench_dcmha  # starts the backend

    shape = bench_dcmha.Shape(1, length, sizes.lm_width // 64, 64, causal=True)
    best, library = (bench_dcmha.functions(shape)[row][1] for row in ("grouped, best", "plain, jax.nn"))
    sides = [("DC", best), ("plain", best)] if composed else [("plain", best), ("plain", library)]
    ours, theirs = (bench_dcmha.compiled(f, bench_dcmha.arguments(shape, kind), True)[0] for kind, f in sides)
    return ours, theirs


def augment(sizes: Sizes, folder: Path) -> Pair:
    """Return the reading of image files for training: decoded, cropped, flipped and changed by RandAugment."""
    paths, t = write_photos(folder, sizes.photos), torchvision.transforms
    crop = t.RandomResizedCrop(sizes.side, (0.05, 1))
    transform = t.Compose([crop, t.RandomHorizontalFlip(), t.RandAugment(2, 10), t.PILToTensor()])
    preprocess = ip.Preprocess(f"decode_jpeg_and_inception_crop({sizes.side})|flip_lr|randaug(2, 10)")

    rng = np.random.default_rng(0)
    return (
        lambda: [preprocess({"image": path.read_bytes()}, rng)["image"] for path in paths],
        lambda: [transform(Image.open(path).convert("RGB")) for path in paths],
    )


def evaluate(sizes: Sizes, folder: Path) -> Pair:
    """Return evaluations of a ViT on a folder of image files: the loss, beside which ours has accuracies."""
    net = timm_vit(sizes, folder / "model", classes=4)
    write_photos(folder / "data", sizes.photos)
    model = open_model(folder / "model")
    data = {"kind": "folder", "data_dir": str(folder / "data"), "split": None}
    pp = f'{model.preprocessing}|onehot(4)|keep("image", "labels")'
    val = {"type": "classification", "data": data, "pp": pp, "batch_size": sizes.batch}
    model = dataclasses.replace(model, config=replaced(model.config, evals={"val": val}))
    evaluator = open_evaluators(model).evaluators["val"]
    params = model.load_params(evaluator.data.mesh)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net, {"img_size": sizes.side}))
    photos = torchvision.datasets.ImageFolder(folder / "data", transform)

    def theirs() -> object:
        loss = 0.0
        with torch.inference_mode():
            for images, labels in torch.utils.data.DataLoader(photos, sizes.batch):
                loss += float(torch.nn.functional.cross_entropy(net(images), labels, reduction="sum"))
        return loss / len(photos)

    return lambda: evaluator.run(params)["loss"], theirs


def save_and_load(sizes: Sizes, folder: Path, library: str) -> Pair:
    """Return the saving and loading of random numbers in the form of the state of a ViT with Adam."""
    timm_vit(sizes, folder / "model")
    params, rng = dcvit.load(folder / "model").params, np.random.default_rng(0)
    random = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params) for _ in range(3)]
    state = {"params": random[0], "rest": {"mu": random[1], "nu": random[2]}}
    tensors, place = jax.tree.map(lambda x: torch.from_numpy(np.array(x)), state), folder / "saved"

    def ours() -> object:
        shutil.rmtree(place, ignore_errors=True)
        saver = Checkpointer(place)
        saver.save(1, state, {})
        saver.close()
        return restoring.restore(place / "checkpoints" / str(restoring.latest(place)), state)

    def orbax() -> object:
        with ocp.StandardCheckpointer() as saver:
            saver.save(place, state, force=True)
            saver.wait_until_finished()
            return saver.restore(place, state)

    def pytorch() -> object:
        torch.save(tensors, folder / "state.pt")
        return torch.load(folder / "state.pt")

    return ours, orbax if library == "orbax" else pytorch


class Row(NamedTuple):
    """A comparison: the work, the other library, the pair of calls, and the largest difference of their results."""

    what: str
    against: str
    build: Callable[..., Pair]  # of the sizes, a folder and the options
    options: tuple[object, ...] = ()
    tolerance: float | None = 1e-2  # None for results that are random, or of different models


VIT, LM = "ViT-S/16 with 4 layers, 8 images", "LLaMA-like, 2 layers of width 512"
JPEGS = "32 JPEGs of 500×375 decoded, cropped, flipped, RandAugment"
STATE = "265 MB of ViT-S/16 and Adam saved with SHA-256, verified, loaded"
PIXELS = 0.2  # decoders and resizing round differently, which the photos, noise, show most
LENGTHS = (256, 512, 1024, 2048, 4096)
ROWS = {
    "vit_step": Row(f"training step, {VIT}", "timm", train_step, (False,)),
    "lm_step": Row(f"training step, {LM}, 2 × 512 tokens", "transformers", train_step, (True,)),
    "predict_timm": Row("prediction of a JPEG, ViT-S/16", "timm", predict, ("timm",), PIXELS),
    "predict_transformers": Row("prediction of a JPEG, ViT-S/16", "transformers", predict, ("transformers",), PIXELS),
    "decode_1": Row(f"64 tokens after one prompt, {LM}", "transformers", decode, (1,), 0),
    "decode_8": Row(f"64 tokens after each of 8 prompts, {LM}", "transformers", decode, (8,), 0),
    "evaluate": Row("evaluation of ViT-S/16 on 32 JPEGs", "loop with timm", evaluate, (), PIXELS),
    "input": Row(JPEGS, "torchvision", augment, (), None),
    "checkpoint_orbax": Row(STATE, "Orbax, no checksums", save_and_load, ("orbax",), 0),
    "checkpoint_torch": Row(STATE, "PyTorch, no checksums", save_and_load, ("torch",), 0),
    **{f"attention_{n}": Row(f"attention, {n:,} tokens", "`jax.nn`", attend, (n,)) for n in LENGTHS},
    **{f"dc_{n}": Row(f"DC attention, {n:,} tokens", "ours, plain", attend, (n, True), None) for n in LENGTHS},
    "dc_vit_step": Row(f"training step, DC {VIT}", "ours, plain", train_step, (False, True), None),
    "dc_lm_step": Row(f"training step, DC, {LM}", "ours, plain", train_step, (True, True), None),
}


def measure(name: str, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """Check that both sides of a row agree, print its line, and return the CPU seconds of all rounds, and ratios."""
    row = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = row.build(sizes, Path(folder), *row.options)
        if row.tolerance is not None:
            check(name, ours(), theirs(), row.tolerance)
        seconds = interleaved({"ours": ours, "theirs": theirs}, rounds, time.process_time)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    times = " | ".join(spread([1e3 * x for x in each], 1) for each in seconds.values())
    print(f"| {row.what} | {row.against} | {times} | {spread(ratios, 2)} |", flush=True)
    return {"row": name, "what": row.what, "against": row.against, **seconds, "ratios": ratios}


def spread(values: Sequence[float], digits: int) -> str:
    """Return the text "median (lowest–highest)" of values."""
    middle, low, high = (f"{f(values):,.{digits}f}" for f in (statistics.median, min, max))
    return f"{middle} ({low}–{high})"


def main(argv: Sequence[str] | None = None, sizes: Sizes = Sizes()) -> int:  # noqa: B008
    """Measure the rows and print their table."""
    parser = cli.Parser("scripts/bench/peers.py", description="Compare CPU time with that of other libraries.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="rows to measure, by default all")
    parser.add_argument("--rounds", type=cli.at_least(1), default=5, help="timed calls of each side")
    parser.add_argument("--json", type=cli.path, help="JSON file for the results")
    args, _ = parser.parse(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before the backend starts its threads
    torch.set_num_threads(1)
    dcvit.quiet()
    transformers.utils.logging.disable_progress_bar()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "timm", "transformers")]
    machine = ", ".join([bench_input.cpu(), device(), *versions])
    print(f"{machine}; one thread, float32, CPU time, medians of {args.rounds} rounds (lowest–highest)\n")
    print("| what | against | ours, ms | theirs, ms | ours ÷ theirs |\n|---|---|---|---|---|")
    rows = []
    for name in args.rows:
        rows.append(measure(name, args.rounds, sizes))
        jax.clear_caches()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
