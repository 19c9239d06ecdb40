"""Language model: equal to a plain numpy model, causal, windowed, and the same however it is computed."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import lm_oracle
import numpy as np
import pytest
from jax.sharding import AxisType
from marks import exhaustive
from small_models import (
    HEADS,
    LENGTH,
    VOCAB,
    WINDOW,
    assert_trees_close,
    assert_trees_equal,
    jit,
    logits_of,
    make_lm,
    make_tokens,
    name_of,
    param_shapes,
    stack_blocks,
)

from dcvit.models import lm
from dcvit.models.trees import unstack_blocks

# The smallest preset of each architecture, further reduced: baselines, then models with composed attention.
PLAIN = ("Transformer-405M", "Transformer++-405M", "Pythia-2.8B")
COMPOSED = ("DCFormer-405M", "DCFormer++-405M", "DCPythia-2.8B")
ORACLE = {  # arguments of the oracle for each architecture of Section 4; Pythia rotates 2 of a head's 8 numbers
    "Transformer": dict(mlp="gelu_tanh", epsilon=1e-5),
    "Transformer++": dict(mlp="swiglu", epsilon=1e-6, rotary=8),
    "Pythia": dict(mlp="gelu", epsilon=1e-5, rotary=2, parallel=True),
}
PATTERNS = {"none": "G", "1:0": "L", "1:1": "LG", "3:1": "LGLL", "7:1": "LGLLLLLL"}


def windows(pattern, depth):
    """Return the window of each layer: the letters of the pattern, repeated."""
    return [WINDOW if kind == "L" else None for kind in itertools.islice(itertools.cycle(PATTERNS[pattern]), depth)]


def visible(window):
    """Return the mask T×T of the tokens that a layer attends to."""
    i, j = np.ogrid[:LENGTH, :LENGTH]
    return (j <= i) & (True if window is None else i - j < window)


class TestForward:
    """Equality to a plain implementation in double precision."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("preset", "fields"),
        [
            *((preset, dict(depth=1)) for preset in PLAIN),
            ("DCFormer++-405M", {}),  # a local and a global layer
            ("DCFormer-405M", dict(depth=1, static=True, rank=4, branches="q")),
            ("DCPythia-2.8B", dict(depth=1, gate=False, rank=1, compose="pre")),
            ("DCFormer++-405M", dict(depth=1, projection=False, branches="k", num_key_heads=2)),
            ("DCFormer++-405M", dict(
                depth=1, static=True, projection=False, gate=False, tied=True, norm="layernorm", use_bias=True,
            )),
            ("DCFormer++-405M", dict(
                depth=1, num_key_heads=1, rotary_fraction=0.5, rotary_base=100.0, mlp="gelu", parallel=True,
                qk_norm=None,
            )),
        ],
        ids=str,
    )  # fmt: skip
    def test_every_architecture_and_field_equals_the_oracle(self, preset, fields):
        net, params = make_lm(preset, **fields)
        of_preset = ORACLE[preset.split("-")[0].removeprefix("DC").replace("Former", "Transformer")]
        pattern = fields.get("window_pattern", "1:1" if preset in COMPOSED else "none")
        given = {name: fields[name] for name in ("mlp", "parallel", "rank") if name in fields}
        given |= {"rotary": round(8 * fields["rotary_fraction"])} if "rotary_fraction" in fields else {}
        given |= {"base": fields["rotary_base"]} if "rotary_base" in fields else {}
        self.check(net, params, windows(pattern, fields.get("depth", 2)), heads=HEADS, **(of_preset | given))

    def check(self, net, params, pattern, **fields):
        tokens = make_tokens(batch=1)
        expected = lm_oracle.forward(jax.tree.map(np.asarray, params), np.asarray(tokens[0]), pattern, **fields)
        assert expected.std() > 0.5
        np.testing.assert_allclose(logits_of(net, params, tokens)[0], expected, rtol=0, atol=3e-5)


