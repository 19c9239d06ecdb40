"""A complete DCFormer++ in one file: the language model, data, training, evaluation and sampling.

    python examples/dcformer_in_one_file.py                      the source code of Python's standard library
    python examples/dcformer_in_one_file.py --compose none       the same with plain attention, a Transformer++
    python examples/dcformer_in_one_file.py --text book.txt      your own text

Copy it and change it: it needs only jax, flax, optax, numpy and `dcvit.dcmha`. Tokens are bytes. Model and recipe are
those of configs/lm_stdlib.py. 600 steps reached 2.18 bits per byte on modules held out (seed 0), in a few minutes on
two CPU cores.

Equations and symbols are those of Xiao et al., "Improving Transformers with Dynamically Composable Multi-Head
Attention" (ICML 2024). Letters in comments: B batch, T tokens, M width of the model, H heads, D width of a head, R rank
of the dynamic projections, F width of the MLP, V vocabulary.
"""

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dcvit.dcmha import ComposeWeights, attention
from dcvit.dcmha.compose import gate_init, hidden_init, projection_init

VOCABULARY = 256  # bytes; 0 separates files
RANK = 2  # R, as in the paper
COMPOSES = {"both": ("pre", "post"), "pre": ("pre",), "post": ("post",), "none": ()}
INIT = nn.initializers.normal(0.02)


# The model
def rotate(x):
    """Apply the rotary position embedding to x (B T H D): rotate pairs of numbers by angles that grow with T."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angles), x.dtype)[None, :, None] for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


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
    """Causal Dynamically Composable Multi-Head Attention, Eqn 4, with rotary positions and QK-norm.

    Pre-compose mixes the scores of the heads before the softmax, post-compose their weights after it. Without both, it
    is multi-head attention. With a `window`, a token attends to that many tokens, itself included.
    """

    heads: int
    window: int | None = None
    composes: tuple[str, ...] = ("pre", "post")

    @nn.compact
    def __call__(self, x):  # B T M
        width = x.shape[-1]
        q, k, v = (
            nn.DenseGeneral((self.heads, width // self.heads), use_bias=False, kernel_init=INIT, name=name)(x)
            for name in ("query", "key", "value")
        )  # each B T H D
        q, k = rotate(nn.RMSNorm(name="query_norm")(q)), rotate(nn.RMSNorm(name="key_norm")(k))
        composes = {name: DynamicWeights(self.heads, name=name)(x) for name in self.composes}
        # scores = compose(q·k / √D, pre); weights = compose(softmax(scores), post); out = weights·v
        out = attention(q, k, v, **composes, causal=True, window=self.window)
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, kernel_init=INIT, name="out")(out)


class Block(nn.Module):
    """Attention and a gated MLP (SwiGLU), each with an RMSNorm before it and a residual connection around it."""

    heads: int
    hidden: int  # F
    window: int | None
    composes: tuple[str, ...]

    @nn.compact
    def __call__(self, x):  # B T M
        attend = DCMHA(self.heads, self.window, self.composes, name="attention")
        x = x + attend(nn.RMSNorm(name="attention_norm")(x))
        y = nn.RMSNorm(name="mlp_norm")(x)
        up, gate = (nn.Dense(self.hidden, use_bias=False, kernel_init=INIT, name=name)(y) for name in ("in", "gate"))
        return x + nn.Dense(x.shape[-1], use_bias=False, kernel_init=INIT, name="out")(nn.silu(up) * gate)


class DCFormer(nn.Module):
    """A decoder-only language model with composed attention: DCFormer++, LLaMA's architecture with DCMHA.

    Every other layer, the first included, attends to a `window` only (Section 4); None: all layers are global.
    """

    width: int = 128
    depth: int = 4
    heads: int = 8
    hidden: int = 344
    window: int | None = None
    composes: tuple[str, ...] = ("pre", "post")

    @nn.compact
    def __call__(self, tokens):  # B T
        x = nn.Embed(VOCABULARY, self.width, embedding_init=INIT, name="embedding")(tokens)  # B T M
        for i in range(self.depth):
            window = self.window if i % 2 == 0 else None
            x = Block(self.heads, self.hidden, window, self.composes, name=f"decoderblock_{i}")(x)
        x = nn.RMSNorm(name="decoder_norm")(x)
        return nn.Dense(VOCABULARY, use_bias=False, kernel_init=INIT, name="head")(x)  # logits of the next byte: B T V


# Data
def read_text(path=None):
    """Return the bytes of a file or, without one, of the modules of Python's standard library, every twentieth last."""
    try:
        library = Path(sysconfig.get_path("stdlib"))
        modules = [p for p in sorted(library.rglob("*.py")) if wanted(p.relative_to(library))]
        modules = [p for i, p in enumerate(modules) if i % 20] + modules[::20]  # the end is held out
        files = [Path(path)] if path else modules
        return np.frombuffer(b"\0".join(file.read_bytes() for file in files), np.uint8)
    except OSError as error:
        sys.exit(str(error))


