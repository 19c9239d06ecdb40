"""A transformer block with DCMHA in flax linen, trained for a few steps on a toy task.

    python examples/linen_block.py

The task: reproduce, at each position, the input of the first position. Only attention can copy between positions.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from dcvit.models.dcmha import DCMHA


class Block(nn.Module):
    """Pre-norm transformer block whose attention heads compose dynamically."""

    heads: int = 4

    @nn.compact
    def __call__(self, x):  # x: B T M
        # DCMHA has the fields and the call of nn.MultiHeadDotProductAttention; compose=None is that layer.
        x = x + DCMHA(self.heads, causal=True)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


def main(steps: int = 20) -> list[float]:
    """Train the block and return the loss of each step."""
    block = Block()
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    target = jnp.broadcast_to(x[:, :1], x.shape)
    params = jax.jit(block.init)(jax.random.key(1), x)["params"]
    # The compose weights are below the attention module: params["DCMHA_0"]["pre"]["w_q1"] and so on.
    optimizer = optax.sgd(0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return jnp.mean((block.apply({"params": params}, x) - target) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} after 1 step, {losses[-1]:.3f} after {len(losses)} steps")
