"""The KV cache as a ring buffer of slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.dcmha import ComposeWeights, kv_cache

SLOTS = 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "steps", "batch"),
    [(jnp.float32, 1, 3), (jnp.bfloat16, 3, 3)],
)
def test_each_slot_keeps_its_newest_token_and_padding_changes_nothing(dtype, steps, batch):
    """Compare with a loop over tokens; examples start at different positions, and one adds no token."""
    rng = np.random.default_rng(0)

    def tokens(count):
        factor, gate = rng.normal(size=(batch, count, 2, 4)), rng.normal(size=(batch, count, 4))
        weights = ComposeWeights(k1=jnp.asarray(factor, dtype), kg=jnp.asarray(gate, dtype))
        return kv_cache.Cache(*(jnp.asarray(x, dtype) for x in rng.normal(size=(2, batch, count, 8))), weights)

    cache, new = tokens(SLOTS), tokens(steps)
    before, count = np.array([9, 3, 0])[:batch], np.array([steps, 0, 1])[:batch]
    expected = jax.tree.map(np.array, cache)
    for old, more in zip(jax.tree.leaves(expected), jax.tree.leaves(new), strict=True):
        for example in range(batch):
            for step in range(count[example]):
                old[example, (before[example] + step) % SLOTS] = more[example, step]
    found = jax.jit(kv_cache.extend)(cache, new, before, count)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2])
def test_the_newest_token_attends_to_the_slots_of_its_window(window):
    length, first = np.array([3, 12]), np.array([1, 0])
    positions = np.asarray(kv_cache.positions(SLOTS, jnp.asarray(length)))
    np.testing.assert_array_equal(positions, [[0, 1, 2, -2, -1], [10, 11, 7, 8, 9]])
    visible = kv_cache.visible(SLOTS, jnp.asarray(length), window=window, first=jnp.asarray(first))
    oldest = np.maximum(first, 0 if window is None else length - window)
    np.testing.assert_array_equal(visible[:, 0, 0], positions >= oldest[:, None])
