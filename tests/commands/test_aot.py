"""Compilation for TPU slices: the real compiler's word on memory and collectives. Needs libtpu, and no TPU."""

import functools
import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcvit import aot, cli
from dcvit import config as configs
from dcvit.models.attention import Attention
from dcvit.parallel import hlo, sharding
from dcvit.parallel import mesh as mesh_axes

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.fixture(autouse=True)
def _nothing_kept():
    """What is compiled for a slice cannot be read back from JAX's cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


TEXT = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  ROOT %sum = f32[]{:T(128)} add(%a, %a)
}

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %all-reduce.9 = f32[8,4]{1,0} all-reduce(%p), channel_id=9, to_apply=%add
  ROOT %slice = f32[2,4]{1,0} dynamic-slice(%all-reduce.9)
}

%body (t: (s32[], bf16[4,4])) -> (s32[], bf16[4,4]) {
  %g = bf16[4,4]{1,0} all-gather(%x), channel_id=3, dimensions={0}, metadata={op_name="jit(f)/while/body/dot"}
  %h = bf16[4,4]{1,0} all-gather(%x), channel_id=3, dimensions={0}
  %s = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y), channel_id=4
}

%cond (t: (s32[], bf16[4,4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(12)
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%never (p: f32[8]) -> f32[8] {
  %r = f32[8]{0} all-reduce(%p), channel_id=5, to_apply=%add
}

ENTRY %main (p: f32[8,4]) -> f32[2,4] {
  %w = (s32[], bf16[4,4]) while(%t), condition=%cond, body=%body
  %q = (f32[3]{0}, s8[5]{0}) all-reduce(%p, %p), channel_id=1, to_apply=%add
  ROOT %f = f32[2,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collectives_are_counted_as_often_as_they_run_and_spread_ones_once():
    assert hlo.totals(hlo.collectives(TEXT)) == {
        "all-reduce": (1, 3 * 4 + 5),
        "all-gather": (12, 12 * 32),
        "reduce-scatter": (1, 32),
        "collective-permute": (12, 12 * 32),
    }
    gathered = next(c for c in hlo.collectives(TEXT) if c.kind == "all-gather")
    assert gathered.op_name == "jit(f)/while/body/dot"


def test_collectives_of_a_compiled_program():
    """A scan of five products whose contracted dimension is split: five sums over all devices."""
    mesh = sharding.data_mesh()
    split = NamedSharding(mesh, P(None, "data"))

    def five(x, w):
        return jax.lax.scan(lambda x, _: (jax.lax.with_sharding_constraint(jnp.sin(x @ w), split), None), x, None, 5)[0]

    shapes = (jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=split),)
    shapes += (jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=NamedSharding(mesh, P("data"))),)
    found = hlo.totals(hlo.collectives(jax.jit(five).lower(*shapes).compile().as_text()))
    assert sum(count for count, _ in found.values()) == 5, found


BATCH, LENGTH, WIDTH, HEADS, TENSOR, RANK = 8, 384, 512, 16, 4, 2  # no dimension of a parameter is LENGTH
KINDS = {"plain": {}, "groups": {"compose": "both", "groups": TENSOR}, "all heads": {"compose": "both"}}


@functools.cache
def attention_collectives(kind, backward):
    """The bytes of each exchange of activations, in the attention of a v5e slice on a mesh fsdp 2 × tensor 4.

    Those of parameters and of their gradients, which have no dimension as long as the rows, are left out.
    """
    mesh = sharding.make_mesh([("fsdp", 2), ("tensor", TENSOR)], aot.topology_devices("v5e:2x4")[1])
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
@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_groups_of_a_device_exchange_exactly_what_plain_attention_does(backward):
    """Section 3.2: the compose of groups = tensor adds no collective."""
    plain = attention_collectives("plain", backward)
    rows = BATCH // 2 * LENGTH * WIDTH * 2  # of the output; backward, of the input's gradient too
    assert plain == [rows] * (2 if backward else 1)
    assert attention_collectives("groups", backward) == plain


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_all_heads_exchange_the_hidden_tiles_and_not_the_heads(backward):
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
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("preset=DCFormer++-405M", []), ("variant=ViT-S/16", ["model.scan=true"])],  # one layer's kernels are compiled
)
def test_models_fit_the_slices_that_their_configs_recommend(library_promotion, name, overrides):
    """Some of them; the command with --all does every one."""
    config, topology = next(pair for pair in configs.recommended() if name in re.split("[:,]", pair[0]))
    row = aot.compile_for(configs.load(config, overrides), topology)
    assert row["verdict"] == "fits"
    assert row["total"] < row["memory"]
    assert row["params"] * row["chips"] >= row["parameters"] * 4 / aot.GIB * 0.99
    assert row["collectives"]


@needs_libtpu
def test_what_does_not_fit_is_said_with_how_much(library_promotion, tmp_path, capsys):
    argv = ["--config", "lm_pile:preset=DCFormer++-405M", "--topology", "v5e:4x4", "--out", str(tmp_path / "rows.json")]
    argv.append("--config.model.implementation=reference")
    assert cli.run(aot.main, argv) == 1
    assert re.search(r"does not fit, over by \d+\.\d\d GiB", capsys.readouterr().out)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["total"] > row["memory"] == 16


BAD = {
    "topology": (["--topology", "v5e:3x5"], "is not a TPU slice"),
    "family": (["--topology", "v9:4x4"], "v5e and v6e have 1x1"),
    "mesh": (["--config.mesh=[('data',3)]"], "data 3 on 16 devices, which is not 3"),
    "left": (["--config.mesh=[('data',-1),('tensor',3)]"], "on 16 devices, which is not a multiple of 3"),
    "strategy": (["--config.sharding_strategy=fspd"], "expected ddp, fsdp"),
    "no axis": (["--config.mesh=[('data',-1)]"], "config.mesh has no axis 'fsdp'"),
    "batch": (["--config.input.batch_size=24"], "is no multiple of grad_accum 1 × fsdp 16"),
    "heads": (
        ["--config.mesh=[('fsdp',1),('tensor',16)]", "--config.model.num_heads=8"],
        "tensor 16 does not divide num_heads 8",
    ),
    "groups": (
        ["--config.mesh=[('fsdp',-1),('tensor',4)]", "--config.model.groups=2"],
        "config.model.groups=2 is not a multiple of tensor 4",
    ),
    "no topology": (["--topology="], "give --config CONFIG and --topology TOPOLOGY, or --all"),
}  # fmt: skip


@needs_libtpu
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_is_one_line_with_the_arithmetic(name, capsys, monkeypatch):
    words, message = BAD[name]
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled"))
    argv = ["--config", "lm_pile:preset=DCFormer++-405M", "--topology", "v5e:4x4", *words]
    assert cli.run(aot.main, argv) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: ")
    assert message in err


def test_without_libtpu_it_says_how_to_get_it(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no libtpu.so")

    monkeypatch.setattr(jax.experimental.topologies, "get_topology_desc", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.run(aot.main, ["--config", "vit_i1k", "--topology", "v5e:4x4"]) == 2
    assert "pip install 'dcvit[tpu]'" in capsys.readouterr().err


def test_the_table_names_model_slice_and_verdict():
    numbers = {"params": 1.0, "optimiser": 2.0, "activations": 0.5, "temporaries": 3.25, "total": 7.0, "memory": 16.0}
    row = {"config": "lm_pile:preset=X-1B,grad_accum=2", "topology": "v5e:4x4", "parameters": 1234, "verdict": "fits"}
    assert (
        aot.markdown([{**row, **numbers}])[-1]
        == "| X-1B | v5e:4x4 | 1,234 | 3.00 | 0.50 | 3.25 | 7.00 of 16.0 | fits |"
    )


def test_a_stand_in_has_the_shapes_of_the_data_it_stands_for():
    config = configs.load("lm_pile", ["model.context=64"])
    row = aot.StandIn(config)[5]
    assert {k: (v.shape, v.dtype) for k, v in row.items()} == {
        "tokens": ((65,), np.int32),
        "is_target": ((65,), np.bool_),
    }
