"""Compilation for TPU slices with the real compiler, which states memory and collectives; needs libtpu, but no TPU."""

import functools
import importlib.util
import json
import math
import re

import jax
import jax.experimental.topologies
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from paper.full import recommended

from dcvit import aot, cli
from dcvit.dcmha.plan import Selection, selecting
from dcvit.models.attention import Attention
from dcvit.parallel import hlo, sharding
from dcvit.parallel import mesh as mesh_axes
from dcvit.training import measure

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


pytestmark = pytest.mark.usefixtures("no_compilation_cache")


BATCH, LENGTH, WIDTH, HEADS, TENSOR, RANK = 8, 384, 512, 16, 4, 2  # no dimension of a parameter is LENGTH
KINDS = {"plain": {}, "groups": {"compose": "both", "groups": TENSOR}, "all heads": {"compose": "both"}}


@functools.cache
def attention_collectives(kind, backward):
    """The bytes of each exchange of activations, in the attention of a v5e slice on a mesh fsdp 2 × tensor 4.

    Exchanges of parameters and their gradients, which have no dimension of the rows' length, are excluded.
    """
    mesh = sharding.make_mesh([("fsdp", 2), ("tensor", TENSOR)], measure.topology_devices("v5e:2x4")[1])
    net = Attention(HEADS, causal=True, use_bias=False, dtype=jnp.bfloat16, **KINDS[kind])
    rows = NamedSharding(mesh, P(mesh_axes.BATCH))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=rows)
    shapes = {"MultiHeadDotProductAttention_0": jax.eval_shape(net.init, jax.random.key(0), x)["params"]}
    params = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
        shapes, sharding.shardings(shapes, mesh, "fsdp+tensor"),
    )  # fmt: skip

    def out(params, x):
        y = net.apply({"params": params["MultiHeadDotProductAttention_0"]}, x)
        return jax.lax.with_sharding_constraint(y, rows)

    def gradient(params, x, dy):
        y, back = jax.vjp(out, params, x)
        return y, back(dy)

    places = (jax.tree.map(lambda s: s.sharding, params), rows)
    with jax.set_mesh(mesh):
        if backward:
            lowered = jax.jit(gradient, out_shardings=(rows, places)).lower(params, x, x)
        else:
            lowered = jax.jit(out, out_shardings=rows).lower(params, x)
        found = hlo.collectives(lowered.compile().as_text())
    arrays = [re.findall(r"(bf16|f32)\[([\d,]*)\]", c.shape) for c in found for _ in range(c.times)]  # several in one
    sides = [(dtype, [*map(int, shape.split(","))]) for each in arrays for dtype, shape in each if shape]
    return sorted(math.prod(shape) * {"bf16": 2, "f32": 4}[dtype] for dtype, shape in sides if LENGTH in shape)


@needs_libtpu
@pytest.mark.weekly
@pytest.mark.parametrize("backward", [False, True])
def test_groups_within_a_device_exchange_the_same_data_as_plain_attention(backward):
    """Section 3.2: the compose of groups = tensor adds no collective."""
    plain = attention_collectives("plain", backward)
    rows = BATCH // 2 * LENGTH * WIDTH * 2  # of the output; backward, of the input's gradient too
    assert plain == [rows] * (2 if backward else 1)
    assert attention_collectives("groups", backward) == plain


@needs_libtpu
@pytest.mark.weekly
@pytest.mark.parametrize("backward", [False, True])
def test_composition_of_all_heads_exchanges_the_tiles_of_the_rank_and_not_of_the_heads(backward):
    """2 composes × 2 sides × R tiles B×T×S, again in the backward pass, in bfloat16. There also what flows back to the
    factors of the dynamic projections, 2 × 2 × 2 of B×T×R×H, once or twice: a 1/S of the tiles for each head."""
    extra = sum(attention_collectives("all heads", backward)) - sum(attention_collectives("plain", backward))
    tile, factor = BATCH // 2 * LENGTH * LENGTH * 2, BATCH // 2 * LENGTH * RANK * HEADS * 2
    if backward:
        assert 8 * factor <= extra - 8 * RANK * tile <= 16 * factor
    else:
        assert extra == 4 * RANK * tile
    assert extra < 2 * HEADS * tile  # of one compose's scores, forward and backward


