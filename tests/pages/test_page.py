"""The report: complete, escaped, in one file, shown by a browser, and refused early if it cannot be written."""

import base64
import io
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from report_examples import HOSTILE, evaluation, page

from dcvit.errors import ConfigError
from dcvit.evaluators.multilabel import ClassResult
from dcvit.pages import html
from dcvit.pages.html import shorten
from dcvit.pages.report import Evaluation, render


class Reader(HTMLParser):
    """The elements of a page as (name, attributes), and its text without style and script."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open = [], "", []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self.open.append(name)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def named(self, name):
        return [attributes for found, attributes in self.elements if found == name]


def test_hostile_names_are_text_and_a_page_makes_no_request():
    text = page(evaluation(len(HOSTILE), names=HOSTILE, name=HOSTILE[0]), evaluation(30, name="other"))
    found = Reader(text)
    assert text.isascii()
    assert len(found.named("script")) == len(found.named("style")) == 1
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    for name in HOSTILE:
        assert not set(shorten(name)) & set("\u202a\u202e\u2066")
        assert re.sub("[\ud800-\udfff]", "\ufffd", shorten(name)) in found.text, name
    links = [a[key] for _, a in found.elements for key in ("src", "href", "action", "data") if key in a]
    starts = {link.partition(",")[0].partition("-")[0] for link in links}
    assert starts == {"data:image/png;base64", "data:", "#evaluation"}
    assert not re.search(r"https?:|url\(|@import", text)
    (policy,) = (a["content"] for a in found.named("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:")


def test_the_matrix_holds_the_counts():
    made = evaluation(10)
    matrix = page(made).split("Confusion matrix</h3>")[1].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>([\d,]+)</td>", row) for row in matrix.split("<tr>")[2:]]
    counts = {(i, j): int(cell) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell != "0"}
    assert counts == made.outcomes.pairs


def test_pictures_have_the_pixels_of_the_image():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    for image, expected in (
        (pixels, pixels),
        (pixels[..., :1], pixels[..., :1]),
        (np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8, 1), np.rint(np.linspace(0, 255, 64)).reshape(8, 8, 1)),
        (np.full((8, 8, 1), np.nan, np.float32), np.zeros((8, 8, 1))),
    ):
        shown = decoded(html.picture(image)["src"])
        np.testing.assert_array_equal(shown.reshape(expected.shape), expected)
    assert decoded(html.picture(np.zeros((900, 300, 3), np.uint8))["src"]).shape == (224, 75, 3)


def decoded(source):
    """The pixels of a data URL."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))


def test_the_baseline_is_the_share_of_the_largest_class():
    made = evaluation(3, names=["cat", "Donaudampfschiff", "fox"])
    made.outcomes.pairs = Counter({(0, 0): 5, (0, 2): 1, (1, 0): 3, (2, 2): 1})
    assert "Baseline60.00\u00a0%accuracy of always “cat”, the largest class" in Reader(page(made)).text


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write to the folder .*missing: No such file"):
        html.check_path(tmp_path / "missing" / "report.html", "--report")


def test_a_multilabel_section_has_the_measures_of_each_class():
    labels = [ClassResult(3, 4, 2, 9, 0.875, 0.25), ClassResult(0, 0, 0, 9, None, 0.5)]
    row = {"evaluation": "val", "mean_ap": 0.875, "f1_macro": 0.5, "f1_micro": 0.25, "loss": 1.5, "n": 9}
    made = Evaluation(name="val", row=row, class_names=["a", "b"], options={}, labels=labels, thresholds_from="Chosen.")
    text = Reader(render("model", {}, {}, [row], [made])).text.replace("\u00a0", "_").replace("\n", " ")
    assert "a 3 4 87.50_% 57.14_% 50.00_% 66.67_% 0.250 9" in text
    assert "b 0 0 – 0.00_% – – 0.500 9" in text
    assert "Chosen." in text


@pytest.mark.exhaustive
def test_the_page_is_shown_completely_without_errors_and_requests(browser, tmp_path):
    """Three evaluations: hostile names, many classes of larger images, and a perfect classifier."""
    file = tmp_path / "report.html"
    hostile = evaluation(len(HOSTILE), names=HOSTILE, name=HOSTILE[0])
    file.write_text(
        page(hostile, evaluation(100, images=4000, size=224, name="many"), evaluation(10, accuracy=1.1, name="all"))
    )
    browser.open(file)
    assert browser.messages() == []
    assert browser.requests() == [file.as_uri()]
    assert browser.value("[...document.images].map(i => i.naturalWidth)") == [8] * 24 + [224] * 24
    assert browser.value("[...document.images].every(i => i.alt.startsWith('image of '))")
    assert browser.value("document.querySelectorAll('h1').length") == 1
    headings = browser.value("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert headings == ["Results", *(f"Evaluation “{name}”" for name in (HOSTILE[0], "many", "all")), "Run"]
    assert browser.value("document.querySelectorAll('table.sortable tbody tr').length") == len(HOSTILE) + 100 + 10
    assert browser.value("document.querySelectorAll('svg rect.accuracy').length") > 20
