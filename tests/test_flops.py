"""The formula against what a program's own equations and the compiler count."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from dcvit.flops import vit_flops
from dcvit.models import vit

IMAGE = (12, 20, 3)  # 15 patches of 4×4


def small(**fields):
    return vit.Model(7, **{"patch_size": (4, 4), "width": 24, "depth": 2, "mlp_dim": 40, "num_heads": 6, **fields})


def logits_of(net, shape=IMAGE):
    """The function to its logits and the shapes of its arguments."""
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), image)
    return lambda params, image: net.apply(params, image)[0], params, image


def counted(net):
    """Operations of a program's products, by walking the equations that its logits depend on."""
    function, params, image = logits_of(net)
    jaxpr, _ = partial_eval.dce_jaxpr(jax.make_jaxpr(function)(params, image).jaxpr, [True])
    tokens = 15 + (net.pool_type == "tok")

    def walk(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            name, out = equation.primitive.name, equation.outvars[0].aval.shape
            if name == "dot_general":
                contracted = equation.params["dimension_numbers"][0][0]
                total += 2 * math.prod(out) * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            elif name == "conv_general_dilated":
                kernel = equation.invars[1].aval.shape  # rows, columns, in, out
                total += 2 * math.prod(out) * math.prod(kernel[:-1])
            elif name == "mul" and len(out) == 5 and out[-2:] == (tokens, tokens):  # a gate on B G H/G T S
                total += 2 * math.prod(out)  # and the addition to the rest
            times = equation.params.get("length", 1) if name == "scan" else 1
            total += times * sum(map(walk, jaxprs_in_params(equation.params)))
        return total

    return walk(jaxpr)


PLAIN = [
    {},
    {"mlp_dim": None, "depth": 0},
    {"pool_type": "tok", "rep_size": True},
    {"pool_type": "map", "rep_size": 10},
    {"pool_type": "none", "rep_size": 10},
    {"pool_type": "0", "scan": True},
    {"qk_norm": "rmsnorm", "groups": 5},
]
COMPOSED = [
    {"compose": "both"},
    {"compose": "pre"},
    {"compose": "post", "branches": "q"},
    {"compose": "both", "branches": "k", "rank": 1},
    {"compose": "both", "projection": False},
    {"compose": "both", "gate": False, "rank": 3},
    {"compose": "both", "static": True, "groups": 2},
    {"compose": "both", "static": True, "projection": False, "gate": False},
    {"compose": "pre", "static": True, "branches": "q", "groups": 6},
    {"compose": "both", "pool_type": "map", "rank": 3, "groups": 3},
    {"compose": "both", "pool_type": "tok", "scan": True},
]


@pytest.mark.parametrize("fields", PLAIN + COMPOSED, ids=str)
def test_every_product_of_the_program_is_counted(fields):
    net = small(**fields)
    assert vit_flops(net, IMAGE) == counted(net)


def test_without_classes_there_is_no_head():
    net = small(compose="both").clone(num_classes=None)
    assert vit_flops(net, IMAGE) == counted(net)


# G multiply-adds at 224 with a class token: S/16 as commonly given, the others of torchvision's table of weights.
PUBLISHED = [("S/16", 4.6), ("B/32", 4.41), ("B/16", 17.56), ("L/32", 15.38), ("L/16", 61.55)]


@pytest.mark.parametrize(("variant", "macs"), PUBLISHED)
def test_published_sizes(variant, macs):
    net = vit.Model(1000, variant=variant, pool_type="tok")
    assert vit_flops(net, (224, 224, 3)) / 2e9 == pytest.approx(macs, abs=0.01)


def test_small_16_is_every_weight_once_a_token_and_the_scores():
    net = vit.Model(1000, variant="S/16")
    _, params, _ = logits_of(net, (224, 224, 3))
    kernels = {path[1].key: 0 for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        kernels[path[1].key] += leaf.size * (path[-1].key == "kernel")
    once = 196 * (kernels["embedding"] + kernels["Transformer"]) + kernels["head"]
    assert vit_flops(net, (224, 224, 3)) == 2 * once + 2 * 12 * 2 * 196**2 * 384


@pytest.mark.parametrize("compose", [None, "both"])
def test_the_compiler_counts_a_little_more(compose):
    """XLA counts every element-wise operation, too; in wide blocks they are few."""
    net = small(width=192, num_heads=6, mlp_dim=None, compose=compose)
    function, params, image = logits_of(net)
    count = jax.jit(function).lower(params, image).compile().cost_analysis()["flops"]
    assert 1 <= count / vit_flops(net, IMAGE) < 1.05
