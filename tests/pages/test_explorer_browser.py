"""The explorer in a real browser: its numbers are the library's, and nothing is requested."""

import functools
import itertools
import json

import explorer_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import HEADS

from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.interpret.circuits import pair_terms

pytestmark = pytest.mark.exhaustive
CLOSE = dict(rtol=2e-3, atol=2e-3)
STAGES = ("scores", "composed_scores", "weights", "composed_weights")
MODELS = {
    "image": pages.image_model,
    "plain image": functools.partial(pages.image_model, compose=None, groups=1, static=False),
    "text": pages.text_model,
}
# The branches and the heads that are switched off, and the factors that are 0 then.
SWITCHES = {
    "pre: query projection": ({"pre.query projection"}, set(), {"pre/q2"}),
    "pre: gates": ({"pre.query gate", "pre.key gate"}, set(), {"pre/qg", "pre/kg"}),
    "post: key projection": ({"post.key projection"}, set(), {"post/k2"}),
    "static": ({"pre.static", "post.static"}, set(), {"pre/static", "post/static"}),
    "a head": (set(), {1}, set()),
}


@functools.cache
def make(name):
    """A model of the page with its parameters and inputs."""
    return MODELS[name]()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The browser with a page of three samples of two runs."""
    samples = [pages.sample_of(i, int(name == "plain image"), name, *make(name)) for i, name in enumerate(MODELS)]
    path = tmp_path_factory.mktemp("page") / "explore.html"
    path.write_text(pages.page(samples))
    browser.open(path)
    browser.value("explorer.ready.then(() => 1)")
    return browser


def change(page, name, **state):
    """Set the state of the page, with a sample by name and no switches unless they are given, and wait for it."""
    state = {"sample": [*MODELS].index(name), "layer": 0, "key": 0, "off": set(), "ablated": set(), **state}
    words = [f"{k}: new Set({json.dumps([*v])})" if isinstance(v, set) else f"{k}: {v}" for k, v in state.items()]
    page.value(f"explorer.set({{{', '.join(words)}}}).then(() => 1)")


def assert_equal(page, arrays, layer, query):
    """Assert that the page shows the numbers of the library for a query."""
    lines = np.array(page.value("explorer.table()"))
    heads, keys = lines[:, 2].astype(int), lines[:, 3].astype(int)
    for stage, found in zip(STAGES, lines[:, 4:].T, strict=True):
        expected = np.asarray(arrays[f"block{layer:02d}/{stage}"])[0, heads, query, keys]
        np.testing.assert_allclose(found, expected, **CLOSE, err_msg=stage)
    weights = np.array(arrays[f"block{layer:02d}/weights"])[0, :, query]
    weights[heads, keys] = 0
    assert not weights.any()  # the page shows all that are not 0
    output = np.asarray(arrays[f"block{layer:02d}/heads"])[0, query].reshape(-1)
    np.testing.assert_allclose(page.value("explorer.output()"), output, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_all_stages_are_those_of_the_library(page, name):
    arrays = run_with_cache(*make(name)).arrays
    for layer, query in itertools.product((0, 1), range(arrays["block00/scores"].shape[2])):
        change(page, name, layer=layer, query=query)
        assert_equal(page, arrays, layer, query)


def arrays_without(name, ablated, zeros):
    """The arrays of a model whose layer 1 lacks heads and factors; all switches share one compiled program."""
    heads = np.ones((1, HEADS, 1, 1), np.float32)
    heads[:, [*ablated]] = 0
    gates = dict.fromkeys(("scores", "weights", "composed_weights"), heads)
    gates |= {factor: np.float32(factor not in zeros) for *_, each in SWITCHES.values() for factor in each}
    hooks = {f"block01/{array}": jax.tree_util.Partial(jnp.multiply, gate) for array, gate in gates.items()}
    return run_with_cache(*make(name), hooks).arrays


@pytest.mark.parametrize(("name", "switch"), [*zip(itertools.cycle(["image", "text"]), SWITCHES, strict=False)])
def test_switches_recompute_the_layer_as_hooks_do(page, name, switch):
    off, ablated, zeros = SWITCHES[switch]
    change(page, name, layer=1, query=6, off=off, ablated=ablated)
    arrays, plain = arrays_without(name, ablated, zeros), arrays_without(name, set(), set())
    assert_equal(page, arrays, 1, 6)
    before, after = (np.asarray(some["block01/heads"])[0, 6] for some in (plain, arrays))
    changes = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
    shown = page.value("[...document.querySelectorAll('#effects tbody tr')].map(r => r.cells[2].textContent)")
    np.testing.assert_allclose([float(text.split()[0]) / 100 for text in shown[:-1]], changes, **CLOSE)


@pytest.mark.parametrize("name", ["image", "text"])
def test_maps_and_terms_of_a_pair_are_those_of_the_library(page, name):
    net, params, inputs = make(name)
    arrays = run_with_cache(net, params, inputs).arrays
    query, key = 9, 6
    change(page, name, layer=1, query=query, key=key)
    for where, before, after in (("pre", *STAGES[:2]), ("post", *STAGES[2:])):
        terms = pair_terms(compose_weights_of(arrays, 1, where), query, key, groups=net.groups)
        found = page.value(f"Object.entries(explorer.terms('{where}')).map(([k, v]) => [k, [...v]])")
        assert [term for term, _ in found] == [*terms]
        for term, values in found:
            np.testing.assert_allclose(values, np.asarray(terms[term]).reshape(-1), **CLOSE, err_msg=term)
        rows = f"[...document.querySelectorAll('#{where}-terms tbody tr')]"
        cells = page.value(f"{rows}.map(r => [...r.cells].slice(1).map(c => parseFloat(c.textContent)))")
        a, composed = (np.asarray(arrays[f"block01/{stage}"])[0, :, query, key] for stage in (before, after))
        columns = [a, *(a @ np.asarray(terms[term]) for term in [*terms][1:]), composed]
        np.testing.assert_allclose(np.array(cells).T, columns, **CLOSE)


def test_everything_is_shown_without_errors_and_requests(page):
    page.value("document.getElementById('switches').open = true")
    for sample, name in enumerate(MODELS):
        change(page, name, other=(sample + 1) % 3)
        assert page.value("[...document.querySelectorAll('canvas, svg')].every(e => e.getAttribute('aria-label'))")
    assert page.value("[...document.querySelectorAll('section')].filter(s => !s.hidden).length") == 8
    assert page.messages() == []
    assert page.requests() == [page.value("location.href.split('#')[0]")]