class TestReach:
    """Reach of the tokens, by gradients: that of a logit is exactly 0 for a token that does not affect it."""

    def reach(self, net):
        """Return a function from parameters to the effect of each token (axis 1) on the logits of each position."""
        tokens = jnp.arange(LENGTH)[None]  # each token once, so that the rows of the embedding are the sequence
        directions = jax.random.normal(jax.random.key(3), (LENGTH, VOCAB))

        @jit
        def strength(params):
            def outputs(table):
                out = net.apply({"params": {**params, "embedding": {"embedding": table}}}, tokens)[0][0]
                return jnp.sum(jnp.sin(out) * directions, axis=1)

            jacobian = jax.jacrev(outputs)(params["embedding"]["embedding"])  # T V M
            return jnp.abs(jacobian).max(axis=2)[:, :LENGTH]

        return lambda params: np.asarray(strength(params))

    @pytest.mark.slow
    def test_logits_depend_on_every_earlier_token_and_on_no_later_one(self):
        """With both layers, all earlier tokens count; with the local layer alone, those of its window."""
        net, params = make_lm("DCFormer++-405M", window_pattern="1:1")
        reach = self.reach(net)
        np.testing.assert_array_equal(reach(params) > 0, np.tri(LENGTH, dtype=bool))
        for layer, window in enumerate((WINDOW, None)):
            np.testing.assert_array_equal(reach(silenced(params, [layer])) > 0, visible(window), err_msg=f"{layer}")

    @pytest.mark.slow
    @pytest.mark.parametrize(("pattern", "depth", "scan"), [("1:1", 3, True), exhaustive("3:1", 6, False)])
    def test_each_layer_has_the_window_of_its_place_in_the_pattern(self, pattern, depth, scan):
        """Layers are tested one at a time, with the attention of all others silenced, then all local layers together.

        Each local layer extends the reach by its window less one.
        """
        fields = dict(window_pattern=pattern, depth=depth, scan=scan, width=8, mlp_dim=8)
        net, params = make_lm("Transformer++-405M", **fields)
        reach, unrolled = self.reach(net), unstack_blocks(params)

        def alone(layers):
            kept = silenced(unrolled, layers)
            return reach(stack_blocks(kept, len(PATTERNS[pattern])) if scan else kept) > 0

        for layer, window in enumerate(windows(pattern, depth)):
            np.testing.assert_array_equal(alone([layer]), visible(window), err_msg=f"layer {layer}")
        local = [layer for layer, window in enumerate(windows(pattern, depth)) if window]
        np.testing.assert_array_equal(alone(local), visible(1 + len(local) * (WINDOW - 1)))


def silenced(params, kept):
    """Return unrolled parameters with which only the attention of the layers `kept` writes to the residual stream."""

    def silence(path, x):
        name = name_of(path)
        return 0 * x if "/out/" in name and "Dot" in name and int(name.split("_")[1].split("/")[0]) not in kept else x

    return jax.tree_util.tree_map_with_path(silence, params)


def gradients(net, params, tokens):
    """Return logits, intermediates and gradients."""

    @jit
    def run(params):
        def loss(params):
            result, out = net.apply({"params": params}, tokens)
            return jnp.mean(jnp.sin(result)), (result, out["decoder"])

        (_, kept), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return (*kept, gradients)

    return run(params)


@functools.cache
def unrolled(preset="DCFormer++-405M", **fields):
    """Return a model of unrolled layers on packed documents: model, parameters, tokens and `gradients`."""
    (net, params), tokens = make_lm(preset, end_of_text=1, **fields), make_tokens()
    return net, params, tokens, gradients(net, params, tokens)


