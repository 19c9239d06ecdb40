"""The file of the explorer: packed arrays, predictions, and names."""

import explorer_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcvit.interpret.activations import run_with_cache


@pytest.fixture(scope="module")
def image_page():
    """The page of one image, and the arrays of the model."""
    net, params, image = pages.image_model(groups=1)
    text = pages.page([pages.sample_of(0, 0, "image", net, params, image, ablate=False)])
    return text, run_with_cache(net, params, image).arrays


@pytest.mark.slow
def test_packed_arrays_are_those_of_the_model(image_page):
    text, arrays = image_page
    layer = pages.facts_of(text)["samples"][0]["layers"][1]
    found = pages.unpack(text, layer)
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

    logits, changed = last_logits(jnp.float32(1)), last_logits(jnp.float32(0))
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert [int(label) for label, _ in facts["predictions"]] == [*np.argsort(-p)[:5]]
    np.testing.assert_allclose([p for _, p in facts["predictions"]], np.sort(p)[::-1][:5], atol=1e-4)
    (found,) = [a for a in facts["ablations"] if a.get("head") == 1 and a["layer"] == 0]
    q = np.exp(changed - changed.max()) / np.exp(changed - changed.max()).sum()
    assert abs(found["change"] - (q - p)[np.argmax(p)]) < 1e-4
    assert [int(label) for label, _ in found["predictions"]] == [*np.argsort(-q)[:5]]


def test_documents_and_windows_limit_the_keys():
    net, params, tokens = pages.text_model()
    (facts,) = pages.facts_of(pages.page([pages.sample_of(0, 0, "text", net, params, tokens, ablate=False)]))["samples"]
    assert facts["oldest"] == [0] * 4 + [4] * 8
    assert [layer["window"] for layer in facts["layers"]] == [6, None]
    assert facts["causal"]


@pytest.mark.slow
def test_names_are_escaped_and_a_page_has_the_layers_that_are_named():
    net, params, tokens = pages.text_model(compose=None)
    hostile = "</script><img src=x onerror=alert(1)>"
    sample = pages.sample_of(0, 0, hostile, net, params, tokens, layers=[1], ablate=False)
    text = pages.page([sample], runs=[hostile])
    assert "<img" not in text
    assert [layer["number"] for layer in pages.facts_of(text)["samples"][0]["layers"]] == [1]
    assert pages.facts_of(text)["samples"][0]["name"] == hostile


@pytest.mark.slow
def test_activations_that_are_not_finite_are_refused_with_their_name():
    net, params, tokens = pages.text_model()
    block = params["Transformer"]["decoderblock_1"]["MultiHeadDotProductAttention_0"]
    block["post"]["w_q1"] = block["post"]["w_q1"].at[0].set(np.inf)
    with pytest.raises(FloatingPointError, match=r"block01/post/\w+ is NaN or infinite"):
        pages.sample_of(0, 0, "text", net, params, tokens)
