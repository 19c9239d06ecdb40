"""Collectives are read from the text of a compiled program."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcvit.parallel import hlo, sharding

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


def test_collectives_are_counted_as_often_as_they_run():
    assert hlo.totals(hlo.collectives(TEXT)) == {
        "all-reduce": (1, 3 * 4 + 5),
        "all-gather": (12, 12 * 32),
        "reduce-scatter": (1, 32),
        "collective-permute": (12, 12 * 32),
    }


def test_operations_of_shard_map_count_although_they_share_a_channel():
    """XLA splits some of them into several instructions, which have the number of a chain."""
    mapped = 'channel_id=1, metadata={op_name="jit(f)/shard_map/all_gather"}'
    split = f'%n = f32[2]{{0}} all-gather(%x), frontend_attributes={{chain_id="0"}}, {mapped}'
    lines = [f"%m{i} = f32[{i}]{{0}} all-gather(%x), {mapped}" for i in (1, 4)]
    text = "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", *(f"  {x}" for x in (*lines, split, split)), "}"])
    assert hlo.totals(hlo.collectives(text)) == {"all-gather": (3, 4 + 16 + 8)}


def test_the_length_of_a_loop_is_what_the_compiler_states():
    """On GPUs the condition of a loop may be a fusion, whose constant is in another computation."""
    stated = TEXT.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.totals(hlo.collectives(stated))["all-gather"] == (7, 7 * 32)


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
