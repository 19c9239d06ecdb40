"""Decoding with a cache gives what the whole sequence gives, for every model the language model can be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.dcmha import ComposeWeights
from dcvit.dcmha import kv_cache as decode_cache
from dcvit.models import lm
from dcvit.models.attention import Attention, CacheUpdate

VOCAB, WINDOW, CONTEXT = 7, 4, 18
PROMPTS = (1, 3, 9, 6)  # lengths: one token, less than a window, several windows
STEPS = CONTEXT - max(PROMPTS)
TINY = {"context": CONTEXT, "width": 16, "mlp_dim": 16, "num_heads": 4, "depth": 2, "window": WINDOW}
GPT3 = {"position": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "use_bias": True}
LLAMA = {"position": "rotary", "norm": "rmsnorm", "mlp": "swiglu"}
PYTHIA = {"rotary_fraction": 0.5, "norm": "layernorm", "mlp": "gelu", "use_bias": True, "parallel": True}
DC = {"compose": "both", "window_pattern": "1:1"}
MODELS = {
    "Transformer": GPT3 | {"window_pattern": "1:1"},
    "DCFormer": GPT3 | DC,
    "Transformer++": LLAMA,
    "DCFormer++": LLAMA | DC | {"qk_norm": "rmsnorm"},
    "DCPythia": PYTHIA | DC | {"qk_norm": "rmsnorm"},
    "pre": LLAMA | DC | {"compose": "pre"},
    "post, no window": LLAMA | {"compose": "post"},
    "query-wise": LLAMA | DC | {"branches": "q"},
    "key-wise": LLAMA | DC | {"branches": "k", "rank": 1},
    "gates": LLAMA | DC | {"projection": False},
    "projections, rank 4": LLAMA | DC | {"gate": False, "rank": 4},
    "static": GPT3 | DC | {"static": True},
    "static only": GPT3 | DC | {"projection": False, "gate": False, "static": True},
    "two groups, tied": PYTHIA | DC | {"groups": 2, "static": True, "tied": True},
    "grouped query keys": LLAMA | DC | {"num_key_heads": 2},
    "one key head, plain": LLAMA | {"num_key_heads": 1, "window_pattern": "1:1"},
    "3:1, scanned, and a rest": LLAMA | DC | {"window_pattern": "3:1", "depth": 6, "scan": True},
    "7:1, scanned": PYTHIA | DC | {"window_pattern": "7:1", "depth": 8, "scan": True},
    "1:1, scanned, recomputed": GPT3 | DC | {"depth": 4, "scan": True, "remat": "full"},
    "3:1, unrolled": LLAMA | DC | {"window_pattern": "3:1", "depth": 3},
    "documents": LLAMA | DC | {"end_of_text": 0},
    "documents, learned, scanned": GPT3 | DC | {"end_of_text": 0, "scan": True},
    "documents, plain, no window": LLAMA | {"end_of_text": 0},
}


def make(fields, **more):
    """A model, and random parameters with which its compositions matter."""
    net = lm.Model(VOCAB, **{**TINY, **fields, **more})
    shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    rng = np.random.default_rng(1)
    values = lambda path, x: rng.normal(float(path[-1].key == "scale"), 0.1, x.shape).astype(x.dtype)  # noqa: E731
    return net, jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(values, shapes))


def make_tokens(seed=2):
    """A batch of sequences as long as the context, with several ends of a text."""
    return np.random.default_rng(seed).integers(VOCAB, size=(len(PROMPTS), CONTEXT)).astype(np.int32)


def decoded(net, params, tokens, *, slots=CONTEXT, padding=0, width=12):
    """Logits of each example's prompt B T V, of its STEPS next tokens B STEPS V, and the last cache."""
    count = np.array(PROMPTS, np.int32)
    prompts = np.where(np.arange(width) < count[:, None], tokens[:, :width], padding).astype(np.int32)
    step = jax.jit(lambda tokens, cache, **count: net.apply({"params": params}, tokens, cache=cache, **count))
    first, out = step(prompts, lm.init_cache(net, len(tokens), slots), count=count)
    rest = []
    for i in range(STEPS):
        logits, out = step(np.take_along_axis(tokens, count[:, None] + i, axis=1), out["cache"])
        rest.append(logits[:, 0])
    return np.asarray(first), np.stack(rest, axis=1), out["cache"]


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_decoding_equals_the_whole_sequence_at_every_position(fields):
    (net, params), tokens = make(fields), make_tokens()
    whole = np.asarray(jax.jit(net.apply)({"params": params}, tokens)[0])
    first, rest, cache = decoded(net, params, tokens)
    np.testing.assert_array_equal(cache["length"], np.array(PROMPTS) + STEPS)
    for i, length in enumerate(PROMPTS):
        np.testing.assert_allclose(first[i, :length], whole[i, :length], rtol=0, atol=1e-5)
        np.testing.assert_allclose(rest[i], whole[i, length : length + STEPS], rtol=0, atol=1e-5)
    assert np.ptp(whole, axis=1).min() > 1e-2  # the tokens make a difference