@needs_libtpu
@pytest.mark.weekly
@pytest.mark.parametrize(
    ("window", "kinds"), [(None, {"collective-permute", "all-gather"}), (256, {"collective-permute"})]
)
def test_kernels_take_split_tokens_and_local_layers_gather_nothing(window, kinds):
    mesh = sharding.make_mesh([("data", 2), ("context", 4)], measure.topology_devices("v5e:2x4")[1])
    net = Attention(4, causal=True, window=window, use_bias=False, dtype=jnp.bfloat16, compose="both")
    rows = NamedSharding(mesh, P(mesh_axes.BATCH, "context"))
    x = jax.ShapeDtypeStruct((2, 4096, 256), jnp.bfloat16, sharding=rows)
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    with jax.set_mesh(mesh), selecting(Selection("trust")):
        text = jax.jit(net.apply, out_shardings=rows).lower(params, x).compile().as_text()
    assert {c.kind for c in hlo.collectives(text)} == kinds
    assert "dcmha_forward" in text


@needs_libtpu
@pytest.mark.weekly
@pytest.mark.parametrize(
    ("name", "overrides"),
    [  # with scan, one layer's kernels are compiled, and with fewer tokens faster
        ("preset=DCFormer++-405M", ["model.scan=true", "input.data.context=512"]),
        ("variant=ViT-S/16", ["model.scan=true"]),
    ],
)
def test_models_fit_the_slices_that_their_configs_recommend(library_promotion, name, overrides):
    """Two of them."""
    config, topology = next(pair for pair in recommended() if name in re.split("[:,]", pair[0]))
    row = measure.compile_for(config, overrides, topology)
    assert row["verdict"] == "fits"
    assert row["total"] < row["memory"]
    assert row["params"] * row["chips"] >= row["parameters"] * 4 / measure.GIB * 0.99
    assert row["collectives"]
    assert "collective-permute" not in row["collectives"]  # no product in parts


@needs_libtpu
@pytest.mark.slow
def test_a_small_step_fits_a_small_slice(library_promotion, capsys):
    argv = ["--config", "vit_digits:attention=mha", "--topology", "v5e:2x2", "--format", "json"]
    argv += ["--config.model.depth=1", "--config.mesh=[('data',-1)]", "--config.sharding_strategy=ddp"]
    assert cli.run(aot.main, argv) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["chips"], row["mesh"], row["verdict"]) == (4, "data=4", "fits")
    assert row["params"] == pytest.approx(row["parameters"] * 4 / measure.GIB)
    assert 0 < row["total"] < row["memory"] == 16
    assert "all-reduce" in row["collectives"]
    assert any("per chip" in line[""] for line in aot.lines(row))


@needs_libtpu
def test_programs_gather_a_split_matrix_which_xla_would_multiply_in_parts():
    mesh = sharding.make_mesh([("fsdp", 16)], measure.topology_devices("v5e:4x4")[1])
    rows = NamedSharding(mesh, P("fsdp"))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows) for shape in ((16, 2048, 1024), (1024, 1024)))
    for options, kind in ((None, "collective-permute"), (sharding.compiler_options(mesh), "all-gather")):
        product = jax.jit(jnp.matmul, out_shardings=rows, compiler_options=options)
        assert {c.kind for c in hlo.collectives(product.lower(x, w).compile().as_text())} == {kind}


@needs_libtpu
def test_an_invalid_config_is_a_one_line_error_before_compilation(capsys, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled"))
    argv = ["--config", "lm_pile:preset=DCFormer++-405M", "--topology", "v5e:4x4"]
    argv += ["--config.mesh=[('fsdp',1),('tensor',16)]", "--config.model.num_heads=8"]
    assert cli.run(aot.main, argv) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: ")
    assert "tensor 16 does not divide num_heads 8" in err


def test_a_missing_libtpu_is_an_error_that_names_the_extra(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no libtpu.so")

    monkeypatch.setattr(jax.experimental.topologies, "get_topology_desc", missing)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if name != "libtpu" else None)
    assert cli.run(aot.main, ["--config", "vit_i1k", "--topology", "v5e:4x4"]) == 2
    assert "pip install 'dcvit[tpu]'" in capsys.readouterr().err
