"""The page in a real browser: no errors and requests, all parts shown."""

import pytest
from report_examples import HOSTILE, evaluation, page

pytestmark = pytest.mark.exhaustive


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