class TestScan:
    """A scan over groups of layers computes the same as unrolled layers."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("remat", "fields"),
        [
            ("full", dict(preset="Transformer++-405M", window_pattern="1:1", depth=3)),
            exhaustive("dots", dict(preset="Transformer-405M", window_pattern="3:1", depth=6)),
        ],
        ids=str,
    )
    def test_scan_and_remat_equal_the_unrolled_layers_in_outputs_intermediates_and_gradients(self, remat, fields):
        net, params, tokens, expected = unrolled(**fields)
        stacked = stack_blocks(params, len(PATTERNS[net.window_pattern]))
        out, blocks, gradient = gradients(net.clone(scan=True, remat=remat), stacked, tokens)
        assert len(blocks) == net.depth + 1
        assert_trees_close((out, blocks, unstack_blocks(gradient)), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize(("pattern", "depth"), [("none", 0), ("1:1", 5), ("3:1", 2)])
    def test_parameters_convert_in_both_directions(self, pattern, depth):
        period = len(PATTERNS[pattern])
        _, unrolled = make_lm(window_pattern=pattern, depth=depth, width=8, mlp_dim=4)
        _, scanned = make_lm(window_pattern=pattern, depth=depth, width=8, mlp_dim=4, scan=True)
        stacked = stack_blocks(unrolled, period)
        assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, scanned)
        assert ("group" in stacked["Transformer"]) == (depth >= period)
        assert_trees_equal(unstack_blocks(stacked), unrolled)
        assert_trees_equal(stack_blocks(unstack_blocks(scanned), period), scanned)
        assert_trees_equal(stack_blocks(scanned, period), scanned)
        assert_trees_equal(unstack_blocks(unrolled), unrolled)


@pytest.mark.slow
def test_bfloat16_is_near_float32_with_parameters_gradients_and_logits_in_float32():
    (net, params), tokens = make_lm("DCFormer++-405M", depth=1), make_tokens()
    params, rounded = jax.tree.map(lambda x: x / 2, params), net.clone(dtype_mm="bfloat16")
    narrow, blocks, gradient = gradients(rounded, params, tokens)
    assert {x.dtype for x in jax.tree.leaves(blocks)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves((narrow, gradient))} == {jnp.dtype("float32")}
    wide = logits_of(net, params, tokens)
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=0.03 * float(np.abs(wide).max()))
    assert {x.dtype for x in jax.tree.leaves(param_shapes(rounded, tokens))} == {jnp.dtype("float32")}


class TestDocuments:
    """Rows packed with several documents, each of which ends with token 0."""

    ROWS = ((5, 3, 0, 9, 2, 8, 8, 0, 4, 6, 0, 0), (0, 7, 7, 1, 2, 3, 4, 5, 6, 0, 3, 2))

    def documents(self, row):
        """Return the documents of a row as slices, each with the end of the previous document in front."""
        starts = sorted({0, *(i for i, token in enumerate(row) if token == 0)})
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]

    @pytest.mark.slow
    @pytest.mark.parametrize(("preset", "depth"), [("Transformer-405M", 1), ("DCFormer++-405M", 2)])
    def test_documents_of_a_packed_row_have_the_logits_that_they_have_alone(self, preset, depth):
        net, params = make_lm(preset, end_of_text=0, depth=depth)
        rows = np.array(self.ROWS, np.int32)
        parts = [(i, part) for i, row in enumerate(self.ROWS) for part in self.documents(row)]
        # Padding follows each document, so that no token of the document attends to it.
        alone = np.stack([np.pad(rows[i, part], (0, LENGTH - part.stop + part.start)) for i, part in parts])
        packed = logits_of(net, params, jnp.asarray(rows))
        across = logits_of(net.clone(end_of_text=None), params, jnp.asarray(np.concatenate([rows, alone])))
        for (i, part), expected in zip(parts, across[len(rows) :], strict=True):
            expected = expected[: part.stop - part.start]
            np.testing.assert_allclose(packed[i, part], expected, rtol=0, atol=2e-5)
            assert part.start == 0 or np.abs(across[i, part] - expected).max() > 0.05

    @pytest.mark.slow
    def test_no_array_of_a_training_step_is_as_large_as_a_mask_of_the_documents(self):
        length = 320
        net, params = make_lm(context=length, compose="both", end_of_text=0, depth=1)
        gradient = jit(jax.grad(lambda p, tokens: jnp.sum(net.apply({"params": p}, tokens)[0])))
        text = gradient.lower(params, make_tokens(1, length)).compile().as_text()
        sizes = [[int(n) for n in sides.split(",")] for sides in re.findall(r"[a-z]\w*\[([\d,]+)\]", text)]
        assert sum(length in size for size in sizes) > 10
        assert not [size for size in sizes if sum(n >= length for n in size) > 1]


def checkpointed(jaxpr, inside=False):
    """Yield for each rematerialized part of a jaxpr: it is inside a scan, and it is protected from CSE."""
    for equation in jaxpr.eqns:
        if "prevent_cse" in equation.params:
            yield inside, equation.params["prevent_cse"]
            continue
        for value in equation.params.values():
            if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                yield from checkpointed(getattr(value, "jaxpr", value), inside or equation.primitive.name == "scan")


@pytest.mark.slow
def test_layers_outside_a_scan_keep_their_rematerialization():
    """A scan's body is safe from common-subexpression elimination; the unrolled rest needs a barrier."""
    net = lm.LM(11, width=16, depth=3, num_heads=2, window_pattern="1:1", scan=True, remat="full")
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    found = set(checkpointed(jax.make_jaxpr(lambda p: net.apply(p, tokens)[0])(params).jaxpr))
    assert found == {(True, False), (False, True)}


@pytest.mark.slow
def test_recomputed_attention_keeps_nothing_as_large_as_the_scores():
    """The leaves of a vjp are the arrays that a forward pass keeps for the backward pass."""
    net = lm.LM(11, width=16, depth=1, num_heads=2, compose="both", implementation="reference")
    tokens = jnp.zeros((1, 24), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def kept(params, remat):
        return jax.vjp(lambda p: net.clone(remat=remat).apply(p, tokens)[0], params)[1]

    for remat in ("none", "attention", "full"):
        leaves = jax.tree.leaves(jax.eval_shape(functools.partial(kept, remat=remat), params))
        assert any(leaf.shape[-2:] == (24, 24) for leaf in leaves) == (remat == "none"), remat


def test_on_one_cpu_the_gradient_of_each_kernel_is_a_product_over_one_axis():
    """XLA transposes gradients of products over the axes of batch and tokens first, and takes longer."""
    net, params = make_lm("DCFormer++-405M")

    def loss(params):
        logits, _ = net.apply({"params": params}, make_tokens())
        return jnp.sum(logits**2)

    with jax.set_mesh(jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])):
        program = jax.jit(jax.grad(loss)).lower(params).as_text()
    assert program.count("contracting_dims = [0] x [0]") >= net.depth * 7 + 1  # projections, MLP, head; dynamic weights
    assert "contracting_dims = [0, 1] x [0, 1]" not in program
