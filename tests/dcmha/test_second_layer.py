"""The second layer of the dynamic weights as TPU kernels: interpreted, and compared with the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import relative_errors, worst
from marks import exhaustive
from pallas_checks import DETECT_RACES, watch_races

from dcvit.dcmha import check, plan
from dcvit.dcmha.backends.tpu import api, tiling
from dcvit.dcmha.backends.xla import reference
from dcvit.dcmha.compose import ComposeWeights, hidden_weights
from dcvit.dcmha.inputs import Composition, Inputs, make_call

BATCH, TOKENS, WIDTH = 16, 9, 256


def inputs_of(composition, heads, seed=0):
    """The inputs of a layer: tokens, parameters, queries, keys and values."""
    random = np.random.default_rng(seed)
    params = {
        name: {
            field: jnp.asarray(random.normal(size=shape) * (0.5 if field[1] == "2" else 0.1), jnp.float32)
            for field, (shape, _) in composition.parameters(heads, WIDTH).items()
        }
        for name in composition.names
    }
    arrays = [random.normal(size=(BATCH, TOKENS, WIDTH)) for _ in range(4)]
    x, *qkv = (jnp.asarray(array, jnp.float32) for array in arrays)
    return x, params, *(each.reshape(BATCH, TOKENS, heads, -1) for each in qkv)


def call_of(composition, heads, x, params, q, k, v):
    hidden = hidden_weights(x, params, sides="qk", heads=heads, gelu="tanh")
    weights = hidden.weights()
    for name, some in params.items():
        weights[name] |= {"static": some["static"]} if "static" in some else {}
    pre, post = (ComposeWeights(**weights[name]) if name in weights else None for name in ("pre", "post"))
    return make_call(Inputs(q, k, v, pre, post, hidden=hidden), composition)


@pytest.mark.parametrize(
    ("heads", "composition"),
    [
        (4, Composition("both", groups=2, static=True, rank=1)),
        exhaustive(8, Composition("post", gate=False)),
        exhaustive(8, Composition("pre", branches="k")),
    ],
)
def test_outputs_and_gradients_equal_the_reference(monkeypatch, heads, composition):
    """Also those of the parameters of both layers, without races."""
    watched, args = watch_races(monkeypatch), inputs_of(composition, heads)
    cotangent = jnp.cos(args[2])

    def run(attend, *args):
        out, pull = jax.vjp(lambda *args: attend(call_of(composition, heads, *args)), *args)
        return out, pull(cotangent)

    def kernels(call):
        assert tiling.make_config(call.inputs, call.options, tiling.vmem_limit()).has_hidden
        return api.run(call, interpret=DETECT_RACES)

    found, right = (jax.jit(lambda *args, a=attend: run(a, *args))(*args) for attend in (kernels, reference.run))
    errors = relative_errors(found, right)
    assert worst(errors) < 2e-5, errors
    assert len(watched) == 4
    assert not any(kernel.races_found for kernel in watched)


def test_a_check_of_the_kernels_starts_from_the_hidden_units():
    composition = Composition("both", groups=2, static=True, rank=1)
    args = inputs_of(composition, 4)
    call = call_of(composition, 4, *args)
    case = plan.make_case(["pallas_tpu", "reference"], call)
    assert not {name for name in case.arrays if name.startswith(("pre.", "post.")) and not name.endswith("static")}
    arrays = dict(zip(case.arrays, jax.tree.leaves(call.inputs.once()), strict=True))
    same = check.call_of(arrays, case.options)
    jax.tree.map(np.testing.assert_array_equal, same, call)
