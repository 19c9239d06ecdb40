"""The language model: equal to a plain numpy one, causal, windowed as said, and the same however it is computed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import lm_oracle
import numpy as np
import pytest

from dcvit.models import lm

VOCAB, LENGTH, WINDOW, HEADS = 17, 12, 3, 4
SMALL = dict(context=LENGTH, width=32, depth=2, mlp_dim=40, num_heads=HEADS, window=WINDOW)
# The smallest preset of each architecture, made smaller still: baselines, then with composed attention.
PLAIN = ("Transformer-405M", "Transformer++-405M", "Pythia-2.8B")
COMPOSED = ("DCFormer-405M", "DCFormer++-405M", "DCPythia-2.8B")
ORACLE = {  # what Section 4 says of them, in the oracle's words; of a head's 8 numbers, Pythia turns 2
    "Transformer": dict(mlp="gelu_tanh", epsilon=1e-5),
    "Transformer++": dict(mlp="swiglu", epsilon=1e-6, rotary=8),
    "Pythia": dict(mlp="gelu", epsilon=1e-5, rotary=2, parallel=True),
}
PATTERNS = {"none": "G", "1:1": "LG", "3:1": "LGLL", "7:1": "LGLLLLLL"}


# Compiling is most of these tests' time.
jit = functools.partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})


def grown(params, seed=1, std=0.2):
    """Random values everywhere, norms around 1, so that nothing is hidden by what a model begins as."""
    rng = np.random.default_rng(seed)
    value = lambda path, x: rng.normal(float(path[-1].key == "scale"), std, x.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(value, params))


def make(preset=None, **fields):
    """A model, and random parameters."""
    net = lm.Model(VOCAB, preset=preset, **{**SMALL, **fields})
    shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return net, grown(shapes)


def make_tokens(batch=2, length=LENGTH, seed=2):
    return jnp.asarray(np.random.default_rng(seed).integers(1, VOCAB, size=(batch, length)), jnp.int32)


def logits(net, params, tokens):
    return np.asarray(jit(net.apply)({"params": params}, tokens)[0])


def windows(pattern, depth):
    """The window of each layer: the pattern again and again, from its first letter on."""
    return [WINDOW if kind == "L" else None for kind in itertools.islice(itertools.cycle(PATTERNS[pattern]), depth)]


def seen(window):
    """Which tokens T×T a layer sees."""
    i, j = np.ogrid[:LENGTH, :LENGTH]
    return (j <= i) & (True if window is None else i - j < window)


class TestForward:
    """The same numbers as a plain implementation in double precision."""

    @pytest.mark.parametrize("preset", [*PLAIN, *COMPOSED])
    def test_each_architecture_equals_the_oracle(self, preset):
        net, params = make(preset)
        name = preset.split("-")[0].removeprefix("DC").replace("Former", "Transformer")
        pattern = windows("1:1" if preset in COMPOSED else "none", 2)
        self.check(net, params, pattern, heads=HEADS, **ORACLE[name])

    @pytest.mark.parametrize(
        "fields",
        [
            dict(static=True, projection=False, gate=False),
            dict(gate=False, rank=1),
            dict(projection=False),
            dict(static=True, rank=4),
            dict(branches="q"),
            dict(branches="k"),
            dict(compose="pre"),
            dict(compose="post", window_pattern="3:1", depth=3),
            dict(num_key_heads=2),
            dict(num_key_heads=1, rotary_fraction=0.5, rotary_base=100.0),
            dict(tied=True, norm="layernorm", use_bias=True),
            dict(mlp="gelu", parallel=True, qk_norm=None),
        ],
        ids=str,
    )
    def test_each_field_equals_the_oracle(self, fields):
        net, params = make("DCFormer++-405M", **fields)
        pattern = windows(fields.get("window_pattern", "1:1"), fields.get("depth", 2))
        self.check(
            net, params, pattern, heads=HEADS, mlp=fields.get("mlp", "swiglu"), epsilon=1e-6,
            rotary=round(8 * fields.get("rotary_fraction", 1)), base=fields.get("rotary_base", 10_000.0),
            parallel=fields.get("parallel", False), rank=fields.get("rank", 2),
        )  # fmt: skip

    def check(self, net, params, pattern, **fields):
        tokens = make_tokens(batch=1)
        expected = lm_oracle.forward(jax.tree.map(np.asarray, params), np.asarray(tokens[0]), pattern, **fields)
        assert expected.std() > 0.5
        np.testing.assert_allclose(logits(net, params, tokens)[0], expected, rtol=0, atol=3e-5)


class TestSight:
    """Which tokens reach which logits, by gradients: not at all is exactly 0, and the farthest allowed is not."""

    def reach(self, net):
        """A function from parameters to how strongly each token's embedding (second axis) moves each logits (first)."""
        tokens = jnp.arange(LENGTH)[None]  # each token once, so that the table's rows are the sequence
        directions = jax.random.normal(jax.random.key(3), (LENGTH, VOCAB))

        @jit
        def strength(params):
            def outputs(table):
                out = net.apply({"params": {**params, "embedding": {"embedding": table}}}, tokens)[0][0]
                return jnp.sum(jnp.sin(out) * directions, axis=1)

            jacobian = jax.jacrev(outputs)(params["embedding"]["embedding"])  # T V M
            return jnp.abs(jacobian).max(axis=2)[:, :LENGTH]

        return lambda params: np.asarray(strength(params))

    @pytest.mark.parametrize(("preset", "pattern"), [*zip((*PLAIN, *COMPOSED), ("none", "1:1") * 3, strict=True)])
    def test_every_earlier_token_counts_and_no_later_one(self, preset, pattern):
        net, params = make(preset, window_pattern=pattern)
        np.testing.assert_array_equal(self.reach(net)(params) > 0, np.tri(LENGTH, dtype=bool))

    @pytest.mark.parametrize(
        ("preset", "depth"), [*((name, 1) for name in (*PLAIN, *COMPOSED)), ("DCFormer++-405M", 3), ("Pythia-2.8B", 4)]
    )
    def test_local_layers_reach_a_window_less_one_each(self, preset, depth, monkeypatch):
        monkeypatch.setitem(lm.WINDOW_PATTERNS, "1:0", "L")
        net, params = make(preset, window_pattern="1:0", depth=depth)
        i, j = np.ogrid[:LENGTH, :LENGTH]
        expected = (j <= i) & (i - j <= depth * (WINDOW - 1))
        np.testing.assert_array_equal(self.reach(net)(params) > 0, expected)

    @pytest.mark.parametrize("scan", [False, True])
    @pytest.mark.parametrize(("pattern", "depth"), [("none", 2), ("1:1", 3), ("3:1", 6), ("7:1", 11)])
    def test_each_layer_has_the_window_of_its_place(self, pattern, depth, scan):
        """With all other attention silenced, one layer's window is all that there is to see."""
        preset = "DCFormer++-405M" if pattern == "1:1" else "Transformer++-405M"
        net, params = make(preset, window_pattern=pattern, depth=depth, scan=scan, width=8)
        reach, unrolled = self.reach(net), lm.unstack_blocks(params)
        for layer, window in enumerate(windows(pattern, depth)):
            alone = silenced(unrolled, except_for=layer)
            alone = lm.stack_blocks(alone, len(PATTERNS[pattern])) if scan else alone
            np.testing.assert_array_equal(reach(alone) > 0, seen(window), err_msg=f"layer {layer}")

    def test_layer_0_is_local_and_layer_1_global(self):
        assert {name: lm.layer_windows(lm.Model(VOCAB, window_pattern=name)) for name in PATTERNS} == {
            "none": (None,), "1:1": (256, None), "3:1": (256, None, 256, 256), "7:1": (256, None, *[256] * 6)
        }  # fmt: skip


