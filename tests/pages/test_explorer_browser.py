"""The explorer in a real browser: its numbers are the library's, and nothing is requested."""

import itertools

import explorer_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explorer_driver import MODELS, change, make, opened
from small_models import HEADS

from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.interpret.circuits import pair_terms
from dcvit.interpret.contributions import average_contributions
from dcvit.pages.explorer import average_facts

pytestmark = pytest.mark.exhaustive
CLOSE = dict(rtol=2e-3, atol=2e-3)
STAGES = ("scores", "composed_scores", "weights", "composed_weights")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A page of three samples of two runs, with averages over data and head diversity."""
    net, params, image = make("image")
    samples = [pages.sample_of(i, int(name == "plain image"), name, *make(name)) for i, name in enumerate(MODELS)]
    averages = average_facts(average_contributions(net, params, [image]), "test")
    path = tmp_path_factory.mktemp("page") / "explore.html"
    curve = {"qk": [0.2, 0.6, 1.0], "ov": [0.3, 0.7, 1.0]}
    path.write_text(pages.page(samples, averages=averages, diversity=curve))
    return path


def table(browser):
    """The four stages of the current query, H S, zero where a key is not seen."""
    lines = np.array(browser.value("explorer.table()"))
    heads, keys = lines[:, 2].astype(int), lines[:, 3].astype(int)
    return heads, keys, lines[:, 4:]


def assert_equal(browser, arrays, layer, query):
    """Assert that the page shows the numbers of the library for a query."""
    heads, keys, found = table(browser)
    for i, name in enumerate(STAGES):
        expected = np.asarray(arrays[f"block{layer:02d}/{name}"])[0, heads, query, keys]
        np.testing.assert_allclose(found[:, i], expected, **CLOSE, err_msg=name)
    seen = np.zeros(arrays[f"block{layer:02d}/scores"].shape[1::2], bool)
    seen[heads, keys] = True
    assert not np.asarray(arrays[f"block{layer:02d}/weights"])[0, :, query][~seen].any()
    output = np.asarray(arrays[f"block{layer:02d}/heads"])[0, query].reshape(-1)
    np.testing.assert_allclose(browser.value("explorer.output()"), output, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_all_stages_are_those_of_the_library(browser, file, name):
    opened(browser, file)
    number = [*MODELS].index(name)
    arrays = run_with_cache(*make(name)).arrays
    length = arrays["block00/scores"].shape[2]
    for layer, query in itertools.product((0, 1), range(length)):
        change(browser, sample=number, layer=layer, query=query)
        assert_equal(browser, arrays, layer, query)


# The branches and the heads that are switched off, and the factors that are 0 then.
SWITCHES = {
    "pre: query projection": ({"pre.query projection"}, set(), {"pre/q2"}),
    "pre: gates": ({"pre.query gate", "pre.key gate"}, set(), {"pre/qg", "pre/kg"}),
    "post: key projection": ({"post.key projection"}, set(), {"post/k2"}),
    "static": ({"pre.static", "post.static"}, set(), {"pre/static", "post/static"}),
    "a head": (set(), {1}, set()),
}


def arrays_without(name, ablated, zeros):
    """The arrays of a model whose layer 1 lacks heads and factors; all switches share one compiled program."""
    heads = np.ones((1, HEADS, 1, 1), np.float32)
    heads[:, [*ablated]] = 0
    gates = dict.fromkeys(("scores", "weights", "composed_weights"), heads)
    gates |= {factor: np.float32(factor not in zeros) for *_, each in SWITCHES.values() for factor in each}
    hooks = {f"block01/{array}": jax.tree_util.Partial(jnp.multiply, gate) for array, gate in gates.items()}
    return run_with_cache(*make(name), hooks).arrays


@pytest.mark.parametrize(("name", "switch"), [*zip(itertools.cycle(["image", "text"]), SWITCHES, strict=False)])
def test_switches_recompute_the_layer_as_hooks_do(browser, file, name, switch):
    off, ablated, zeros = SWITCHES[switch]
    opened(browser, file)
    change(browser, sample=[*MODELS].index(name), layer=1, query=6, off=off, ablated=ablated)
    arrays, plain = arrays_without(name, ablated, zeros), arrays_without(name, set(), set())
    assert_equal(browser, arrays, 1, 6)
    before, after = (np.asarray(some["block01/heads"])[0, 6] for some in (plain, arrays))
    changes = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
    shown = browser.value("[...document.querySelectorAll('#effects tbody tr')].map(r => r.cells[2].textContent)")
    np.testing.assert_allclose([float(text.split()[0]) / 100 for text in shown[:-1]], changes, **CLOSE)


@pytest.mark.parametrize("name", ["image", "text"])
def test_maps_and_terms_of_a_pair_are_those_of_the_library(browser, file, name):
    opened(browser, file)
    net, params, inputs = make(name)
    arrays = run_with_cache(net, params, inputs).arrays
    query, key = 9, 6
    change(browser, sample=[*MODELS].index(name), layer=1, query=query, key=key)
    for where, before, after in (("pre", "scores", "composed_scores"), ("post", "weights", "composed_weights")):
        terms = pair_terms(compose_weights_of(arrays, 1, where), query, key, groups=net.groups)
        found = browser.value(f"Object.entries(explorer.terms('{where}')).map(([k, v]) => [k, [...v]])")
        assert [term for term, _ in found] == [*terms]
        for term, values in found:
            np.testing.assert_allclose(values, np.asarray(terms[term]).reshape(-1), **CLOSE, err_msg=term)
        rows = f"[...document.querySelectorAll('#{where}-terms tbody tr')]"
        cells = browser.value(f"{rows}.map(r => [...r.cells].slice(1).map(c => parseFloat(c.textContent)))")
        a = np.asarray(arrays[f"block01/{before}"])[0, :, query, key]
        columns = [a, *(a @ np.asarray(terms[term]) for term in [*terms][1:])]
        columns.append(np.asarray(arrays[f"block01/{after}"])[0, :, query, key])
        np.testing.assert_allclose(np.array(cells).T, columns, **CLOSE)


def test_everything_is_shown_without_errors_and_requests(browser, file):
    opened(browser, file)
    browser.value("document.getElementById('switches').open = true")
    for sample in range(3):
        change(browser, sample=sample, other=(sample + 1) % 3)
        assert browser.value("[...document.querySelectorAll('canvas, svg')].every(e => e.getAttribute('aria-label'))")
    sections = browser.value("[...document.querySelectorAll('section')].filter(s => !s.hidden).length")
    assert sections == 9
    assert browser.messages() == []
    assert browser.requests() == [file.as_uri()]
