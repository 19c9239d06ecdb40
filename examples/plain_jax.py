"""DCMHA on arrays, without flax: compose weights from an input, attention, and a gradient.

    python examples/plain_jax.py

`dcvit.dcmha` needs only jax and numpy. Shapes use the letters of the paper: B batch, T tokens, M model width, H heads,
D head width, R rank, I = 2·R·H.
"""

import jax
import jax.numpy as jnp

from dcvit.dcmha import ComposeWeights, attention, dynamic_weights
from dcvit.dcmha.compose import gate_init, hidden_init, projection_init

WIDTH, HEADS, RANK = 32, 4, 2


def init_compose(key):
    """Parameters of one compose: dynamic projections (Eqn 5) and gates (Eqn 6), by queries and by keys."""
    inner = 2 * RANK * HEADS
    shapes = {
        "1": (hidden_init(WIDTH, inner), (WIDTH, 1, inner)),  # M G I, with G = 1 group of heads
        "2": (projection_init(RANK, HEADS), (1, inner, inner)),  # G I I
        "g": (gate_init(WIDTH, HEADS), (WIDTH, HEADS)),
    }
    keys = iter(jax.random.split(key, 6))
    return {f"{side}{name}": init(next(keys), shape) for side in "qk" for name, (init, shape) in shapes.items()}


def init(key):
    """Parameters of a whole attention layer."""
    keys = jax.random.split(key, 6)
    kernel = jax.nn.initializers.xavier_uniform()
    params = {name: kernel(k, (WIDTH, WIDTH)) for name, k in zip("qkvo", keys[:4], strict=True)}
    return params | {"pre": init_compose(keys[4]), "post": init_compose(keys[5])}


def layer(params, x):
    """Causal self-attention of x (B T M), with scores and weights composed across heads."""
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")  # each B T H D
    weights = dynamic_weights(x, {name: params[name] for name in ("pre", "post")}, heads=HEADS)  # of every token
    pre, post = (ComposeWeights(**weights[name]) for name in ("pre", "post"))
    out = attention(q, k, v, pre, post, causal=True)
    return out.reshape(x.shape) @ params["o"]


def main():
    """The layer's output, and the gradient of its parameters."""
    x = jax.random.normal(jax.random.key(0), (2, 16, WIDTH))
    params = jax.jit(init)(jax.random.key(1))

    def loss_fn(params):
        out = layer(params, x)
        return jnp.mean(out**2), out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    return out, gradient


if __name__ == "__main__":
    out, gradient = main()
    print("output", out.shape)
    print("gradient norm of pre w_q1:", float(jnp.linalg.norm(gradient["pre"]["q1"])))
