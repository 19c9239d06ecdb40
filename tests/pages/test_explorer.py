"""The file of the explorer: packed arrays, predictions, and names."""

import explorer_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from dcvit.interpret.activations import run_with_cache


@pytest.mark.slow
def test_packed_arrays_are_those_of_the_model():
    net, params, image = pages.image_model(groups=1)
    text = pages.page([pages.sample_of(0, 0, "image", net, params, image, ablate=False)])
    layer = pages.facts_of(text)["samples"][0]["layers"][1]
    found, arrays = pages.unpack(text, layer), run_with_cache(net, params, image).arrays
    assert layer["number"] == 1
    assert {"q", "k", "v", "pre.static", "pre.q1", "post.kg"} <= found.keys()
    for name, x in found.items():
        expected = np.asarray(arrays[f"block01/{name.replace('.', '/')}"])
        expected = expected if name.endswith("static") else expected[0]
        np.testing.assert_allclose(x, expected, rtol=2**-16, atol=0, err_msg=name)


@pytest.mark.exhaustive
def test_predictions_are_the_five_best_and_change_with_ablations():
    net, params, tokens = pages.text_model()
    (facts,) = pages.facts_of(pages.page([pages.sample_of(0, 0, "text", net, params, tokens)]))["samples"]

    def last_logits(kept):
        """The logits of the last token if head 1 of layer 0 is multiplied by `kept`."""
        scale = jax.tree_util.Partial(lambda kept, x: x.at[:, 1].multiply(kept), kept)
        hooks = {f"block00/{name}": scale for name in ("scores", "weights", "composed_weights")}
        return np.asarray(run_with_cache(net, params, tokens, hooks).output[0, -1], np.float64)

    p, q = (scipy.special.softmax(last_logits(jnp.float32(kept))) for kept in (1, 0))
    assert [int(label) for label, _ in facts["predictions"]] == [*np.argsort(-p)[:5]]
    np.testing.assert_allclose([p for _, p in facts["predictions"]], np.sort(p)[::-1][:5], atol=1e-4)
    (found,) = [a for a in facts["ablations"] if a.get("head") == 1 and a["layer"] == 0]
    assert abs(found["change"] - (q - p)[np.argmax(p)]) < 1e-4
    assert [int(label) for label, _ in found["predictions"]] == [*np.argsort(-q)[:5]]


@pytest.mark.slow
def test_names_are_escaped_and_documents_and_windows_limit_the_keys_of_named_layers():
    net, params, tokens = pages.text_model()
    hostile = "</script><img src=x onerror=alert(1)>"
    text = pages.page([pages.sample_of(0, 0, hostile, net, params, tokens, layers=[1], ablate=False)], runs=[hostile])
    assert "<img" not in text
    (facts,) = pages.facts_of(text)["samples"]
    assert (facts["name"], facts["causal"], facts["oldest"]) == (hostile, True, [0] * 4 + [4] * 8)
    assert [(layer["number"], layer["window"]) for layer in facts["layers"]] == [(1, None)]
    sample = pages.sample_of(0, 0, "text", net, params, tokens, layers=[0], ablate=False)
    assert sample.facts["layers"][0]["window"] == 6


@pytest.mark.slow
def test_activations_that_are_not_finite_are_refused_with_their_name():
    net, params, tokens = pages.text_model()
    block = params["Transformer"]["decoderblock_1"]["MultiHeadDotProductAttention_0"]
    block["post"]["w_q1"] = block["post"]["w_q1"].at[0].set(np.inf)
    with pytest.raises(FloatingPointError, match=r"block01/post/\w+ is NaN or infinite"):
        pages.sample_of(0, 0, "text", net, params, tokens)