@pytest.mark.parametrize("fields", [MODELS["DCFormer++"], MODELS["documents, learned, scanned"]])
def test_padding_leaves_no_trace(fields):
    (net, params), tokens = make(fields), make_tokens()
    one, other = (decoded(net, params, tokens, padding=padding) for padding in (0, 5))
    for length, a, b in zip(PROMPTS, one[0], other[0], strict=True):
        np.testing.assert_array_equal(a[:length], b[:length])
    jax.tree.map(np.testing.assert_array_equal, one[1:], other[1:])


def test_neither_the_width_of_the_prompts_nor_more_slots_matter():
    (net, params), tokens = make(MODELS["DCFormer++"]), make_tokens()
    one, other = decoded(net, params, tokens), decoded(net, params, tokens, slots=CONTEXT + 7, width=9)
    np.testing.assert_allclose(one[1], other[1], rtol=0, atol=1e-5)


def test_all_that_is_cached_of_a_compose_is_used():
    (net, params), tokens = make(MODELS["DCFormer++"]), make_tokens()
    cache = decoded(net, params, tokens)[2]
    last = cache["layers"]["decoderblock_1"]

    @jax.jit
    def step(token, last):
        layers = {**cache["layers"], "decoderblock_1": last}
        return net.apply({"params": params}, token, cache={**cache, "layers": layers})[0]

    logits = step(tokens[:, :1], last)
    for where in ("pre", "post"):
        for name in ("k1", "k2", "kg"):
            weights = getattr(last, where)
            without = last._replace(**{where: weights._replace(**{name: getattr(weights, name) * 0})})
            assert float(jnp.abs(step(tokens[:, :1], without) - logits).max()) > 1e-4, f"{where}.{name}"


def test_a_mask_holds_while_decoding_too():
    """Against the whole sequence, in which a token is hidden from all others."""
    layer, x = Attention(4, causal=True, compose="both"), jax.random.normal(jax.random.key(0), (2, 6, 16))
    params = layer.init(jax.random.key(1), x)
    seen = jnp.ones((2, 1, 6, 6), bool).at[1, :, :, 2].set(False)
    cache = jax.tree.map(lambda leaf: jnp.zeros((2, 6, *leaf.shape[2:])), (x, x, *weights_of(layer, params, x)))
    cache = decode_cache.Cache(*cache)
    for t in range(6):
        update = CacheUpdate(jnp.full(2, t), jnp.ones(2, jnp.int32), jnp.zeros(2, jnp.int32))
        out, cache = layer.apply(params, x[:, t : t + 1], cache, update, seen[:, :, t : t + 1], method="decode")
    np.testing.assert_allclose(out, layer.apply(params, x, mask=seen)[:, -1:], rtol=0, atol=1e-5)


