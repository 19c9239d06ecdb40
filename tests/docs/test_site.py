"""The built site in a real browser: no errors, alternative texts, nothing cut at the width of a telephone."""

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from markdown_pages import ROOT

SPHINX = all(importlib.util.find_spec(name) for name in ("sphinx", "myst_parser", "furo"))
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not SPHINX, reason="the extra docs is not installed"),
]
PAGES = ("index", "quickstart", "explorer", "performance", "paper", "own_model", "reference/api/index")


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built here or in DCVIT_SITE: over http, as search reads pages, forbidden for files."""
    if not (folder := os.environ.get("DCVIT_SITE")):
        folder = tmp_path_factory.mktemp("site")
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(folder)]
        subprocess.run(command, cwd=ROOT, env=env, check=True)
    with http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def show(browser, address, width):
    browser.open(SimpleNamespace(as_uri=lambda: address), width=width)


def errors(browser):
    """Messages of the console, without the icon that browsers request by themselves."""
    return [message for message in browser.messages() if "favicon.ico" not in str(message)]


def test_pages_have_no_error_no_picture_without_text_and_fit(browser, site):
    width = 390
    for page in PAGES:
        show(browser, f"{site}/{page}.html", width)
        assert errors(browser) == [], page
        missing = "[...document.images].filter(i => !i.alt || !i.naturalWidth).map(i => i.src)"
        assert browser.value(missing) == [], page
        assert browser.value("document.documentElement.scrollWidth") <= width, page
        assert browser.value("document.querySelectorAll('.sidebar-tree a').length") > 20
