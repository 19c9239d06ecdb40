"""Fields of the language model: rotary positions, shared keys, the tied head, loading, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import lm_oracle
import numpy as np
import pytest
from test_lm import LENGTH, VOCAB, grown, jit, logits, make, make_tokens

from dcvit.errors import CheckpointError
from dcvit.models import lm
from dcvit.models.attention import rotate


class TestRotary:
    POSITIONS = np.array([[0, 1, 2, 5, 1000], [3, 0, 7, 7, 2047]], np.int32)

    def turned(self, x, width, base=10_000.0, positions=POSITIONS):
        return np.asarray(rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), width=width, base=base))

    @pytest.mark.parametrize("base", [10_000.0, 500.0])
    @pytest.mark.parametrize("width", [2, 4, 8])
    def test_turns_pairs_of_numbers_as_complex_ones_and_leaves_the_rest(self, width, base):
        x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
        expected = [lm_oracle.rope(row, at, width, base) for row, at in zip(x, self.POSITIONS, strict=True)]
        out = self.turned(x, width, base)
        np.testing.assert_allclose(out, expected, rtol=0, atol=5e-4)
        np.testing.assert_allclose(out[:, :3], np.array(expected)[:, :3], rtol=0, atol=2e-6)
        np.testing.assert_array_equal(out[..., width:], x[..., width:])

    @pytest.mark.parametrize("width", [4, 8])
    def test_scores_depend_on_the_distance_only(self, width):
        q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 3, 8))
        at = lambda x, position: self.turned(x, width, positions=np.array([[position]], np.int32))  # noqa: E731
        score = lambda i, j: np.sum(at(q, i) * at(k, j), axis=-1)  # noqa: E731
        for distance in (0, 1, 6):
            for far in (9, 64):
                np.testing.assert_allclose(score(far + distance, far), score(distance, 0), rtol=0, atol=1e-4)
        assert np.abs(score(6, 0) - score(0, 0)).max() > 0.1


@pytest.mark.parametrize("preset", ["DCFormer++-405M", "Transformer-405M"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_neighbouring_query_heads_share_the_keys_and_values_that_grouped_queries_leave(key_heads, preset):
    (net, params), tokens = make(preset, num_key_heads=key_heads), make_tokens()

    def repeated(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shared = name.endswith(("key/kernel", "key/bias", "value/kernel", "value/bias"))
        return jnp.repeat(x, 4 // key_heads, axis=-2) if shared else x

    whole = jax.tree_util.tree_map_with_path(repeated, params)
    np.testing.assert_allclose(
        logits(net.clone(num_key_heads=None), whole, tokens), logits(net, params, tokens), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("preset", ["DCFormer++-405M", "Transformer-405M"])
def test_a_tied_head_is_the_embedding_and_an_untied_one_has_its_own(preset):
    (net, params), tokens = make(preset, tied=True), make_tokens()
    assert "head" not in params
    table = params["embedding"]["embedding"]
    np.testing.assert_array_equal(lm.head_kernel(params), table.T)
    untied = {**params, "head": {"kernel": table.T}}
    np.testing.assert_array_equal(lm.head_kernel(untied), table.T)
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    equal(logits(net.clone(tied=False), untied, tokens), logits(net, params, tokens))

    def gradient(net, params):
        return jit(jax.grad(lambda params: jnp.sum(jnp.sin(net.apply({"params": params}, tokens)[0]))))(params)

    whole, parts = gradient(net, params), gradient(net.clone(tied=False), untied)
    both = parts["embedding"]["embedding"] + parts["head"]["kernel"].T
    equal(whole["embedding"]["embedding"], both)


def test_logits_are_the_head_on_the_last_hidden_states():
    (net, params), tokens = make("DCPythia-2.8B"), make_tokens()
    result, out = jit(net.apply)({"params": params}, tokens)
    np.testing.assert_array_equal(out["logits"], result)
    np.testing.assert_allclose(lm.unembed(out["pre_logits"], lm.head_kernel(params)), result, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def params():
    return make("DCFormer++-405M", depth=5)[1]


class TestLoad:
    @pytest.fixture(params=["unrolled", "scanned"])
    def file(self, request, tmp_path, params):
        saved = params if request.param == "unrolled" else lm.stack_blocks(params, 2)
        return save(tmp_path / "model.npz", {"params": saved})

    @pytest.mark.parametrize("period", [None, 1, 2, 4])
    def test_checkpoints_load_whichever_way_and_pattern_they_were_scanned(self, file, params, period):
        wanted = lm.stack_blocks(params, period) if period else params
        loaded = lm.load(jax.tree.map(jnp.zeros_like, wanted), file, {})
        jax.tree.map(np.testing.assert_array_equal, loaded, wanted)

    def test_dont_load_keeps_the_initial_values(self, file, params):
        init = {**grown(params, seed=5), "head": {"kernel": jnp.zeros((32, 99))}}
        with pytest.raises(CheckpointError, match=r"head/kernel \(checkpoint \(32, 17\), model \(32, 99\)\)"):
            lm.load(init, file, {})
        loaded = lm.load(init, file, {}, dont_load=["head/.*", ".*/w_qg"])
        assert loaded["head"]["kernel"].shape == (32, 99)
        at = lambda tree: tree["Transformer"]["decoderblock_3"]["MultiHeadDotProductAttention_0"]  # noqa: E731
        np.testing.assert_array_equal(at(loaded)["pre"]["w_qg"], at(init)["pre"]["w_qg"])
        np.testing.assert_array_equal(at(loaded)["pre"]["w_kg"], at(params)["pre"]["w_kg"])

    def test_a_plain_checkpoint_begins_a_composed_model_once_told_so(self, tmp_path, params):
        _, plain = make("Transformer++-405M", depth=5)
        file = save(tmp_path / "plain.npz", plain)
        with pytest.raises(CheckpointError, match=r"70 only in the model: .*and 64 more") as e:
            lm.load(params, file, {})
        assert "\n" not in str(e.value)
        loaded = lm.load(params, file, {}, dont_load=[".*/(pre|post)/.*", ".*_norm/scale"])
        np.testing.assert_array_equal(loaded["head"]["kernel"], plain["head"]["kernel"])

    def test_another_depth_is_refused_scanned_or_not(self, file, params):
        fewer = make("DCFormer++-405M", depth=3)[1]
        for wanted in (fewer, lm.stack_blocks(fewer, 2)):
            with pytest.raises(CheckpointError, match=r"only in the (checkpoint|model)"):
                lm.load(wanted, file, {})


def save(path, params):
    leaves = jax.tree.leaves_with_path(params)
    np.savez(path, **{jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves})
    return str(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "sincos"}, "position='sincos'; known: 'rotary', 'learned'"),
        ({"norm": "batch"}, "norm='batch'; known: 'layernorm', 'rmsnorm'"),
        ({"mlp": "relu"}, "mlp='relu'; known: 'gelu', 'gelu_tanh', 'swiglu'"),
        ({"remat": "some"}, "remat='some'; known: 'none'"),
        ({"window_pattern": "2:1"}, "window_pattern='2:1'; known: 'none', '1:1', '3:1', '7:1'"),
        ({"dtype_mm": "float16"}, "dtype_mm='float16'; known: 'float32', 'bfloat16'"),
        *(({name: 0}, f"{name}=0 should be 1 or more") for name in ("context", "width", "num_heads", "window")),
        ({"vocab_size": 0}, "vocab_size=0 should be 1 or more"),
        ({"depth": -1}, "depth=-1 should not be negative"),
        ({"mlp_dim": -8}, "mlp_dim=-8 should not be negative"),
        ({"num_key_heads": -2}, "num_key_heads=-2 should not be negative"),
        ({"out_init_std": -0.1}, "out_init_std=-0.1 should not be negative"),
        *(({"rotary_fraction": x}, r"rotary_fraction should be in \(0, 1\]") for x in (0.0, 1.5)),
        ({"rotary_base": 0.0}, "rotary_base, norm_epsilon and init_std above 0"),
        ({"norm_epsilon": 0.0}, "rotary_base, norm_epsilon and init_std above 0"),
        ({"init_std": 0.0}, "rotary_base, norm_epsilon and init_std above 0"),
        ({"position": "learned", "context": 11}, "12 tokens are more than the model's context of 11"),
        ({"num_heads": 3}, "num_heads=3 does not divide width=32"),
        ({"end_of_text": VOCAB}, "end_of_text=17 should be 0 or more, below vocab_size=17"),
        ({"end_of_text": -1}, "end_of_text=-1 should be 0 or more, below vocab_size=17"),
        ({"rotary_fraction": 0.4}, "rotary=3 should be even and at most 8"),
        ({"num_key_heads": 3}, "num_key_heads=3 does not divide num_heads=4"),
        ({"qk_norm": "batch"}, "qk_norm='batch'"),
        ({"compose": "all"}, "compose='all'"),
        ({"compose": "both", "branches": "kq"}, "branches='kq'"),
        ({"compose": "both", "groups": 3}, "groups=3 does not divide num_heads=4"),
        ({"compose": "both", "rank": 0}, "rank=0"),
        ({"compose": "both", "gate": False, "projection": False}, "composes nothing"),
        ({"implementation": "flash"}, "unknown implementation 'flash'"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_are_named(fields, message):
    net = lm.LM(**{"vocab_size": VOCAB, "context": LENGTH, "width": 32, "depth": 1, "num_heads": 4, **fields})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(net.init, jax.random.key(0), make_tokens())


def test_rotary_models_may_run_longer_than_their_context():
    net, params = make("DCFormer++-405M", context=4)
    assert logits(net, params, make_tokens()).shape == (2, LENGTH, VOCAB)
