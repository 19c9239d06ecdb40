"""Decoding with a cache equals a forward pass over the complete sequence, for all fields of the language model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CONTEXT, DC, GPT3, LLAMA, TINY, VOCAB, random_model
from marks import exhaustive

from dcvit.dcmha import kv_cache
from dcvit.models import lm
from dcvit.models.attention import Attention, CacheUpdate

WINDOW = TINY["window"]
PROMPTS = (1, 3, 9, 6)  # lengths: one token, less than a window, several windows
STEPS = CONTEXT - max(PROMPTS)
HAVE_ROOM = np.array(PROMPTS) < max(PROMPTS)  # rows that do not fill the cache with all steps
PYTHIA = {"rotary_fraction": 0.5, "norm": "layernorm", "mlp": "gelu", "use_bias": True, "parallel": True}
GLOBAL, LOCAL = {"depth": 1}, {"depth": 1, "window_pattern": "1:1"}
# Every value of every field occurs once in both tables, in models of as few layers as possible.
MODELS = {
    "local and global layer, grouped query keys": LLAMA | DC | {"qk_norm": "rmsnorm", "num_key_heads": 2},
    "two groups, tied": PYTHIA | DC | LOCAL | {"groups": 2, "static": True, "tied": True},
    "composed window": LLAMA | DC | {"compose_window": 3, "implementation": "blockwise"},
    "documents, scanned": GPT3 | {"compose": "pre", "end_of_text": 0, "scan": True},
    "talking, grouped": LLAMA | GLOBAL | {"heads": "talking", "num_key_heads": 2},
}
MORE_MODELS = {
    "query-wise, static": GPT3 | GLOBAL | {"compose": "both", "branches": "q", "static": True},
    "plain, documents, one key head": GPT3 | {"window_pattern": "1:1", "end_of_text": 0, "num_key_heads": 1},
    "projections, rank 4": GPT3 | DC | LOCAL | {"gate": False, "rank": 4, "num_key_heads": 2},
    "1:1, scanned, recomputed, and a rest": LLAMA | DC | {"compose": "post", "depth": 3, "scan": True, "remat": "full"},
}
DEEPEST, DOCUMENTS = "local and global layer, grouped query keys", "documents, scanned"
ONE_LAYER = "talking, grouped"  # a global one


def make_tokens(seed=2):
    """Return a batch of sequences that fill the context; each contains several ends of documents."""
    return np.random.default_rng(seed).integers(VOCAB, size=(len(PROMPTS), CONTEXT)).astype(np.int32)


@functools.cache
def compiled(name):
    """Return a model, its parameters, and its compiled function of parameters, tokens, a cache and counts."""
    net, params = random_model(**(MODELS | MORE_MODELS)[name])
    return net, params, jax.jit(lambda p, tokens, cache, **n: net.apply({"params": p}, tokens, cache=cache, **n))


def decoded(name, *, slots=CONTEXT, padding=0, width=12):
    """Return the logits of the prompts (B T V), those of the next STEPS tokens (B STEPS V), and the last cache."""
    net, params, step = compiled(name)
    tokens, count = make_tokens(), np.array(PROMPTS, np.int32)
    prompts = np.where(np.arange(width) < count[:, None], tokens[:, :width], padding).astype(np.int32)
    first, out = step(params, prompts, lm.init_cache(net, len(tokens), slots), count=count)
    rest = []
    for i in range(STEPS):
        logits, out = step(params, np.take_along_axis(tokens, count[:, None] + i, axis=1), out["cache"])
        rest.append(logits[:, 0])
    return np.asarray(first), np.stack(rest, axis=1), out["cache"]


decoded_by_default = functools.cache(decoded)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *map(exhaustive, MORE_MODELS)])
def test_decoding_equals_the_complete_sequence_at_every_position(name):
    net, params, _ = compiled(name)
    whole = np.asarray(jax.jit(net.apply)({"params": params}, make_tokens())[0])
    first, rest, cache = decoded_by_default(name)
    np.testing.assert_array_equal(cache["length"], np.array(PROMPTS) + STEPS)
    for i, length in enumerate(PROMPTS):
        np.testing.assert_allclose(first[i, :length], whole[i, :length], rtol=0, atol=1e-5)
        np.testing.assert_allclose(rest[i], whole[i, length : length + STEPS], rtol=0, atol=1e-5)
    assert np.ptp(whole, axis=1).min() > 1e-2  # the tokens make a difference


@pytest.mark.slow
@pytest.mark.parametrize("name", [DEEPEST, DOCUMENTS])
def test_the_value_of_padding_does_not_change_the_logits(name):
    one, other = decoded_by_default(name), decoded(name, padding=5)
    for length, a, b in zip(PROMPTS, one[0], other[0], strict=True):
        np.testing.assert_array_equal(a[:length], b[:length])
    jax.tree.map(np.testing.assert_array_equal, one[1:], other[1:])


@pytest.mark.exhaustive
def test_the_padded_length_of_prompts_and_unused_slots_do_not_change_the_logits():
    one, other = decoded_by_default(DEEPEST), decoded(DEEPEST, slots=CONTEXT + 7, width=9)
    np.testing.assert_allclose(one[1], other[1], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_step_without_a_token_leaves_the_cache_as_it_was():
    """Its padding is a token that would end the document."""
    net, params, step = compiled(DOCUMENTS)
    cache, count = decoded_by_default(DOCUMENTS)[2], np.zeros(len(PROMPTS), np.int32)
    _, out = step(params, np.full((len(PROMPTS), 1), net.end_of_text, np.int32), cache, count=count)
    np.testing.assert_array_equal(out["cache"]["first"], cache["first"])
    after, expected = (step(params, make_tokens()[:, :1], c)[0][HAVE_ROOM] for c in (out["cache"], cache))
    np.testing.assert_array_equal(after, expected)
    assert np.isfinite(after).all()


@pytest.mark.slow
def test_several_tokens_after_others_have_no_logits():
    """They would not attend to the cached ones."""
    net, params, step = compiled(ONE_LAYER)
    tokens, empty = make_tokens()[:, :2], lm.init_cache(net, len(PROMPTS), CONTEXT)
    logits, out = step(params, tokens, empty, count=np.array([0, 1, 2, 2], np.int32))
    assert np.isfinite(logits).all()
    again = np.asarray(step(params, tokens, out["cache"])[0])
    assert np.isfinite(again[0]).all()
    assert np.isnan(again[1:]).all()


@pytest.mark.slow
def test_tokens_that_a_cache_has_no_place_for_have_no_logits():
    """A global layer would forget the oldest token; a model of local layers needs no more slots."""
    net, params, step = compiled(ONE_LAYER)
    cache = lm.init_cache(net, len(PROMPTS), 2)
    for length in (1, 2, 3):
        logits, out = step(params, make_tokens()[:, length - 1 : length], cache)
        cache = out["cache"]
        assert np.isfinite(logits).all() if length <= 2 else np.isnan(logits).all()


@pytest.mark.slow
@pytest.mark.parametrize("end_of_text", [None, 0])
def test_tokens_beyond_the_learned_positions_have_no_logits(end_of_text):
    """The cache of a model of local layers has place for any number of tokens; positions restart at a document."""
    net, params = random_model(**GPT3 | LOCAL | {"context": 3, "end_of_text": end_of_text})
    step, cache = jax.jit(lambda *args: net.apply({"params": params}, args[0], cache=args[1])), lm.init_cache(net, 1, 3)
    found = []
    for token in (1, 2, 0, 3, 4, 5):
        logits, out = step(jnp.full((1, 1), token), cache)
        cache = out["cache"]
        found.append(bool(jnp.isfinite(logits).all()))
    assert found == ([True] * 3 + [False] * 3 if end_of_text is None else [True] * 5 + [False])


@pytest.mark.slow
def test_a_mask_applies_to_decoding():
    """Compare with the complete sequence, in which one token is masked for all others."""
    layer, x = Attention(4, causal=True, compose="post"), jax.random.normal(jax.random.key(0), (2, 6, 16))
    params = jax.jit(layer.init)(jax.random.key(1), x)
    mask = np.ones((2, 1, 6, 6), bool)
    mask[1, :, :, 2] = False
    cache = kv_cache.empty(layer.composition(), (2, 6), 4, 16, jnp.float32)
    decode = jax.jit(functools.partial(layer.apply, method="decode"))
    for t in range(6):
        update = CacheUpdate(np.full(2, t), np.ones(2, np.int32), np.zeros(2, np.int32))
        out, cache = decode(params, x[:, t : t + 1], cache, update, mask[:, :, t : t + 1])
    np.testing.assert_allclose(out, jax.jit(layer.apply)(params, x, mask=mask)[:, -1:], rtol=0, atol=1e-5)


def sizes(fields, **more):
    """Return for each layer: the numbers of a token's keys and values, those of its weights, and the slots."""
    net = lm.Model(VOCAB, **{**TINY, **fields, **more})
    layers = jax.eval_shape(functools.partial(lm.init_cache, net, 1, CONTEXT))["layers"]
    count = lambda tree: sum(x.size // x.shape[1] for x in jax.tree.leaves(tree))  # noqa: E731
    return [(count((c.k, c.v)), count((c.pre, c.post)), c.k.shape[1]) for c in layers.values()]


@pytest.mark.parametrize(
    ("fields", "composed"),
    [
        ({"rank": 4, "num_heads": 8}, 2 * (2 * 4 + 1) * 8),
        ({"compose": "post", "gate": False}, 4 * 4),
        ({"branches": "q"}, 0),
        ({"groups": 2}, 2 * 5 * 4),
    ],
    ids=str,
)
def test_key_wise_weights_of_a_token_are_cached_and_a_window_limits_the_slots(fields, composed):
    kv = 2 * TINY["width"]
    assert sizes(DC, **fields) == [(kv, composed, WINDOW), (kv, composed, CONTEXT)]
    shared = kv // fields.get("num_heads", TINY["num_heads"])
    assert [size[0] for size in sizes(DC, **fields, num_key_heads=1)] == [shared] * 2
