"""Fields of the language model: rotary positions, shared keys, tied head, loading, and error messages."""

import functools
import itertools

import jax
import jax.numpy as jnp
import lm_oracle
import numpy as np
import pytest
from small_models import (
    LENGTH,
    VOCAB,
    assert_trees_equal,
    jit,
    make_lm,
    make_tokens,
    random_params,
    save_npz,
    stack_blocks,
)

from dcvit.dcmha import device
from dcvit.errors import CheckpointError
from dcvit.models import lm
from dcvit.models.layers import rotary_angles, rotate, scaled


class TestRotary:
    POSITIONS = np.array([[0, 1, 2, 5, 1000], [3, 0, 7, 7, 2047]], np.int32)

    def rotated(self, x, width, base=10_000.0, positions=POSITIONS):
        angles = rotary_angles(jnp.asarray(positions), width=width, base=base)
        return np.asarray(rotate(jnp.asarray(x, jnp.float32), angles))

    @pytest.mark.slow
    @pytest.mark.parametrize("platform", ["cpu", "tpu"])
    @pytest.mark.parametrize(("width", "base"), [(4, 10_000.0), (8, 500.0)])
    def test_pairs_are_rotated_as_complex_numbers_and_the_rest_is_unchanged(self, monkeypatch, width, base, platform):
        monkeypatch.setattr(device, "platform", lambda: platform)
        x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
        expected = [lm_oracle.rope(row, at, width, base) for row, at in zip(x, self.POSITIONS, strict=True)]
        out = self.rotated(x, width, base)
        np.testing.assert_allclose(out, expected, rtol=0, atol=5e-4)
        np.testing.assert_allclose(out[:, :3], np.array(expected)[:, :3], rtol=0, atol=2e-6)
        np.testing.assert_array_equal(out[..., width:], x[..., width:])

    @pytest.mark.parametrize("width", [4, 8])
    def test_the_rotation_of_bfloat16_and_its_gradient_are_those_of_cpus_on_tpus(self, monkeypatch, width):
        x, d = (jnp.asarray(np.random.default_rng(n).normal(size=(2, 5, 3, 8)), jnp.bfloat16) for n in (0, 1))
        angles = rotary_angles(jnp.asarray(self.POSITIONS), width=width, base=10_000.0)
        found = []
        for platform in ("cpu", "tpu"):
            monkeypatch.setattr(device, "platform", lambda platform=platform: platform)
            out, vjp = jax.vjp(lambda x: rotate(x, angles), x)
            found.append(np.array([out, vjp(d)[0]], np.float32))
        np.testing.assert_allclose(*found, rtol=2**-8, atol=2**-12)  # a rounding to bfloat16

    def test_frequencies_are_scaled_by_the_wavelengths_of_llama_3(self):
        """Meta's rule (https://github.com/meta-llama/llama-models): long waves are divided, short ones stay."""
        frequencies, (factor, low, high, context) = 500_000.0 ** (-np.arange(64) / 64), (8.0, 1.0, 4.0, 8192)
        expected = []
        for frequency in frequencies:
            wavelength = 2 * np.pi / frequency
            smooth = (context / wavelength - low) / (high - low)
            between = (1 - smooth) * frequency / factor + smooth * frequency
            long, short = wavelength > context / low, wavelength < context / high
            expected.append(frequency / factor if long else frequency if short else between)
        found = scaled(jnp.asarray(frequencies, jnp.float32), (factor, low, high, context))
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        kept = np.round(np.asarray(expected) / frequencies, 6)
        assert {1, 1 / factor} < {*kept}  # and between them
        np.testing.assert_array_equal(scaled(found, (2.0,)), found / 2)
        np.testing.assert_array_equal(scaled(found, None), found)


@pytest.mark.slow
def test_tied_head_is_the_embedding_and_its_gradient_is_the_sum_of_both():
    (net, params), tokens = make_lm("Transformer++-405M", tied=True, depth=1), make_tokens()
    assert "head" not in params
    table = params["embedding"]["embedding"]
    np.testing.assert_array_equal(lm.head_kernel(params), table.T)
    untied = {**params, "head": {"kernel": table.T}}
    np.testing.assert_array_equal(lm.head_kernel(untied), table.T)

    def logits_and_gradient(net, params):
        def loss(params):
            logits = net.apply({"params": params}, tokens)[0]
            return jnp.sum(jnp.sin(logits)), logits

        gradient, logits = jit(jax.grad(loss, has_aux=True))(params)
        return logits, gradient

    equal = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    logits, gradient = logits_and_gradient(net, params)
    untied_logits, parts = logits_and_gradient(net.clone(tied=False), untied)
    equal(untied_logits, logits)
    equal(gradient["embedding"]["embedding"], parts["embedding"]["embedding"] + parts["head"]["kernel"].T)


