"""Attention of one query, compared with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import on_arrays, output_and_gradients, random_case, relative_errors, worst
from marks import exhaustive

from dcvit.dcmha.backends.xla import decode, reference
from dcvit.dcmha.inputs import UnsupportedError

CASES = {
    "one key": {"keys": 1},
    "masks, batch 5": {"keys": 21, "batch": 5, "mask": (5, 1, 1, 21)},
    "groups, shared keys": {"keys": 33, "heads": 8, "key_heads": 2, "groups": 2, "branches": "qkpgs"},
    "one key head, plain": {"keys": 16, "heads": 4, "key_heads": 1, "branches": None},
    "static": {"keys": 9, "heads": 4, "branches": "s", "mask": (1, 1, 1, 9)},
    "key-wise, rank 3": {"keys": 40, "branches": "kpg", "rank": 3},
    "window": {"keys": 5, "branches": "g", "window": 2},
    "composed window": {"keys": 9, "causal": True, "first_query": 8, "compose_window": 4},
    "post only": {"keys": 18, "branches": None, "post": "qkpg"},
}
IN_EXHAUSTIVE = ("masks, batch 5", "one key head, plain")  # other cases cover them
attention = on_arrays(decode.run)


@functools.partial(jax.jit, static_argnames=("causal", "window", "groups", "scale", "first_query", "compose_window"))
def expected(*args, **options):
    return on_arrays(reference.run)(*args, **options)


def compare(*cases, **options):
    """Return the output of each of some arguments, and its largest error relative to the reference's largest value."""
    attend = jax.jit(lambda mask, *a: attention(*a, **options | {"mask": mask}))
    for args in cases:
        out = attend(options["mask"], *args)
        assert out.dtype == args[0].dtype
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
        yield out, worst(relative_errors(out, expected(*wide, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [exhaustive(name) if name in IN_EXHAUSTIVE else name for name in CASES])
def test_output_equals_the_reference(name):
    args, options = random_case(1, **CASES[name])
    ((_, error),) = compare(args, **options)
    assert error < 2e-5


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    args, options = random_case(1, **CASES["groups, shared keys"], dtype=jnp.bfloat16)
    ((_, error),) = compare(args, **options)
    assert error < 2e-2


@pytest.mark.slow
def test_gradients_equal_the_reference():
    args, options = random_case(1, **CASES["groups, shared keys"])
    right = output_and_gradients(on_arrays(reference.run), args, options)
    errors = relative_errors(output_and_gradients(attention, args, options), right)
    assert worst(errors) < 2e-5, errors


@pytest.mark.slow
def test_masked_keys_have_no_effect_and_a_fully_masked_example_is_zero():
    args, options = random_case(1, **CASES["masks, batch 5"])
    mask = options["mask"].at[3].set(False).at[..., 0].set(False)
    options["mask"] = mask
    other = jax.tree.map(lambda x: x.at[:, 0].add(3) if x.shape[1] == mask.shape[3] else x, args)
    (out, error), (changed, _) = compare(args, other, **options)
    assert error < 2e-5
    assert not np.asarray(out[3]).any()
    np.testing.assert_array_equal(changed, out)


def test_several_queries_are_refused():
    args, options = random_case(2, 64)
    with pytest.raises(UnsupportedError, match="one query, found 2"):
        attention(*args, **options)