def silenced(params, except_for):
    """Unrolled parameters with which only one layer's attention writes anything."""

    def silence(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return 0 * x if "/out/" in name and "Dot" in name and f"decoderblock_{except_for}/" not in name else x

    return jax.tree_util.tree_map_with_path(silence, params)


def losses(net, params, tokens):
    """Logits, intermediates and gradients."""

    @jit
    def run(params):
        def loss(params):
            result, out = net.apply({"params": params}, tokens)
            return jnp.mean(jnp.sin(result)), (result, out["decoder"])

        (_, kept), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return (*kept, gradients)

    return run(params)


def assert_close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


class TestScan:
    """A scan over groups of layers is a way to compute the same."""

    @pytest.mark.parametrize(
        ("preset", "fields"),
        [
            ("Transformer-405M", dict(depth=3)),
            pytest.param("DCFormer++-405M", dict(depth=5), marks=pytest.mark.slow),
            ("Pythia-2.8B", dict(depth=10, window_pattern="3:1")),
            ("Transformer-405M", dict(depth=3, window_pattern="7:1")),  # not one whole group
            ("DCFormer-405M", dict(depth=2, end_of_text=1)),
        ],
    )
    def test_equals_the_unrolled_layers_in_outputs_intermediates_and_gradients(self, preset, fields):
        (net, params), tokens = make(preset, **fields), make_tokens()
        scanned = net.clone(scan=True)
        stacked = lm.stack_blocks(params, len(PATTERNS[net.window_pattern]))
        out, blocks, gradient = losses(net, params, tokens)
        again = losses(scanned, stacked, tokens)
        assert len(blocks) == net.depth + 1
        assert_close(again[0], out)
        assert_close(again[1], blocks)
        assert_close(lm.unstack_blocks(again[2]), gradient)

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("depth", [0, 1, 2, 11, 16])
    def test_parameters_convert_in_both_directions(self, pattern, depth):
        period = len(PATTERNS[pattern])
        _, unrolled = make(window_pattern=pattern, depth=depth, width=8, mlp_dim=4)
        _, scanned = make(window_pattern=pattern, depth=depth, width=8, mlp_dim=4, scan=True)
        stacked = lm.stack_blocks(unrolled, period)
        assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, scanned)
        assert ("group" in stacked["Transformer"]) == (depth >= period)
        jax.tree.map(np.testing.assert_array_equal, lm.unstack_blocks(stacked), unrolled)
        jax.tree.map(np.testing.assert_array_equal, lm.stack_blocks(lm.unstack_blocks(scanned), period), scanned)
        jax.tree.map(np.testing.assert_array_equal, lm.stack_blocks(scanned, period), scanned)
        jax.tree.map(np.testing.assert_array_equal, lm.unstack_blocks(unrolled), unrolled)

    def test_layers_that_do_not_divide_into_7_1_as_33bs_still_compute(self):
        """Four are left over, of these 20 as of 33B's 60."""
        fields = dict(window_pattern="7:1", width=8, mlp_dim=8, num_heads=2, depth=20)
        (net, params), tokens = make("DCFormer++-33B", **fields), make_tokens()
        scanned, stacked = net.clone(scan=True), lm.stack_blocks(params, 8)
        assert {x.shape[0] for x in jax.tree.leaves(stacked["Transformer"]["group"])} == {2}
        assert {f"decoderblock_{i}" for i in range(16, 20)} | {"group", "decoder_norm"} == stacked["Transformer"].keys()
        np.testing.assert_allclose(logits(scanned, stacked, tokens), logits(net, params, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("remat", "scan"), [("full", False), ("dots", True), ("attention", True)])
def test_recomputing_layers_changes_nothing(remat, scan):
    (net, params), tokens = make("DCFormer++-405M", scan=scan), make_tokens()
    assert_close(losses(net.clone(remat=remat), params, tokens), losses(net, params, tokens))


@pytest.mark.parametrize("preset", ["DCFormer++-405M", "Pythia-2.8B"])
def test_bfloat16_computes_near_float32_with_parameters_gradients_and_logits_in_float32(preset):
    (net, params), tokens = make(preset, scan=True), make_tokens()
    params = jax.tree.map(lambda x: x / 2, params)
    wide, (narrow, blocks, gradients) = (
        losses(net, params, tokens),
        losses(net.clone(dtype_mm="bfloat16"), params, tokens),
    )
    assert {x.dtype for x in jax.tree.leaves(blocks)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves((narrow, gradients))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(narrow, wide[0], rtol=0, atol=0.03 * float(jnp.abs(wide[0]).max()))
    init = jax.eval_shape(net.clone(dtype_mm="bfloat16").init, jax.random.key(0), tokens)
    assert {x.dtype for x in jax.tree.leaves(init)} == {jnp.dtype("float32")}


class TestDocuments:
    """Rows packed with several documents, each of which ends with token 0."""

    ROWS = ((5, 3, 0, 9, 2, 8, 8, 0, 4, 6, 0, 0), (0, 7, 7, 1, 2, 3, 4, 5, 6, 0, 3, 2))

    def documents(self, row):
        """Each document with the end of the one before in front, as a slice of the row."""
        starts = sorted({0, *(i for i, token in enumerate(row) if token == 0)})
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]

    @pytest.mark.parametrize("preset", [*PLAIN, *COMPOSED])
    def test_of_a_packed_row_have_the_logits_that_they_have_alone(self, preset):
        net, params = make(preset, end_of_text=0)
        across = net.clone(end_of_text=None)
        rows = jnp.asarray(self.ROWS, jnp.int32)
        packed, mixed = logits(net, params, rows), logits(across, params, rows)
        run = jit(lambda params, tokens: across.apply({"params": params}, tokens)[0])
        for i, row in enumerate(self.ROWS):
            for part in self.documents(row):
                alone = jnp.pad(rows[i : i + 1, part], ((0, 0), (0, LENGTH - part.stop + part.start)))
                alone = run(params, alone)[0, : part.stop - part.start]  # the padding comes later than all of it
                np.testing.assert_allclose(packed[i, part], alone, rtol=0, atol=2e-5)
                assert part.start == 0 or np.abs(mixed[i, part] - alone).max() > 0.05


def checkpointed(jaxpr, inside=False):
    """For each rematerialised part of a jaxpr: whether it stands in a scan, and whether CSE may undo it."""
    for equation in jaxpr.eqns:
        if "prevent_cse" in equation.params:
            yield inside, equation.params["prevent_cse"]
            continue
        for value in equation.params.values():
            if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                yield from checkpointed(getattr(value, "jaxpr", value), inside or equation.primitive.name == "scan")


def test_layers_outside_a_scan_keep_their_rematerialisation():
    """A scan's body is safe from common-subexpression elimination; the unrolled rest needs a barrier."""
    net = lm.LM(11, width=16, depth=3, num_heads=2, window_pattern="1:1", scan=True, remat="full")
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    found = set(checkpointed(jax.make_jaxpr(lambda p: net.apply(p, tokens)[0])(params).jaxpr))
    assert found == {(True, False), (False, True)}


@pytest.mark.parametrize(("remat", "kept"), [("none", True), ("attention", False), ("full", False)])
def test_recomputed_attention_keeps_nothing_as_large_as_the_scores(remat, kept):
    """What a forward pass leaves to the backward pass: the leaves of its vjp."""
    net = lm.LM(11, width=16, depth=2, num_heads=2, compose="both", remat=remat, implementation="reference")
    tokens = jnp.zeros((1, 24), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    residuals = jax.eval_shape(lambda p: jax.vjp(lambda p: net.apply(p, tokens)[0], p)[1], params)
    assert any(leaf.shape[-2:] == (24, 24) for leaf in jax.tree.leaves(residuals)) == kept
