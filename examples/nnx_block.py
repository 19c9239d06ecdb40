"""A transformer block with DCMHA in flax NNX, trained for a few steps on a toy task.

    python examples/nnx_block.py

The task is that of `linen_block.py`: reproduce, at each position, the input of the first position.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dcvit.models.dcmha_nnx import DCMHA


class Block(nnx.Module):
    """Pre-norm transformer block whose attention heads compose dynamically."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        # DCMHA has the interface of nnx.MultiHeadAttention; compose=None is that layer.
        self.attention = DCMHA(heads, width, causal=True, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):  # x: B T M
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


def main(steps: int = 20) -> list[float]:
    """Train the block and return the loss of each step."""
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    target = jnp.broadcast_to(x[:, :1], x.shape)
    # jit compiles the initialization as one program.
    block = nnx.jit(lambda: Block(width=32, heads=4, rngs=nnx.Rngs(1)))()
    optimizer = nnx.Optimizer(block, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(block, optimizer):
        loss, grads = nnx.value_and_grad(lambda block: jnp.mean((block(x) - target) ** 2))(block)
        optimizer.update(block, grads)
        return loss

    return [float(step(block, optimizer)) for _ in range(steps)]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} after 1 step, {losses[-1]:.3f} after {len(losses)} steps")
