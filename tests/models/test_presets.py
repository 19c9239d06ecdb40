"""The paper's language models by name: exact sizes, traces of every preset and ablation, and initial values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import exhaustive
from small_models import jit

from dcvit.models import flops, lm
from dcvit.models.presets import PRESETS
from dcvit.parallel.trees import by_name

VOCAB = 50_257  # GPT-2's
COMPOSED = sorted(name for name in PRESETS if name.startswith(("DCFormer", "DCPythia")))
FLASH = sorted(name for name in PRESETS if name.startswith("DCFlash"))


def baseline(name):
    """Return the name of the model without composition."""
    return name.removeprefix("DC").replace("Former", "Transformer")


@functools.cache
def trace(net):
    """Return the parameters of a model with one layer as shapes by name; a plan of attention changes none of them."""
    net = net.clone(depth=1, scan=False, window_pattern="none", prefill_window=None, implementation="reference")
    params = jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))["params"]
    return {name: x.size for name, x in by_name(params).items()}


def count(net, only=lambda name: True):
    """Return the number of parameters with certain names of all layers, which are equal, and of the rest."""
    return sum((net.depth if "decoderblock_0" in name else 1) * n for name, n in trace(net).items() if only(name))


def make(preset, vocab=VOCAB, **fields):
    return lm.Model(vocab, preset=preset, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layers", "width", "heads"), [("405M", 24, 1024, 16), ("834M", 24, 1536, 24), ("1.4B", 24, 2048, 32)]
)
def test_table_3_counts_the_matrices_of_the_transformer(size, layers, width, heads):
    net = make(f"Transformer-{size}")
    assert (net.depth, net.width, net.num_heads, net.context) == (layers, width, heads, 2048)
    matrices = 12 * width**2 * layers + 2 * VOCAB * width
    assert count(net, lambda name: name.endswith(("kernel", "embedding/embedding"))) == matrices
    assert count(net, lambda name: name == "pos_embedding") == 2048 * width
    assert count(net, lambda name: name.endswith("norm/scale")) == (2 * layers + 1) * width
    # q, k, v, out; the MLP's 4·M and M; two norms a layer, and the last
    assert count(net, lambda name: name.endswith("bias")) == layers * (4 + 5 + 2) * width + width
    assert count(net) == matrices + 2048 * width + (13 * layers + 2) * width
    assert size == (f"{matrices / 1e6:.0f}M" if matrices < 1e9 else f"{matrices / 1e9:.1f}B")


@pytest.mark.parametrize(
    ("preset", "vocab", "number"),
    [  # of Pythia, as padded when they were trained, and of LLaMA
        ("Pythia-6.9B", 50_432, 6_857_302_016), ("Transformer++-6.9B", 32_000, 6_738_415_616),
        ("Transformer++-33B", 32_000, 32_528_943_616),
    ],
)  # fmt: skip
def test_models_with_published_vocabularies_have_the_published_numbers_of_parameters(preset, vocab, number):
    assert count(make(preset, vocab)) == number


@pytest.mark.slow
@pytest.mark.parametrize("preset", FLASH)
def test_dcflash_is_dcformer_plus_plus_with_a_composition_that_is_folded(preset):
    size = preset.removeprefix("DCFlash-")
    net, full = make(preset), make(f"DCFormer++-{size}")
    key_heads = full.num_heads // 4
    assert net == full.clone(num_key_heads=key_heads, groups=key_heads, branches="q")
    plain = make(f"Transformer++-{size}", num_key_heads=key_heads)
    inner = 2 * net.rank * 4  # of each group, in pre-compose and post-compose
    composition = 2 * (key_heads * (net.width * inner + inner**2) + net.width * net.num_heads)
    norms = 2 * (net.width // net.num_heads) if net.qk_norm else 0
    assert count(net) == count(plain) + net.depth * (composition + norms)
    operations = flops.lm_flops(net, 2048) / flops.lm_flops(net.clone(compose=None), 2048)
    assert 1 < operations < 1.015
    assert net.composition().foldable(net.num_key_heads)
    pair = [n.clone(depth=2) for n in (net, net.clone(compose=None))]
    caches = [jax.eval_shape(functools.partial(lm.init_cache, n, 1, 64)) for n in pair]
    assert jax.tree.map(np.shape, caches[0]) == jax.tree.map(np.shape, caches[1])


@pytest.mark.slow
@pytest.mark.parametrize("preset", COMPOSED)
def test_composition_adds_the_parameters_of_appendix_e_and_qk_norm_two_head_dims_a_layer(preset):
    net, plain = make(preset), make(baseline(preset))
    assert (net.compose, net.window_pattern, net.window) == ("both", "1:1", 256)
    assert (plain.compose, plain.window_pattern, plain.qk_norm) == (None, "none", None)
    inner = 2 * net.rank * net.num_heads
    composition = 4 * (net.width * inner + inner**2 + net.width * net.num_heads)
    norms = 2 * (net.width // net.num_heads) if net.qk_norm else 0
    assert count(net) == count(plain) + net.depth * (composition + norms)
    normed = preset.startswith("DCPythia") or preset.endswith(("405M", "834M", "1.4B"))
    assert net.qk_norm == ("rmsnorm" if normed else None)


GATE = 1024 * 16  # M·H at 405M, where R = 2 makes 2RH = 64
TABLE_9 = {  # fields, and the parameters that they add to each layer, without QK-norm
    "dyn. proj.": (dict(gate=False), 4 * (1024 * 64 + 64**2)),
    "dyn. gate": (dict(projection=False), 4 * GATE),
    "all": (dict(static=True), 4 * (1024 * 64 + 64**2 + GATE) + 2 * 16**2),
    "key-wise": (dict(branches="k"), 2 * (1024 * 64 + 64**2 + GATE)),
    "eight groups, all": (dict(groups=8, static=True), 4 * (1024 * 64 + 8 * 8**2 + GATE) + 2 * 8 * 2**2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "added"), TABLE_9.values(), ids=TABLE_9)
def test_every_ablation_of_table_9_traces_and_adds_its_own_parameters(fields, added):
    composed = make("DCFormer++-405M", qk_norm=None, **fields)
    assert count(composed) - count(make("Transformer++-405M")) == 24 * added


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "scan", "std", "out_std"),
    [
        ("DCPythia-6.9B", False, math.sqrt(2 / (5 * 4096)), 2 / 32 / math.sqrt(4096)),
        exhaustive("Pythia-12B", True, math.sqrt(2 / (5 * 5120)), 2 / 36 / math.sqrt(5120)),
    ],
)
def test_initial_values_have_the_standard_deviation_of_the_recipe(preset, scan, std, out_std):
    """The recipe is small init, with Wang init of the layers that write to the residual stream."""
    width, heads = 128, 16
    depth = 2 if scan else 1
    fields = dict(width=width, num_heads=heads, depth=depth, mlp_dim=256, context=256, scan=scan, window_pattern="none")
    net = lm.Model(512, preset=preset, **fields)
    params = jit(net.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    expected = {"w_q1": math.sqrt(2 / (width + 64)), "w_q2": 0.02 / (math.sqrt(2 * 16 * 2) * (16 + 2))}
    expected["w_qg"] = 0.05 * math.sqrt(2 / (width + 16))
    expected |= {name.replace("q", "k"): value for name, value in expected.items()}
    for path, leaf in jax.tree.leaves_with_path(params):
        *_, owner, name = (key.key for key in (jax.tree_util.DictKey("params"), *path))
        values = np.asarray(leaf, np.float64)
        if name in ("scale", "bias"):
            assert (values == (name == "scale")).all()
            continue
        assert np.unique(values).size > 0.9 * values.size  # layers differ
        spread = expected.get(name, out_std if owner == "out" else std)
        assert values.std() == pytest.approx(spread, rel=4 / math.sqrt(2 * values.size)), jax.tree_util.keystr(path)
        assert abs(values.mean()) < 4 * spread / math.sqrt(values.size)
