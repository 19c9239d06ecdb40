"""The explorer in a real browser: its numbers are the library's, every control works, nothing is requested."""

import io
import itertools
import json
import time

import explorer_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explorer_driver import MODELS, change, make, opened
from PIL import Image
from small_models import HEADS

from dcvit.interpret.activations import compose_weights_of, run_with_cache
from dcvit.interpret.circuits import pair_terms

pytestmark = pytest.mark.exhaustive
CLOSE = dict(rtol=2e-3, atol=2e-3)
STAGES = ("scores", "composed_scores", "weights", "composed_weights")


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


def test_the_page_opens_on_the_largest_loan_of_weights_between_two_tokens(browser, file):
    browser.open(file)
    browser.value("explorer.ready.then(() => 1)")
    found = browser.value("facts.samples[0].contributions.filter(l => l.where === 'post' && l.query !== l.key)")
    largest = max(found, key=lambda one: abs(one["amount"]))
    names = {"layer": "layer", "query": "query", "key": "key", "head": "to_head"}
    assert {name: browser.value(f"explorer.state.{name}") for name in names} == {
        name: largest[key] for name, key in names.items()
    }


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


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", ["image", "text"])
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
    for query, key in ((6, 5), (9, 6)):
        change(browser, sample=[*MODELS].index(name), layer=1, query=query, key=key)
        for where, before, after in (("pre", "scores", "composed_scores"), ("post", "weights", "composed_weights")):
            terms = pair_terms(compose_weights_of(arrays, 1, where), query, key, groups=net.groups)
            found = browser.value(f"Object.entries(explorer.terms('{where}')).map(([k, v]) => [k, [...v]])")
            assert [term for term, _ in found] == [*terms]
            for term, values in found:
                np.testing.assert_allclose(values, np.asarray(terms[term]).reshape(-1), **CLOSE, err_msg=term)
            cells = browser.value(
                f"[...document.querySelectorAll('#{where}-terms tbody tr')].map(r => [...r.cells].slice(1).map(c => "
                "parseFloat(c.textContent)))"
            )
            a = np.asarray(arrays[f"block01/{before}"])[0, :, query, key]
            columns = [a, *(a @ np.asarray(terms[term]) for term in [*terms][1:])]
            columns.append(np.asarray(arrays[f"block01/{after}"])[0, :, query, key])
            np.testing.assert_allclose(np.array(cells).T, columns, **CLOSE)


def test_the_pixels_of_a_map_follow_the_numbers(browser, file):
    """Of the plain image's weights, where yellow is the largest: patches in the order of their numbers."""
    opened(browser, file)
    change(browser, sample=2, layer=1, query=11)
    heads, keys, found = table(browser)
    (largest,) = keys[heads == 0][[np.argmax(found[heads == 0, 2])]]
    length = int(keys.max()) + 1
    pixel = f"""(() => {{
      const c = document.querySelector('#heads canvas[data-head="0"][data-stage="2"]'), cell = c.width / {length};
      return [...c.getContext('2d').getImageData((KEY + 0.5) * cell, 11.5 * cell, 1, 1).data];
    }})()"""
    green = {key: browser.value(pixel.replace("KEY", str(key)))[1] for key in range(4, length)}
    assert max(green, key=green.get) == largest


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_everything_is_shown_inside_the_window_without_errors_and_requests(browser, file, width, scheme):
    opened(browser, file, width=width, scheme=scheme)
    browser.value("document.getElementById('switches').open = true")
    for sample in range(3):
        change(browser, sample=sample, other=(sample + 1) % 3)
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("[...document.querySelectorAll('canvas, svg')].every(e => e.getAttribute('aria-label'))")
        outside = f"""[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg, #switches') &&
            e.getBoundingClientRect().right > {width}).map(e => e.outerHTML.slice(0, 90))"""
        assert browser.value(outside) == []
    sections = browser.value("[...document.querySelectorAll('section')].filter(s => !s.hidden).length")
    assert sections == 10
    assert browser.messages() == []
    assert browser.requests() == [file.as_uri()]


def test_every_control_works_and_none_is_an_error(browser, file):
    opened(browser, file)
    browser.value("document.getElementById('switches').open = true")
    controls = "[...document.querySelectorAll('main input, main select, main button')].map(e => e.id)"
    for control in browser.value(controls):
        if control in ("png", "csv") or not control:
            continue
        browser.value(f"""(async () => {{
          const e = document.getElementById({json.dumps(control)});
          if (!e) return;
          if (e.tagName === 'SELECT') e.selectedIndex = e.options.length - 1;
          if (e.type === 'number') e.value = 1;
          if (e.type === 'range') e.value = e.max;
          if (['checkbox', 'button'].includes(e.type)) e.click();
          else for (const name of ['input', 'change']) e.dispatchEvent(new Event(name, {{bubbles: true}}));
          await explorer.set({{}});
        }})()""")
    for selector in ("#contributions button", "#tokens button", "#heads canvas", "#picture"):
        count = browser.value(f"document.querySelectorAll('{selector}').length")
        assert count, selector
        browser.value(f"document.querySelectorAll('{selector}')[{count - 1}].click()")
    assert browser.value("explorer.state.other") == 2
    assert browser.messages() == []
    assert len(browser.requests()) == 1