@pytest.fixture(scope="module")
def params():
    return make_lm("DCFormer++-405M", depth=5, branches="q")[1]


class TestLoad:
    @pytest.fixture(params=["unrolled", "scanned"])
    def file(self, request, tmp_path, params):
        saved = params if request.param == "unrolled" else stack_blocks(params, 2)
        return save_npz(tmp_path / "model.npz", {"params": saved})

    @pytest.mark.slow
    @pytest.mark.parametrize("period", [None, 2])
    def test_checkpoints_load_into_any_layout(self, file, params, period):
        wanted = stack_blocks(params, period) if period else params
        loaded = lm.load(jax.tree.map(np.zeros_like, wanted), file, {})
        assert_trees_equal(loaded, wanted)

    @pytest.mark.slow
    def test_dont_load_keeps_the_initial_values(self, file, params):
        init = {**random_params(params, seed=5), "head": {"kernel": jnp.zeros((32, 99))}}
        with pytest.raises(CheckpointError, match=r"head/kernel \(checkpoint \(32, 17\), model \(32, 99\)\)"):
            lm.load(init, file, {})
        loaded = lm.load(init, file, {}, dont_load=["head/.*", ".*/w_qg"])
        assert loaded["head"]["kernel"].shape == (32, 99)
        at = lambda tree: tree["Transformer"]["decoderblock_3"]["MultiHeadDotProductAttention_0"]  # noqa: E731
        np.testing.assert_array_equal(at(loaded)["pre"]["w_qg"], at(init)["pre"]["w_qg"])
        np.testing.assert_array_equal(at(loaded)["pre"]["w_q1"], at(params)["pre"]["w_q1"])

    @pytest.mark.slow
    def test_checkpoint_of_another_depth_raises(self, file, params):
        fewer = make_lm("DCFormer++-405M", depth=3, branches="q")[1]
        for wanted in (fewer, stack_blocks(fewer, 2)):
            with pytest.raises(CheckpointError, match=r"only in the checkpoint|checkpoint \(3, .*model \(1, "):
                lm.load(wanted, file, {})


@pytest.mark.parametrize("pattern", [1, 2])
def test_a_scan_compiles_the_fewest_layers_for_every_subset_that_composes(pattern):
    """Among all groups whose repetitions have the same windows and composition; of equal numbers, the shortest."""
    for depth in range(1, 6):
        for layers in (*itertools.chain(*(itertools.combinations(range(depth), n + 1) for n in range(depth))), None):
            kinds = [(i % pattern, layers is None or i in layers) for i in range(depth)]
            found = []
            for period, repeats in itertools.product(range(1, depth + 1), repeat=2):
                scanned = period * repeats
                if scanned <= depth and kinds[:scanned] == kinds[:period] * repeats and period % pattern == 0:
                    found.append((period + depth - scanned, period, repeats))
            layout = min(found)[1:] if found else (pattern, 0)
            net = lm.LM(VOCAB, depth=depth, compose="pre", compose_layers=layers)
            assert net.clone(scan=True).scan_layout(pattern) == layout
            assert net.scan_layout(pattern)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "other"}, "norm='other'; known: "),
        ({"position": "learned", "context": 11}, "12 tokens are more than the model's context of 11"),
        ({"end_of_text": VOCAB}, "end_of_text=17 should be 0 or more, below vocab_size=17"),
        ({"compose": "both", "gate": False, "projection": False}, "composes nothing"),
    ],
    ids=str,
)
def test_errors_name_the_invalid_field(fields, message):
    net = lm.LM(**{"vocab_size": VOCAB, "context": LENGTH, "width": 32, "depth": 1, "num_heads": 4, **fields})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(net.init, jax.random.key(0), make_tokens())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("full", 2), ("full_but_attention", 1)])
def test_rematerialization_repeats_the_forward_kernel_unless_its_results_are_kept(monkeypatch, remat, forwards):
    """The gradient of a scanned layer, lowered for TPUs."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")  # TPU kernels may be traced without a TPU
    size = {"width": 128, "depth": 1, "num_heads": 2, "mlp_dim": 128, "context": 16}
    net = lm.Model(64, **size, scan=True, remat=remat, implementation="pallas_tpu")
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    gradient = jax.jit(jax.grad(lambda params, tokens: net.apply(params, tokens)[0].sum()))
    text = gradient.trace(params, tokens).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count('kernel_name = "dcmha_forward"') == forwards
