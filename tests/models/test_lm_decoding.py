"""Decoding with a cache equals a forward pass over the complete sequence, for all fields of the language model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CONTEXT, DC, GPT3, LLAMA, TINY, VOCAB, random_model

from dcvit.dcmha import ComposeWeights, kv_cache
from dcvit.models import lm
from dcvit.models.attention import Attention, CacheUpdate

WINDOW = TINY["window"]
PROMPTS = (1, 3, 9, 6)  # lengths: one token, less than a window, several windows
STEPS = CONTEXT - max(PROMPTS)
PYTHIA = {"rotary_fraction": 0.5, "norm": "layernorm", "mlp": "gelu", "use_bias": True, "parallel": True}
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
    "mixture of heads": LLAMA | {"heads": "moh_topk", "window_pattern": "1:1"},
    "differential, grouped": LLAMA | {"heads": "diff", "num_key_heads": 2, "window_pattern": "1:1"},
    "differential 2, one key head": PYTHIA | {"heads": "diff2", "num_key_heads": 1, "end_of_text": 0, "scan": True},
    "documents": LLAMA | DC | {"end_of_text": 0},
    "documents, learned, scanned": GPT3 | DC | {"end_of_text": 0, "scan": True},
    "documents, plain, no window": LLAMA | {"end_of_text": 0},
}
# Models of the default suite: every field of the model occurs. The exhaustive suite adds all others.
DEFAULT = {"DCFormer", "DCFormer++", "query-wise", "static", "two groups, tied", "grouped query keys",
           "3:1, scanned, and a rest", "documents, learned, scanned", "mixture of heads", "differential, grouped",
           "differential 2, one key head"}  # fmt: skip


def make_tokens(seed=2):
    """Return a batch of sequences that fill the context; each contains several ends of documents."""
    return np.random.default_rng(seed).integers(VOCAB, size=(len(PROMPTS), CONTEXT)).astype(np.int32)


def decoded(net, params, tokens, *, slots=CONTEXT, padding=0, width=12):
    """Return the logits of the prompts (B T V), those of the next STEPS tokens (B STEPS V), and the last cache."""
    count = np.array(PROMPTS, np.int32)
    prompts = np.where(np.arange(width) < count[:, None], tokens[:, :width], padding).astype(np.int32)
    step = jax.jit(lambda tokens, cache, **count: net.apply({"params": params}, tokens, cache=cache, **count))
    first, out = step(prompts, lm.init_cache(net, len(tokens), slots), count=count)
    rest = []
    for i in range(STEPS):
        logits, out = step(np.take_along_axis(tokens, count[:, None] + i, axis=1), out["cache"])
        rest.append(logits[:, 0])
    return np.asarray(first), np.stack(rest, axis=1), out["cache"]


@functools.cache
def decoded_by_default(name):
    """Return `decoded` of a model of `MODELS`, once for all tests."""
    return decoded(*random_model(**MODELS[name]), make_tokens())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.exhaustive) for name in MODELS]
)
def test_decoding_equals_the_complete_sequence_at_every_position(name):
    (net, params), tokens = random_model(**MODELS[name]), make_tokens()
    whole = np.asarray(jax.jit(net.apply)({"params": params}, tokens)[0])
    first, rest, cache = decoded_by_default(name)
    np.testing.assert_array_equal(cache["length"], np.array(PROMPTS) + STEPS)
    for i, length in enumerate(PROMPTS):
        np.testing.assert_allclose(first[i, :length], whole[i, :length], rtol=0, atol=1e-5)
        np.testing.assert_allclose(rest[i], whole[i, length : length + STEPS], rtol=0, atol=1e-5)
    assert np.ptp(whole, axis=1).min() > 1e-2  # the tokens make a difference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DCFormer++", "documents, learned, scanned"])
def test_the_value_of_padding_does_not_change_the_logits(name):
    one, other = decoded_by_default(name), decoded(*random_model(**MODELS[name]), make_tokens(), padding=5)
    for length, a, b in zip(PROMPTS, one[0], other[0], strict=True):
        np.testing.assert_array_equal(a[:length], b[:length])
    jax.tree.map(np.testing.assert_array_equal, one[1:], other[1:])


@pytest.mark.slow
def test_the_padded_length_of_prompts_and_unused_slots_do_not_change_the_logits():
    one = decoded_by_default("DCFormer++")
    other = decoded(*random_model(**MODELS["DCFormer++"]), make_tokens(), slots=CONTEXT + 7, width=9)
    np.testing.assert_allclose(one[1], other[1], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_every_cached_compose_weight_changes_the_logits():
    (net, params), tokens = random_model(**MODELS["DCFormer++"]), make_tokens()
    cache = decoded_by_default("DCFormer++")[2]
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


@pytest.mark.slow
def test_a_mask_applies_to_decoding():
    """Compare with the complete sequence, in which one token is masked for all others."""
    layer, x = Attention(4, causal=True, compose="both"), jax.random.normal(jax.random.key(0), (2, 6, 16))
    params = layer.init(jax.random.key(1), x)
    mask = jnp.ones((2, 1, 6, 6), bool).at[1, :, :, 2].set(False)
    cache = jax.tree.map(lambda leaf: jnp.zeros((2, 6, *leaf.shape[2:])), (x, x, *weights_of(layer, params, x)))
    cache = kv_cache.Cache(*cache)
    decode = jax.jit(functools.partial(layer.apply, method="decode"))
    for t in range(6):
        update = CacheUpdate(jnp.full(2, t), jnp.ones(2, jnp.int32), jnp.zeros(2, jnp.int32))
        out, cache = decode(params, x[:, t : t + 1], cache, update, mask[:, :, t : t + 1])
    np.testing.assert_allclose(out, layer.apply(params, x, mask=mask)[:, -1:], rtol=0, atol=1e-5)


def weights_of(layer, params, x):
    """Return the key-wise weights of both composes in a cache, for tokens with the shape of `x`."""
    ranks = jnp.zeros((*x.shape[:2], layer.rank, layer.num_heads))
    one = kv_cache.key_wise(ComposeWeights(k1=ranks, k2=ranks, kg=ranks[:, :, 0]))
    return one, one


def sizes(fields, **more):
    """Return for each layer: the numbers of a token's keys and values, those of its weights, and the slots."""
    net = lm.Model(VOCAB, **{**TINY, **fields, **more})
    layers = jax.eval_shape(functools.partial(lm.init_cache, net, 1, CONTEXT))["layers"]
    count = lambda tree: sum(x.size // x.shape[1] for x in jax.tree.leaves(tree))  # noqa: E731
    return [(count((c.k, c.v)), count((c.pre, c.post)), c.k.shape[1]) for c in layers.values()]


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("heads", [4, 8])
def test_a_composed_token_takes_2_times_2r_plus_1_times_h_numbers_and_a_window_limits_the_slots(rank, heads):
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
def test_only_key_wise_weights_are_cached(fields, composed):
    assert [size[1] for size in sizes(DC, **fields)] == [composed] * 2
    assert [size[0] for size in sizes(DC, **fields, num_key_heads=1)] == [2 * 4] * 2


@pytest.mark.slow
def test_the_number_of_slots_follows_the_window_pattern():
    slots = lambda **fields: [size[2] for size in sizes(DC, **fields)]  # noqa: E731
    assert slots(window_pattern="none") == [CONTEXT] * 2
    assert slots(window_pattern="3:1", depth=5) == [WINDOW, CONTEXT, WINDOW, WINDOW, WINDOW]
    assert slots(window_pattern="7:1", depth=8) == [WINDOW, CONTEXT, *[WINDOW] * 6]
    assert slots(window=2 * CONTEXT) == [CONTEXT] * 2