def weights_of(layer, params, x):
    """What a cache holds of the key-wise weights of both composes, for tokens like `x`."""
    ranks = jnp.zeros((*x.shape[:2], layer.rank, layer.num_heads))
    one = decode_cache.key_wise(ComposeWeights(k1=ranks, k2=ranks, kg=ranks[:, :, 0]))
    return one, one


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_ring_of_slots_keeps_the_newest_tokens_that_count(dtype, steps, batch):
    """Against a loop over tokens; some examples add none, and all begin elsewhere."""
    slots, rng = 5, np.random.default_rng(0)

    def tokens(count):
        factor, gate = rng.normal(size=(batch, count, 2, 4)), rng.normal(size=(batch, count, 4))
        weights = decode_cache.ComposeWeights(k1=jnp.asarray(factor, dtype), kg=jnp.asarray(gate, dtype))
        return decode_cache.Cache(*(jnp.asarray(x, dtype) for x in rng.normal(size=(2, batch, count, 8))), weights)

    cache, new = tokens(slots), tokens(steps)
    before, count = np.array([9, 3, 0])[:batch], np.array([steps, 0, 1])[:batch]
    expected = jax.tree.map(np.array, cache)
    for old, more in zip(jax.tree.leaves(expected), jax.tree.leaves(new), strict=True):
        for example in range(batch):
            for step in range(count[example]):
                old[example, (before[example] + step) % slots] = more[example, step]
    found = jax.jit(decode_cache.extend)(cache, new, before, count)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def sizes(fields, **more):
    """Numbers a token and example of each layer's cache: keys and values, then the rest; and the slots."""
    net = lm.Model(VOCAB, **{**TINY, **fields, **more})
    layers = jax.eval_shape(functools.partial(lm.init_cache, net, 1, CONTEXT))["layers"]
    count = lambda tree: sum(x.size // x.shape[1] for x in jax.tree.leaves(tree))  # noqa: E731
    return [(count((c.k, c.v)), count((c.pre, c.post)), c.k.shape[1]) for c in layers.values()]


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("heads", [4, 8])
def test_a_composed_token_costs_2_2r_plus_1_h_numbers_and_a_window_that_many_slots(rank, heads):
    kv, composed = 2 * TINY["width"], 2 * (2 * rank + 1) * heads
    expected = [(kv, composed, WINDOW), (kv, composed, CONTEXT)]
    assert sizes(MODELS["DCFormer++"], rank=rank, num_heads=heads) == expected


@pytest.mark.parametrize(
    ("fields", "composed"),
    [
        ({"compose": None}, 0),
        ({"compose": "pre"}, 5 * 4),
        ({"compose": "post", "gate": False}, 4 * 4),
        ({"projection": False}, 2 * 4),
        ({"branches": "q"}, 0),
        ({"branches": "k"}, 2 * 5 * 4),
        ({"projection": False, "gate": False, "static": True}, 0),
        ({"groups": 2}, 2 * 5 * 4),
    ],
    ids=str,
)
def test_only_what_belongs_to_keys_is_cached(fields, composed):
    assert [size[1] for size in sizes(DC, **fields)] == [composed] * 2
    assert [size[0] for size in sizes(DC, **fields, num_key_heads=1)] == [2 * 4] * 2


def test_slots_of_every_window_pattern():
    slots = lambda **fields: [size[2] for size in sizes(DC, **fields)]  # noqa: E731
    assert slots(window_pattern="none") == [CONTEXT] * 2
    assert slots(window_pattern="3:1", depth=5) == [WINDOW, CONTEXT, WINDOW, WINDOW, WINDOW]
    assert slots(window_pattern="7:1", depth=8) == [WINDOW, CONTEXT, *[WINDOW] * 6]
    assert slots(window=2 * CONTEXT) == [CONTEXT] * 2
