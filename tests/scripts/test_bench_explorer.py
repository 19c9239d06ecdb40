"""The benchmark of explorer pages opens them in a browser and reports sizes and times."""

import sys
from pathlib import Path

import explorer_pages as pages
import pytest
from browser import CHROMIUM
from explorer_driver import MODELS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_explorer as bench


@pytest.mark.exhaustive
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_every_page_has_a_row_of_its_size_and_times(tmp_path, capsys):
    page = tmp_path / "page.html"
    page.write_text(pages.page([pages.sample_of(0, 0, "text", *MODELS["text"])]))
    assert bench.main([str(page), "--rounds", "2", "--changes", "3"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    name, size, *cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (name, float(size)) == ("page.html", round(page.stat().st_size / 1e6, 2))
    paint, complete, query = (float(cell.split()[0]) for cell in cells)
    assert 0 < paint <= complete
    assert query > 0


@pytest.mark.exhaustive
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_with_an_error_is_refused(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>explorer = {ready: Promise.resolve(), set: async () => console.error('no')}</script>"
                    '<p id="facts-data">{"samples": [{"tokens": 2}]}</p>')  # fmt: skip
    with pytest.raises(bench.ConfigError, match="console has messages"):
        bench.main([str(page), "--rounds", "1", "--changes", "1"])
