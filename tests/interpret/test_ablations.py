"""Ablated outputs are those of hooks, and of a model without compositions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import logits_of, make_lm, make_tokens
from test_attention_maps import block

from dcvit.interpret.ablations import Ablation, ablated_outputs
from dcvit.interpret.activations import run_with_cache

CASES = {
    Ablation(1, head=2): {
        f"block01/{name}": lambda x: x.at[:, 2].set(0) for name in ("scores", "weights", "composed_weights")
    },
    Ablation(0, None, "post", "key projection"): {"block00/post/k2": jnp.zeros_like},
}


@pytest.mark.slow
def test_ablated_outputs_are_those_of_hooks_and_others_are_refused():
    net, params = make_lm(compose="both")
    tokens = make_tokens()
    found = ablated_outputs(net, params, tokens, [*CASES, Ablation(None, None, "both", "all")])
    assert found.shape == (3, 2, net.vocab_size)
    for logits, hooks in zip(found[:2], CASES.values(), strict=True):
        expected = run_with_cache(net, params, tokens, hooks).output[:, -1]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    plain = jax.tree.map(lambda x: x, params)
    for layer in range(net.depth):
        block(plain, layer).pop("pre"), block(plain, layer).pop("post")
    expected = logits_of(net.clone(compose=None), plain, tokens)[:, -1]
    np.testing.assert_allclose(found[2], expected, rtol=1e-4, atol=1e-5)
    for absent in (Ablation(0, None, "pre", "static"), Ablation(0, 1, "pre", "static"), Ablation(2, 0)):
        with pytest.raises(ValueError, match=r"the model has nothing that Ablation\(layer="):
            ablated_outputs(net, params, tokens, [absent])
