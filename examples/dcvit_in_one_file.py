"""A complete DCViT in one file: the model, data, augmentation, training and evaluation.

    python examples/dcvit_in_one_file.py                     handwritten digits, which scikit-learn contains
    python examples/dcvit_in_one_file.py --compose none      the same with plain attention, a ViT
    python examples/dcvit_in_one_file.py --folder photos     photos/CLASS/*.jpg, *.jpeg and *.png

Copy it and change it: it needs only jax, flax, optax, numpy, `dcvit.dcmha` and, for --folder, Pillow. The first command
takes 2 minutes of processor time and reaches 98.05 % of 359 test images, the second 97.77 % (seed 0): one image less.

Equations and symbols are those of Xiao et al., "Improving Transformers with Dynamically Composable Multi-Head
Attention" (ICML 2024). Letters in comments: B batch, T tokens, M width of the model, H heads, D width of a head, R rank
of the dynamic projections, C classes.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dcvit.dcmha import ComposeWeights, attention
from dcvit.dcmha.compose import gate_init, hidden_init, projection_init

RANK = 2  # R, as in the paper
COMPOSES = {"both": ("pre", "post"), "pre": ("pre",), "post": ("post",), "none": ()}
XAVIER = nn.initializers.xavier_uniform()


# The model
class DynamicWeights(nn.Module):
    """The weights with which one compose mixes the H scores (or weights) of each query-key pair, Eqn 5 and 6.

    Eqn 7 replaces the vector A_ij of H numbers of query i and key j by

        A_ij + A_ij·w_q1·w_q2 + A_ij ⊗ w_qg  +  A_ij·w_k1·w_k2 + A_ij ⊗ w_kg,

    where w_q… are computed from token i, and w_k… from token j: an H×H matrix for each pair, which is never built. The
    first term is the skip connection by which the paper replaces A_ij·W_b in practice (Section 3.1).
    """

    heads: int

    @nn.compact
    def __call__(self, x):  # B T M
        width, inner = x.shape[-1], 2 * RANK * self.heads
        weights = {}
        for side in ("q", "k"):
            w_1 = self.param(f"w_{side}1", hidden_init(width, inner), (width, inner))
            w_2 = self.param(f"w_{side}2", projection_init(RANK, self.heads), (inner, inner))
            w_g = self.param(f"w_{side}g", gate_init(width, self.heads), (width, self.heads))
            both = (nn.gelu(x @ w_1) @ w_2).reshape(*x.shape[:2], 2, RANK, self.heads)  # Eqn 5
            down, up = both[:, :, 0], both[:, :, 1]  # each B T R H
            down = down * jax.lax.rsqrt(jnp.mean(down**2, axis=-1, keepdims=True) + 1e-6)  # RMSNorm over heads
            weights |= {f"{side}1": down, f"{side}2": up, f"{side}g": jnp.tanh(x @ w_g)}  # gate: Eqn 6
        return ComposeWeights(**weights)


class DCMHA(nn.Module):
    """Dynamically Composable Multi-Head Attention, Eqn 4.

    Pre-compose mixes the scores of the heads before the softmax, post-compose their weights after it. Without both, it
    is multi-head attention.
    """

    heads: int
    composes: tuple[str, ...] = ("pre", "post")

    @nn.compact
    def __call__(self, x):  # B T M
        width = x.shape[-1]
        q, k, v = (
            nn.DenseGeneral((self.heads, width // self.heads), kernel_init=XAVIER, name=name)(x)  # B T H D
            for name in ("query", "key", "value")
        )
        composes = {name: DynamicWeights(self.heads, name=name)(x) for name in self.composes}
        # scores = compose(q·k / √D, pre); weights = compose(softmax(scores), post); out = weights·v
        out = attention(q, k, v, **composes)
        return nn.DenseGeneral(width, axis=(-2, -1), kernel_init=XAVIER, name="out")(out)


class Block(nn.Module):
    """Attention and an MLP, each with a LayerNorm before it and a residual connection around it."""

    heads: int
    composes: tuple[str, ...]

    @nn.compact
    def __call__(self, x):  # B T M
        x = x + DCMHA(self.heads, self.composes, name="attention")(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1], kernel_init=XAVIER)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], kernel_init=XAVIER)(hidden)


class DCViT(nn.Module):
    """A Vision Transformer with composed attention: patches, learned positions, blocks, mean of the tokens, head."""

    classes: int
    patch: int
    width: int = 64
    depth: int = 2
    heads: int = 4
    composes: tuple[str, ...] = ("pre", "post")

    @nn.compact
    def __call__(self, images):  # B height width channels, from -1 to 1
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="embedding")(images)
        x = x.reshape(len(x), -1, self.width)  # B T M
        init = nn.initializers.normal(self.width**-0.5)
        x = x + self.param("pos_embedding", init, (1, x.shape[1], self.width))
        for i in range(self.depth):
            x = Block(self.heads, self.composes, name=f"encoderblock_{i}")(x)
        x = nn.LayerNorm(name="encoder_norm")(x).mean(axis=1)  # global average pooling
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros, name="head")(x)


# Data: uint8 images (N height width channels) and int32 labels (N), in memory
def digits():
    """Return 1,797 handwritten digits of 8×8 pixels. The file is read, because importing scikit-learn takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        sys.exit("the digits are a file of scikit-learn: pip install scikit-learn, or use --folder")
    rows = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8)
    return images.reshape(-1, 8, 8, 1), rows[:, -1].astype(np.int32)


