"""FLOP formulas: equal to a count of the equations of the program, and near the count of the compiler."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from marks import exhaustive

from dcvit.models import flops, lm, vit
from dcvit.models.flops import lm_flops, training_flops, visible_pairs, vit_flops

IMAGE = (12, 20, 3)  # 15 patches of 4×4
ROW = 14  # tokens


# The reference implementation has one equation for each product. Others write some of their products as sums.
BLOCKS = {"width": 192, "depth": 1, "mlp_dim": 40, "num_heads": 6, "implementation": "reference"}


def small(**fields):
    return vit.Model(7, **{"patch_size": (4, 4), **BLOCKS, **fields})


def small_lm(**fields):
    return lm.Model(31, **{**BLOCKS, **fields})


def an_image(shape=IMAGE):
    return jax.ShapeDtypeStruct((1, *shape), jnp.float32)


def a_row(length=ROW):
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def logits_of(net, example):
    """Return the function from an example to logits of initial parameters, whose values need no products."""
    return (lambda example: net.init_with_output(jax.random.key(0), example)[0][0]), (example,)


def gradient_of(net, example):
    """Return the function to the gradient of a loss that needs the logits, and its arguments."""
    params = jax.eval_shape(net.init, jax.random.key(0), example)
    return jax.grad(lambda params, example: jnp.square(net.apply(params, example)[0]).sum()), (params, example)


def counted(of, net, example, tokens):
    """Count the operations of a program's products, in the equations on which its results depend.

    On CPUs, the second layers of a dynamic projection of all groups are one matrix, in which products with zeros do not
    count. Nor do those that are means of a norm.
    """
    function, arguments = of(net, example)
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    folded = {(tokens, groups, net.num_heads // groups) for groups in (net.groups, net.num_heads)}
    block = (2 * net.rank * net.num_heads,) * 2
    used = math.prod(block) // net.groups  # without zeros
    means = (net.rank * net.num_heads,) * 2
    assert net.width not in block  # otherwise other matrices have the shape of the block matrix

    def walk(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            name, out = equation.primitive.name, equation.outvars[0].aval.shape
            if name == "dot_general":
                contracted = equation.params["dimension_numbers"][0][0]
                count = 2 * math.prod(out) * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
                is_block, is_mean = (equation.invars[1].aval.shape == shape for shape in (block, means))
                total += 0 if is_mean else count * used // math.prod(block) if is_block else count
            elif name == "conv_general_dilated":
                kernel = equation.invars[1].aval.shape  # (rows, columns, input channels, output channels)
                total += 2 * math.prod(out) * math.prod(kernel[:-1])
            elif name == "mul" and len(out) == 5 and (out[-2:] == (tokens, tokens) or out[1:4] in folded):
                total += 2 * math.prod(out)  # a gate on B G H/G T S, or a term on B T G J _, and the sum
            times = equation.params.get("length", 1) if name == "scan" else 1
            total += times * sum(map(walk, jaxprs_in_params(equation.params)))
        return total

    return walk(jaxpr)


PLAIN = [
    {},
    {"pool_type": "tok", "rep_size": True},
    {"pool_type": "0", "scan": True, "depth": 2},
    {"pool_type": "tok+gap", "registers": 2, "layer_scale": 0.1},
    {"pool_type": "map", "registers": 3, "mlp": "swiglu"},
]
COMPOSED = [
    {"compose": "both", "depth": 2},
    {"compose": "post", "branches": "q"},
    {"compose": "both", "gate": False, "rank": 3},
    {"compose": "both", "static": True, "groups": 2},
    {"compose": "both", "pool_type": "tok", "scan": True, "depth": 2, "registers": 2},
]


FOLDED = [
    {"num_key_heads": 2, "branches": "q", "groups": 2},
    {"num_key_heads": 1, "branches": "q", "gate": False, "rank": 1, "static": True},
    {"branches": "q", "projection": False},
]
FOLDED = [{"compose": "both", "implementation": "folded", **fields} for fields in FOLDED]
NAMED = [
    {"compose": "both", "depth": 3, "compose_layers": (0, -1), "heads": "lightweight"},
    {"heads": "talking"},
    {"heads": "mta", "groups": 2},
    {"heads": "gated", "implementation": "folded"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [*PLAIN, *map(exhaustive, COMPOSED[:-2]), *COMPOSED[-2:], FOLDED[0], *NAMED], ids=str
)
def test_every_product_of_the_program_is_counted(fields):
    net = small(**fields)
    tokens = 15 + net.pool_type.startswith("tok") + net.registers
    assert vit_flops(net, IMAGE) == counted(logits_of, net, an_image(), tokens)


# G multiply-adds at 224 with a class token: S/16 as commonly given, the others of torchvision's table of weights.
PUBLISHED = [("S/16", 4.6), ("B/32", 4.41), ("L/16", 61.55)]


@pytest.mark.parametrize(("variant", "macs"), PUBLISHED)
def test_published_sizes(variant, macs):
    net = vit.Model(1000, variant=variant, pool_type="tok")
    assert vit_flops(net, (224, 224, 3)) / 2e9 == pytest.approx(macs, abs=0.01)


PLAIN_LMS = [
    {},
    {"mlp": "gelu", "mlp_dim": None, "use_bias": True},
    {"num_key_heads": 2, "qk_norm": "rmsnorm"},
    {"num_key_heads": 1, "parallel": True, "rotary_fraction": 0.5},
    {"window_pattern": "3:1", "window": 5, "depth": 5, "scan": True},
    {"mlp_groups": 8, "window_pattern": "1:1", "window": 4, "prefill_window": 5, "depth": 2},
]
COMPOSED_LMS = [
    {"compose": "both"},
    {"compose": "pre", "branches": "q", "num_key_heads": 3},
    {"compose": "post", "branches": "k", "static": True, "window_pattern": "1:1", "window": 4, "depth": 2},
    {"compose": "both", "static": True, "rank": 1, "groups": 6, "window_pattern": "1:1", "depth": 2, "scan": True},
]


@pytest.fixture
def all_pairs(monkeypatch):
    """Count every query-key pair, because the reference computes masked pairs too."""
    monkeypatch.setattr(flops, "visible_pairs", lambda length, window: length**2)


@pytest.mark.slow
@pytest.mark.usefixtures("all_pairs")
@pytest.mark.parametrize("fields", [*PLAIN_LMS, *COMPOSED_LMS, *map(exhaustive, [*FOLDED, NAMED[0]])], ids=str)
def test_every_product_of_the_language_model_is_counted(fields):
    net = small_lm(**fields)
    assert lm_flops(net, ROW) == counted(logits_of, net, a_row(), ROW)


@pytest.mark.slow
@pytest.mark.usefixtures("all_pairs")
@pytest.mark.parametrize("fields", [PLAIN_LMS[1], exhaustive(COMPOSED_LMS[0]), COMPOSED_LMS[2]], ids=str)
def test_a_backward_pass_has_twice_the_products(fields):
    net = small_lm(**fields)
    assert training_flops(net, a_row()) == counted(gradient_of, net, a_row(), ROW)


@pytest.mark.parametrize(("length", "window"), [(1, None), (12, None), (7, 1), (7, 7), (12, 40)])
def test_visible_pairs_equal_the_mask(length, window):
    query, key = np.mgrid[:length, :length]
    mask = (key <= query) & (key > query - (window or length))
    assert visible_pairs(length, window) == mask.sum()


def test_pairs_outside_the_window_of_composition_cost_what_plain_ones_do():
    def cost(**fields):
        return lm_flops(small_lm(compose="both", branches="k", **fields), ROW)

    per_pair = (cost(compose_window=3) - cost(compose_window=2)) // (visible_pairs(ROW, 3) - visible_pairs(ROW, 2))
    assert per_pair > 0
    assert cost() - cost(compose_window=3) == per_pair * (visible_pairs(ROW, None) - visible_pairs(ROW, 3))
    assert cost(compose_window=ROW) == cost()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, exhaustive(COMPOSED_LMS[0]), COMPOSED_LMS[2]], ids=str)
def test_masked_pairs_do_not_count(fields):
    """The cost of one pair is the second difference of a program's products over the length."""
    net = small_lm(**{**fields, "window_pattern": "none", "window": 3})
    first, second, third = (counted(logits_of, net.clone(depth=1), a_row(n), n) for n in (ROW, ROW + 1, ROW + 2))
    pair = (first - 2 * second + third) // 2
    causal, windowed = ROW * (ROW - 1) // 2, (ROW - 3) * (ROW - 2) // 2
    outside = counted(logits_of, net.clone(depth=0), a_row(), ROW)
    net, all_pairs = net.clone(depth=7), 7 * first - 6 * outside
    local = {"none": 0, "1:1": 4, "3:1": 5, "7:1": 6}  # layers of LGLGLGL, LGLLLGL and LGLLLLL
    for pattern, layers in local.items():
        masked = 7 * causal + layers * windowed
        assert lm_flops(net.clone(window_pattern=pattern), ROW) == all_pairs - masked * pair