def test_switches_work_after_a_reset(browser, file):
    opened(browser, file)
    change(browser, sample=2, layer=0)
    for control, name in (("ablated-1", "ablated"), ("branches-pre-key-gate", "off")):
        for expected in (1, 0, 1):
            browser.value(f"document.getElementById('{control}').click()")
            change(browser)
            assert browser.value(f"explorer.state.{name}.size") == expected
        browser.value("document.getElementById('reset').click()")
        change(browser)
        browser.value(f"document.getElementById('{control}').click()")
        change(browser)
        assert browser.value(f"explorer.state.{name}.size") == 1


def test_marks_stay_inside_a_smaller_input(browser, tmp_path):
    file = tmp_path / "page.html"
    images = (pages.image_model(), pages.image_model(size=(8, 8)))
    samples = [pages.sample_of(i, 0, f"{i}", *model, ablate=False) for i, model in enumerate(images)]
    file.write_text(pages.page(samples))
    opened(browser, file)
    change(browser, query=20, key=22, other=1)
    ends = "parseFloat(m.style.top) + parseFloat(m.style.height)"
    assert max(browser.value(f"[...document.querySelectorAll('#comparison .mark')].map(m => {ends})")) <= 100.1


def test_numbers_and_picture_are_saved(browser, file, tmp_path):
    opened(browser, file)
    change(browser, sample=0, layer=1, query=8)
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for control in ("csv", "png"):
        browser.value(f"document.getElementById('{control}').click()")
    for _ in range(100):
        saved = {path.suffix: path for path in tmp_path.iterdir()}
        if {".csv", ".png"} <= saved.keys():
            break
        time.sleep(0.1)
    assert {path.name for path in saved.values()} == {"layer1-query8.csv", "layer1-query8.png"}
    rows = np.loadtxt(io.StringIO(saved[".csv"].read_text()), delimiter=",", skiprows=1)
    np.testing.assert_allclose(rows, browser.value("explorer.table()"), rtol=1e-6)
    header = saved[".csv"].read_text().splitlines()[0]
    assert header == "layer,query,head,key,scores,composed_scores,weights,composed_weights"
    picture = np.asarray(Image.open(saved[".png"]).convert("RGB"))
    assert picture.shape[1] > 400
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50


@pytest.fixture(scope="module")
def planted_file(tmp_path_factory):
    """The page of a model in which head 0 contributes to head 2 for one token only."""
    path = tmp_path_factory.mktemp("planted") / "explore.html"
    path.write_text(pages.page([pages.sample_of(0, 0, "planted", *pages.planted(), ablate=False)]))
    return path


def contributions(browser, column):
    """The texts in a column of the table of contributions."""
    names = "[...document.querySelectorAll('#contributions thead th')].map(c => c.textContent)"
    at = browser.value(names).index(column)
    return browser.value(
        f"[...document.querySelectorAll('#contributions tbody tr')].map(r => r.cells[{at}].textContent)"
    )


ANSWERS = {
    "from": ["head 0"],
    "to": ["head 2"],
    "layer": ["layer 1"],
    "composition": ["post"],
    "branch": ["key projection"],
    "key": ["4 “t5”"],
}


def test_the_text_of_the_page_answers_questions_about_a_planted_model(browser, planted_file):
    opened(browser, planted_file)
    for column, answer in ANSWERS.items():
        assert contributions(browser, column) == answer


def test_a_planted_head_borrows_for_one_token_only(browser, planted_file):
    """For every key of a query, the table of terms shows the contribution at the planted token and zeros elsewhere."""
    opened(browser, planted_file)
    query = int(contributions(browser, "query")[0].split()[0])
    for key in range(query + 1):
        change(browser, layer=1, query=query, key=key)
        names = browser.value("[...document.querySelectorAll('#post-terms thead th')].map(c => c.textContent)")
        rows = "[...document.querySelectorAll('#post-terms tbody tr')]"
        cells = np.array(browser.value(f"{rows}.map(r => [...r.cells].slice(1).map(c => parseFloat(c.textContent)))"))
        terms = cells[:, 1:-1]  # without weights and composed weights
        expected = np.zeros_like(terms)
        expected[2, names[2:-1].index("key projection")] = terms[2, names[2:-1].index("key projection")]
        np.testing.assert_array_equal(terms, expected)
        assert expected.any() == (key == 4)