def image_folder(folder, size):
    """Return the central square of each image of folder/CLASS, resized to size×size; sorted classes are 0, 1, …"""
    from PIL import Image, ImageOps  # only folders of images need Pillow

    paths = sorted(path for path in Path(folder).glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    classes = sorted({path.parent.name for path in paths})
    if len(classes) < 2 or len(paths) < 5:
        sys.exit(f"{folder}: expected {folder}/CLASS/*.jpg; found {len(paths)} images of the classes {classes}")
    images = []
    for path in paths:
        try:
            image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")  # as the camera was held
        except OSError as error:
            sys.exit(f"{path}: {error}")
        images.append(np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)))
    return np.stack(images), np.array([classes.index(path.parent.name) for path in paths], np.int32)


def normalize(images):
    """Return uint8 images as float32 from -1 to 1."""
    return images.astype(jnp.float32) / 127.5 - 1


def augment(key, images, labels, flip):
    """Shift images by up to an eighth of their size, mirror half of them (`flip`), and mix pairs (mixup)."""
    count, size, _, channels = images.shape
    shift_key, flip_key, mix_key = jax.random.split(key, 3)
    margin = size // 8
    padded = jnp.pad(images, [(0, 0), (margin, margin), (margin, margin), (0, 0)], constant_values=-1)
    starts = jax.random.randint(shift_key, (count, 2), 0, 2 * margin + 1)
    crop = jax.vmap(lambda image, start: jax.lax.dynamic_slice(image, (*start, 0), (size, size, channels)))
    images = crop(padded, starts)
    if flip:
        mirrored = jax.random.bernoulli(flip_key, 0.5, (count, 1, 1, 1))
        images = jnp.where(mirrored, images[:, :, ::-1], images)
    part = jax.random.beta(mix_key, 0.2, 0.2)
    return part * images + (1 - part) * images[::-1], part * labels + (1 - part) * labels[::-1]


# Training and evaluation
def make_step(model, optimizer, flip):
    """Return the compiled function that trains on one batch."""

    @jax.jit
    def step(params, state, key, images, labels):
        targets = optax.smooth_labels(jax.nn.one_hot(labels, model.classes), 0.1)
        images, targets = augment(key, normalize(images), targets, flip)

        def loss_fn(params):
            return optax.softmax_cross_entropy(model.apply({"params": params}, images), targets).mean()

        loss, gradient = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def make_evaluation(model, batch=256):
    """Return the function that computes the accuracy on all images."""
    predict = jax.jit(lambda params, images: model.apply({"params": params}, normalize(images)).argmax(axis=-1))

    def accuracy(params, images, labels):
        pad = -len(images) % batch  # every batch has one shape, so that it is compiled once
        batches = np.pad(images, [(0, pad), (0, 0), (0, 0), (0, 0)]).reshape(-1, batch, *images.shape[1:])
        predicted = np.concatenate([predict(params, some) for some in batches])
        return float(np.mean(predicted[: len(labels)] == labels))

    return accuracy


def train(images, labels, *, patch, epochs, compose="both", flip=False, seed=0, batch=64):
    """Train on four fifths of the images, evaluate on the rest after each epoch, and return losses and accuracies."""
    order = np.random.default_rng(0).permutation(len(images))  # the split is the same for all seeds
    test, training = order[: len(order) // 5], order[len(order) // 5 :]
    batch = min(batch, len(training))
    steps = len(training) // batch
    model = DCViT(int(labels.max()) + 1, patch, composes=COMPOSES[compose])
    params = jax.jit(model.init)(jax.random.key(seed), normalize(images[:1]))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, epochs * steps // 20 + 1, epochs * steps + 1)
    decays = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)
    adamw = optax.adamw(schedule, weight_decay=0.05, mask=decays)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    state, step, accuracy = optimizer.init(params), make_step(model, optimizer, flip), make_evaluation(model)
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters, {len(training)} training images")
    rng, key, history, started = np.random.default_rng(seed), jax.random.key(seed + 1), [], time.perf_counter()
    for epoch in range(epochs):
        losses = []
        for i, chosen in enumerate(rng.permutation(training)[: steps * batch].reshape(steps, batch)):
            step_key = jax.random.fold_in(key, epoch * steps + i)
            params, state, loss = step(params, state, step_key, images[chosen], labels[chosen])
            losses.append(loss)
        history.append((float(np.mean(losses)), accuracy(params, images[test], labels[test])))
        seconds = time.perf_counter() - started
        print(f"epoch {epoch + 1:3}  loss {history[-1][0]:.3f}  test top-1 {history[-1][1]:.2%}  {seconds:.0f} s")
    return history


def main():
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train a DCViT.")
    parser.add_argument("--folder", help="folder with a folder of images for each class; default: handwritten digits")
    parser.add_argument("--size", type=int, default=64, help="size of the images of a folder, in pixels (64)")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--compose", choices=COMPOSES, default="both", help="what is composed; none: a plain ViT")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.size < 8 or args.size % 8 or args.epochs < 1:
        parser.error("--size should be a multiple of 8, and --epochs at least 1")
    images, labels = image_folder(args.folder, args.size) if args.folder else digits()
    patch = args.size // 8 if args.folder else 2  # 64 tokens, or 16 for digits
    flip = bool(args.folder)  # a mirrored digit is not a digit
    train(images, labels, patch=patch, epochs=args.epochs, compose=args.compose, flip=flip, seed=args.seed)


if __name__ == "__main__":
    main()
