"""Pages of the explorer in a browser: the models of a page, and functions that change its state."""

import functools
import json

import explorer_pages as pages

MODELS = {
    "image": pages.image_model,
    "plain image": functools.partial(pages.image_model, compose=None, groups=1, static=False),
    "text": pages.text_model,
}


@functools.cache
def make(name):
    """A model of the page with its parameters and inputs."""
    return MODELS[name]()


def opened(browser, file):
    """Open the page at the first pair of tokens."""
    browser.open(file)
    browser.value("explorer.ready.then(() => 1)")
    change(browser, layer=0, query=0, key=0, head=0)


def change(browser, **state):
    """Set the state of the page and wait until it is shown."""
    words = ", ".join(
        f"{key}: new Set({json.dumps([*value])})" if isinstance(value, set) else f"{key}: {json.dumps(value)}"
        for key, value in state.items()
    )
    browser.value(f"explorer.set({{{words}}}).then(() => 1)")
