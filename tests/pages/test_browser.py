"""The page in a real browser: no errors and requests, all parts shown, nothing cut at the width of a telephone."""

import pytest
from report_examples import HOSTILE, evaluation, page

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Three evaluations: hostile names, many classes of larger images, and a perfect classifier."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    hostile = evaluation(len(HOSTILE), names=HOSTILE, name=HOSTILE[0])
    path.write_text(
        page(hostile, evaluation(100, images=4000, size=224, name="many"), evaluation(10, accuracy=1.1, name="all"))
    )
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_is_shown_completely_without_errors_and_requests(browser, file, width, scheme):
    browser.open(file, width=width, scheme=scheme)
    assert browser.messages() == []
    assert browser.requests() == [file.as_uri()]
    assert browser.value("[...document.images].map(i => i.naturalWidth)") == [8] * 24 + [224] * 24
    assert browser.value("[...document.images].every(i => i.alt.startsWith('image of '))")
    assert browser.value("document.querySelectorAll('h1').length") == 1
    headings = browser.value("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert headings == ["Results", *(f"Evaluation “{name}”" for name in (HOSTILE[0], "many", "all")), "Run"]
    assert browser.value("document.querySelectorAll('table.sortable tbody tr').length") == len(HOSTILE) + 100 + 10
    assert browser.value("document.querySelectorAll('svg rect.accuracy').length") > 20
    assert browser.value("document.documentElement.scrollWidth") <= width
    outside = f"""[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg')
        && (e.getBoundingClientRect().right > {width} || e.getBoundingClientRect().left < 0)).map(e => e.outerHTML)"""
    assert browser.value(outside) == []


def test_a_script_in_the_page_would_not_run(browser, file, tmp_path):
    """The security policy of the page is a second barrier, after escaping."""
    altered = tmp_path / "altered.html"
    altered.write_text(file.read_text().replace("</main>", "<script>window.ran = 1</script><img src=x></main>"))
    browser.open(altered)
    assert browser.value("window.ran") is None
    assert "Content Security Policy" in str(browser.messages())


def test_tables_are_sorted_by_the_column_that_is_clicked(browser, file):
    browser.open(file)
    table = "document.querySelectorAll('table.sortable')[1]"
    column = f"[...{table}.tBodies[0].rows].map(r => parseFloat(r.cells[{{}}].textContent))"
    click = f"{table}.querySelectorAll('button')[{{}}].click()"
    recalls = browser.value(column.format(3))
    assert recalls == sorted(recalls)  # many classes begin with the lowest recall
    browser.value(click.format(4))
    precisions = browser.value(column.format(4))
    assert precisions == sorted(precisions, reverse=True)
    browser.value(click.format(4))
    assert browser.value(column.format(4)) == sorted(precisions)
    browser.value(click.format(0))
    assert browser.value(column.format(0)) == list(range(100))
    assert browser.value("document.querySelectorAll('[aria-sort]').length") == 1
