"""Memory of attention on GPUs by automatic choice: the largest array of a traced program, for long rows."""

import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from attention_cases import call_of
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType
from marks import exhaustive
from pallas_checks import weights_like

from dcvit.dcmha import ComposeWeights, device, plan
from dcvit.dcmha.backends.gpu import api, launch
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.segments import Segments
from dcvit.models import sharded_attention

TOKENS, HEADS, WIDTH = 32_768, 16, 64
LIMIT = HEADS * TOKENS * TOKENS // 64 * 4  # bytes: H×T×T/64 numbers of float32
BFLOAT16, FLOAT32 = jnp.bfloat16, jnp.float32
# Branches of both composes ("" for plain attention), dtype, and what differs from a causal layer of 16 key heads.
CASES = {
    "DC": ("qk", BFLOAT16, {}),
    "DC, float32": ("qk", FLOAT32, {}),
    "DC, not causal": ("qk", BFLOAT16, {"causal": False}),
    "DC, window of 256": ("qk", BFLOAT16, {"window": 256}),
    "DC, segments": ("qk", BFLOAT16, {"segments": True}),
    "DC, mask of pairs": ("qk", BFLOAT16, {"mask": (1, 1, TOKENS, TOKENS)}),
    "DC, static": ("qks", BFLOAT16, {}),
    "DC, rank 8": ("qk", BFLOAT16, {"rank": 8}),
    "DC, 4 groups": ("qk", BFLOAT16, {"groups": 4}),
    "DC, folded": ("q", BFLOAT16, {"groups": 4, "key_heads": 4}),
    "DC, heads of 256": ("qk", BFLOAT16, {"width": 256}),
    "DC, a part of the queries": ("qk", BFLOAT16, {"queries": 8192, "first_query": 24_576}),
    "DC, batch of 8": ("qk", BFLOAT16, {"batch": 8}),
    "plain": ("", BFLOAT16, {}),
    "plain, float32": ("", FLOAT32, {}),
    "plain, segments": ("", BFLOAT16, {"segments": True}),
    "plain, mask of pairs": ("", BFLOAT16, {"mask": (1, 1, TOKENS, TOKENS)}),
}


def make_call(branches, dtype, change):
    """The call of a case, of ShapeDtypeStructs."""
    change = dict(change)
    batch, queries, width = change.pop("batch", 1), change.pop("queries", TOKENS), change.pop("width", WIDTH)
    key_heads, rank = change.pop("key_heads", HEADS), change.pop("rank", 2)
    mask, segments = change.pop("mask", None), change.pop("segments", False)
    options = Options(**{"causal": True, "scale": 0.1, **change})

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = None
    if branches:
        dynamic = weights_like(array, batch, queries, TOKENS, HEADS, rank)._asdict()
        chosen = {name: x if name[0] in branches.replace("s", "") else None for name, x in dynamic.items()}
        size = HEADS // options.groups
        static = array(options.groups, size, size) if "s" in branches else None
        weights = ComposeWeights(**{**chosen, "static": static})
    kv = array(batch, TOKENS, key_heads, width)
    ids = Segments(array(batch, queries, dtype=jnp.int32), array(batch, TOKENS, dtype=jnp.int32)) if segments else None
    mask = None if mask is None else array(*mask, dtype=bool)
    return call_of(Inputs(array(batch, queries, HEADS, width), kv, kv, weights, weights, mask, ids), options)


def empty_outputs(kind, config, operands):
    """The outputs of a kernel, which is not traced: its values are in registers and in shared memory."""
    shapes = launch.output_shapes(config, kind)
    return launch.Results(**{name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()})


def arrays_of(jaxpr):
    """Yield the results of all operations of a program, also of those in loops and functions."""
    for equation in jaxpr.eqns:
        yield from (x.aval for x in equation.outvars)
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(leaf, "eqns"):
                yield from arrays_of(getattr(leaf, "jaxpr", leaf))


def measure(name, policy="trust"):
    """Return the automatic choice on a Hopper GPU, and the largest array of its forward and backward pass.

    An array of as many booleans as the caller's mask is that mask in another shape.
    """
    call = make_call(*CASES[name])
    inputs = call.inputs
    with (
        mock.patch.object(device, "platform", return_value="gpu"),
        mock.patch.object(plan, "splits_arrays", return_value=False),
        mock.patch.object(api, "launch", empty_outputs),
        mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", return_value=91000),
        plan.selecting(plan.Selection(policy)),
        unittest.TestCase().assertLogs("dcvit.dcmha", "INFO") as log,
    ):
        jaxpr = jax.make_jaxpr(lambda call, cotangent: jax.vjp(lambda x: plan.attention(x), call)[1](cotangent))(
            call, inputs.q
        )
    own = 0 if inputs.mask is None else inputs.mask.size
    arrays = [x for x in arrays_of(jaxpr.jaxpr) if not (x.dtype == bool and x.size == own)]
    choices = [
        message.split()[1] for record in log.records if (message := record.getMessage()).startswith("attention: ")
    ]
    return choices[-1], max(arrays, key=bytes_of)  # the last one is that inside of "folded"


def bytes_of(x):
    return x.size * x.dtype.itemsize


# Calls whose implementation depends on no verdict: the kernels do not support them, or cuDNN computes them.
WITHOUT_KERNEL = {
    **dict.fromkeys(
        ("DC, float32", "DC, static", "DC, rank 8", "DC, heads of 256", "DC, a part of the queries"), "blockwise"
    ),
    **dict.fromkeys((name for name in CASES if name.startswith("plain")), "blockwise"),
    **dict.fromkeys(("DC, folded", "plain"), "cudnn"),
}
DEFAULT = {"DC", "DC, segments", "DC, static", "DC, folded", "plain", "plain, float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [pytest.param(name, "trust", marks=[] if name in DEFAULT else pytest.mark.exhaustive) for name in CASES]
    + [exhaustive(name, "off") for name in ("DC", "DC, batch of 8")],
)
def test_no_automatic_choice_on_a_gpu_holds_arrays_like_the_scores_of_long_rows(name, policy):
    """With verified kernels, and without any."""
    chosen, largest = measure(name, policy)
    assert bytes_of(largest) < LIMIT * CASES[name][2].get("batch", 1), (chosen, largest)
    assert chosen == WITHOUT_KERNEL.get(name, "blockwise" if policy == "off" else "pallas_gpu")


@pytest.mark.parametrize(("queries", "implementation"), [(TOKENS - 1, None), (63, "reference")])
def test_long_rows_are_not_given_to_the_reference_on_a_mesh_of_gpus(queries, implementation):
    """Heads compose with those of another device, and the tokens cannot be split: each device computes all heads."""
    call = make_call("qk", BFLOAT16, {"queries": queries, "causal": False})
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), mock.patch.object(device, "platform", return_value="gpu"):
        placement = sharded_attention.place(call, implementation=None, dropout=None)
    assert (placement.implementation, placement.heads) == (implementation, None)
