"""The explorer's keyboard and links in a real browser: every control is reached, and every link shows what it says."""

import json
import time

import pytest
from explorer_driver import change, opened, press

pytestmark = pytest.mark.exhaustive


def test_keys_move_through_queries_layers_and_heads(browser, file):
    opened(browser, file)
    change(browser, sample=2, layer=0, query=3, key=2, head=1, off={"pre.key gate"})
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "]", ".", "r"):
        press(browser, key)
    state = browser.value("({...explorer.state, off: explorer.state.off.size})")
    assert [state[name] for name in ("layer", "query", "key", "head", "off")] == [1, 5, 3, 2, 0]
    dark = browser.value("document.documentElement.dataset.theme")
    press(browser, "t")
    assert browser.value("document.documentElement.dataset.theme") not in (None, dark)


def tab_stops(browser, limit=400):
    """The elements that the tab key reaches, by id or class and text, with the width of the outline of each."""
    found = []
    for _ in range(limit):
        press(browser, "Tab")
        stop = browser.value("""(() => {
          const e = document.activeElement, {id, className, dataset, tagName} = e;
          if (tagName === 'BODY') return null;
          const name = id || dataset.stage || className || tagName, holder = e.parentElement.closest('[id]')?.id;
          return [holder, name, parseFloat(getComputedStyle(e).outlineWidth), getComputedStyle(e).outlineStyle];
        })()""")
        if stop is None:
            return found
        found.append(stop)
    raise AssertionError("the focus does not leave the page")


@pytest.mark.parametrize("sample", [0, 2])
def test_the_tab_key_reaches_every_control_and_shows_the_focus(browser, file, sample):
    opened(browser, file)
    change(browser, sample=sample, head=1)
    browser.value("document.getElementById('switches').open = true")
    stops = tab_stops(browser)
    assert all(width >= 2 and style == "solid" for *_, width, style in stops)
    names = {name for _, name, *_ in stops}
    controls = browser.value(
        "[...document.querySelectorAll('#controls input, #controls select, #controls button')].map(e => e.id)"
    )
    assert {*controls, "other"} <= names
    assert [name for holder, name, *_ in stops if holder == "heads"] == ["0", "1", "2", "3"]  # stages of the head
    assert [holder for holder, name, *_ in stops if holder == "tokens"] == ["tokens"] * (sample == 2)
    assert ("picture" in names) == (sample == 0)
    assert sum(name == "scroll tall" for _, name, *_ in stops) == 2


def test_arrows_move_in_the_map_that_has_the_focus(browser, file):
    opened(browser, file)
    point = "[explorer.state.layer, explorer.state.query, explorer.state.key]"
    at = lambda: browser.value(f"({point})")  # noqa: E731
    change(browser, sample=0, layer=0, query=8, key=8)  # a grid of 4 columns, after 3 tokens in a row of their own
    browser.value('document.querySelector(\'#heads [data-head="0"][data-stage="2"]\').focus()')
    for key, expected in (
        ("ArrowDown", 12), ("ArrowRight", 13), ("ArrowRight", 14), ("ArrowRight", 14), ("ArrowUp", 10), ("ArrowUp", 6),
        ("ArrowUp", 6), ("ArrowLeft", 5), ("ArrowUp", 2), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 4),
    ):  # fmt: skip
        press(browser, key)
        assert at() == [0, 8, expected], key
    press(browser, "]")
    focused = "[document.activeElement.dataset.head, document.activeElement.dataset.stage]"
    assert browser.value(focused) == ["1", "2"]
    browser.value("document.getElementById('picture').focus()")
    press(browser, "ArrowDown")
    assert at() == [0, 12, 4]
    change(browser, sample=2, layer=0, query=5, key=3)
    browser.value('document.querySelector(\'#heads [data-head="1"][data-stage="0"]\').focus()')
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
        press(browser, key)
    assert at() == [0, 6, 2]
    change(browser, layer=1)  # other maps
    assert browser.value(focused) == ["1", "0"]
    browser.value("document.querySelector('#tokens .query').focus()")
    press(browser, "ArrowRight")
    assert browser.value("document.activeElement.classList.contains('query')")
    assert at() == [1, 7, 2]
    browser.value("document.querySelector('#contributions').parentElement.focus()")
    press(browser, "ArrowDown")
    assert at() == [1, 7, 2]
    browser.value("document.querySelector('#contributions button').focus()")
    change(browser, layer=0)
    assert browser.value("document.activeElement.closest('#contributions') !== null")


