"""The TPU kernels state how often their conditions hold, as the mask of attention says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import call_of
from jax.experimental import pallas as pl
from marks import exhaustive

from dcvit.dcmha import ComposeWeights
from dcvit.dcmha.backends.tpu import api
from dcvit.dcmha.inputs import Inputs, Options

BLOCK_Q, BLOCK_K = 256, 128


def stated(monkeypatch, **options):
    """The metadata of each kernel of a gradient by name, as numbers; heads and batch have no influence."""
    found, call = {}, pl.pallas_call

    def record(kernel, *, name, metadata=None, **others):
        if metadata is not None:
            found.setdefault(name, []).append({key: [int(n) for n in text.split()] for key, text in metadata.items()})
        return call(kernel, name=name, metadata=metadata, **others)

    monkeypatch.setattr(pl, "pallas_call", record)
    jax.clear_caches()  # a kernel that was traced before would not be recorded
    q = jax.ShapeDtypeStruct((1, options.pop("queries"), 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, options.pop("keys"), 2, 64), jnp.bfloat16)
    post = ComposeWeights(qg=jax.ShapeDtypeStruct(q.shape[:3], jnp.bfloat16)) if options.pop("composed", True) else None

    def gradient(post, q, k, v, do):
        def attend(*x):
            return api.run(call_of(Inputs(*x, None, post), Options(**options)), interpret=False)

        return jax.vjp(attend, q, k, v)[1](do)

    jax.eval_shape(gradient, post, q, k, k, q)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window"),
    [(700, 700, True, 100), exhaustive(512, 640, False, None)],
)
def test_the_kernels_state_the_tiles_that_a_query_attends_to(monkeypatch, queries, keys, causal, window):
    distance = np.arange(queries)[:, None] - np.arange(keys)
    attended = np.ones((queries, keys), bool)
    if causal:
        attended = (distance >= 0) & (distance < (window or keys))
    blocks = np.array(
        [
            [attended[i : i + BLOCK_Q, j : j + BLOCK_K].any() for j in range(0, keys, BLOCK_K)]
            for i in range(0, queries, BLOCK_Q)
        ]
    )
    tiles, (blocks_q, blocks_k), longest = int(blocks.sum()), blocks.shape, int(blocks.sum(axis=1).max())
    found = stated(monkeypatch, queries=queries, keys=keys, causal=causal, window=window)
    assert found == {
        "dcmha_forward": [
            {"steps": [2 * blocks_q * longest], "conditions": [blocks_q, tiles, blocks_q, tiles, blocks_q]}
        ],
        "dcmha_delta": [{"steps": [blocks_q * longest], "conditions": [blocks_q, tiles, blocks_q]}],
        "dcmha_gradients": [
            {"steps": [blocks_q * blocks_k], "conditions": [blocks_k, blocks_q, tiles, blocks_k, blocks_q]}
        ],
    }


def test_delta_needs_a_kernel_only_after_a_compose_of_the_weights(monkeypatch):
    found = stated(monkeypatch, queries=512, keys=512, causal=True, window=None, composed=False)
    assert {*found} == {"dcmha_forward", "dcmha_gradients"}