def wanted(path):
    """Return True for the library's own modules: no tests and no installed packages."""
    return not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & {*path.parts}


def rows(text, starts, context):
    """Return rows of context + 1 bytes, of which the first `context` are inputs and the last `context` targets."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


# Training, evaluation and sampling
def cross_entropy(model, params, batch):
    """Return the mean negative log-likelihood of the rows' targets, in nats."""
    logits = model.apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def make_step(model, optimizer):
    """Return the compiled function that trains on one batch of rows."""

    @jax.jit
    def step(params, state, batch):
        loss, gradient = jax.value_and_grad(lambda params: cross_entropy(model, params, batch))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(model, text, *, steps, context=128, batch=16, seed=0):
    """Train on the text without its last twentieth, evaluate on that, and return parameters and losses."""
    split = len(text) - len(text) // 20
    training, held_out = text[:split], text[split:]
    if len(held_out) <= context:
        sys.exit(f"the text has {len(text)} bytes: expected more than {20 * (context + 1)}")
    test_rows = rows(held_out, np.arange(0, len(held_out) - context, context)[:512], context)
    params = jax.jit(model.init)(jax.random.key(seed), test_rows[:1, :-1])["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 20 + 1, steps + 1, end_value=3e-4)
    decays = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decays)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    state, step = optimizer.init(params), make_step(model, optimizer)
    evaluate = jax.jit(lambda params, batch: cross_entropy(model, params, batch))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters, {len(training):,} training bytes")
    rng, losses, started = np.random.default_rng(seed), [], time.perf_counter()
    for i in range(1, steps + 1):
        starts = rng.integers(0, len(training) - context, batch)
        params, state, loss = step(params, state, rows(training, starts, context))
        losses.append(float(loss))
        if i % max(1, steps // 6) == 0:
            parts = [evaluate(params, part) for part in np.array_split(test_rows, -(-len(test_rows) // 64))]
            bits = np.mean(parts) / math.log(2)
            seconds = time.perf_counter() - started
            print(f"step {i:5}  loss {losses[-1]:.3f}  held-out bits per byte {bits:.3f}  {seconds:.0f} s")
    return params, losses


def sample(model, params, prompt, *, count, context=128, temperature=0.8, seed=0):
    """Return `prompt` continued by `count` bytes. Each byte costs a whole pass; `dcvit generate` has a KV cache."""

    @jax.jit
    def next_byte(window, last, key):
        logits = model.apply({"params": params}, window[None])[0, last]
        return jax.random.categorical(key, logits / temperature)

    text = list(prompt.encode())
    for i in range(count):
        recent = text[-context:]
        window = np.pad(np.array(recent, np.int32), (0, context - len(recent)))  # causal: padding is not seen
        text.append(int(next_byte(window, len(recent) - 1, jax.random.fold_in(jax.random.key(seed), i))))
    return bytes(text).decode(errors="replace")


def main():
    """Parse the command line, train and sample."""
    parser = argparse.ArgumentParser(description="Train a DCFormer++.")
    parser.add_argument("--text", help="file of text; default: the source code of Python's standard library")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--compose", choices=COMPOSES, default="both", help="what is composed; none: a Transformer++")
    parser.add_argument("--window", type=int, help="tokens that every other layer attends to; default: all")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 1 or not args.prompt or (args.window is not None and args.window < 1):
        parser.error("--steps and --window should be at least 1, and --prompt not empty")
    model = DCFormer(window=args.window, composes=COMPOSES[args.compose])
    params, _ = train(model, read_text(args.text), steps=args.steps, seed=args.seed)
    print(sample(model, params, args.prompt, count=300, seed=args.seed))


if __name__ == "__main__":
    main()