def follow_link(browser, link):
    """Open a link in a page without earlier state."""
    browser.call("Page.navigate", url="about:blank")
    browser.events.clear()
    browser.call("Page.navigate", url=link)
    while not browser.value("location.href.startsWith('file') && Boolean(window.explorer)"):
        time.sleep(0.02)
    browser.value("explorer.ready.then(() => 1)")


def change_hash(browser, words):
    """Change the link of an open page and wait until it is shown."""
    wait = "new Promise(resolve => addEventListener('hashchange', () => setTimeout(resolve)))"
    browser.value(f"location.hash = {json.dumps(words)}, {wait}.then(() => 1)")
    change(browser)


VIEW_OF_LINK = dict(sample=2, layer=1, query=5, key=3, head=3, stage=1, scale="head", follow=1, other=0)


def view(browser):
    """The state of the page, and the texts and pictures of all sections."""
    state = "{...explorer.state, off: [...explorer.state.off], ablated: [...explorer.state.ablated]}"
    theme = "document.documentElement.dataset.theme"
    pictures = "[...document.querySelectorAll('canvas')].filter(c => c.offsetParent).map(c => c.toDataURL())"
    return browser.value(f"[{state}, {theme}, document.querySelector('main').innerText, {pictures}]")


def test_a_link_restores_the_state(browser, file):
    opened(browser, file)
    change(browser, sample=1, layer=1, query=7, key=4, head=2)
    change(browser, **VIEW_OF_LINK, off={"post.query gate"}, ablated={1})
    press(browser, "t")
    link = browser.value("location.href")
    numbers = browser.value("explorer.table()")
    assert "layer=1" in link
    assert "off=post.query-gate" in link
    follow_link(browser, link)
    assert browser.value("explorer.table()") == numbers
    assert browser.value("document.getElementById('ablated-1').checked") is False
    assert browser.value("document.getElementById('branches-post-query-gate').checked") is False
    assert browser.value("document.querySelectorAll('#comparison canvas').length") >= 8
    restored = view(browser)
    assert {name: restored[0][name] for name in VIEW_OF_LINK} == VIEW_OF_LINK
    change_hash(browser, "sample=1&head=1&theme=light")
    other = view(browser)
    browser.value(
        f"location.hash = {json.dumps(link.split('#')[1])}; new Promise(r => setTimeout(r, 100)).then(() => 1)"
    )
    change(browser)
    assert view(browser) == restored
    follow_link(browser, f"{file.as_uri()}#sample=1&head=1&theme=light")
    assert view(browser) == other


@pytest.mark.parametrize(
    "words",
    [
        "sample=3", "sample=-1", "sample=1.5", "sample=1e999", "sample=NaN", "layer=2", "layer=-1", "layer=",
        "query=99", "query=abc", "query=0x2", "key=-1", "key=Infinity", "head=4", "stage=9", "stage=null",
        "scale=none", "follow=2", "follow=yes", "other=3", "other=x", "other=-2", "theme=pink", "off=pre.nothing",
        "off=,,pre", "off=__proto__", "ablated=4", "ablated=-1,1.5,x,,", "nothing=1", "%", "sample=%E0%A4%A", "=&&=",
    ],
)  # fmt: skip
def test_invalid_words_of_a_link_are_ignored(browser, file, words):
    follow_link(browser, f"{file.as_uri()}#sample=0")
    expected = view(browser), browser.value("location.hash")
    follow_link(browser, f"{file.as_uri()}#{words}")
    assert browser.messages() == []
    assert (view(browser), browser.value("location.hash")) == expected
