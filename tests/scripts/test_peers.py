# ruff: noqa: E402
"""Comparisons with other libraries: both sides of every row agree, and the table has a line for each."""

import json

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("library_promotion")]
pytest.importorskip("torch", reason="needs torch; pip install -e .[interop]")
import torchvision_ops  # noqa: F401 - before timm and transformers

pytest.importorskip("timm", reason="needs timm; pip install -e .[interop]")
pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")

from dcvit import cli
from dcvit.errors import ConfigError

peers = pytest.importorskip("peers")
TINY = peers.Sizes(side=32, width=64, depth=3, batch=2, photos=4, lm_width=128, vocab=61, length=16, new=4)
SHORT = [name for name in peers.ROWS if not name.endswith(("_512", "_1024", "_2048", "_4096"))]


@pytest.fixture(autouse=True)
def _all_cpus(monkeypatch):
    """The process of the tests stays on all CPUs."""
    monkeypatch.setattr(peers.os, "sched_setaffinity", lambda *_: None)


def test_both_sides_of_every_row_agree_and_the_table_has_its_lines(tmp_path, capsys):
    file = tmp_path / "peers.json"
    assert peers.main(["--rounds", "1", "--json", str(file), "--rows", *SHORT], TINY) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert "one thread" in title
    assert len(lines) == 2 + len(SHORT)
    assert {line.count("|") for line in lines} == {6}
    rows = json.loads(file.read_text())["rows"]
    assert [row["row"] for row in rows] == SHORT
    assert all(row["ratios"] == [row["ours"][0] / row["theirs"][0]] for row in rows)


def test_a_difference_of_the_two_sides_ends_the_comparison(tmp_path, monkeypatch):
    wrong = peers.Row("sums", "others", lambda *_: (lambda: 1.0, lambda: 1.1))
    monkeypatch.setitem(peers.ROWS, "decode_1", wrong)
    with pytest.raises(ConfigError, match=r"^decode_1: the results differ by 0\.091 of the largest number"):
        peers.main(["--rows", "decode_1"], TINY)


def test_an_unknown_row_ends_with_one_line(capsys):
    assert cli.run(peers.main, ["--rows", "unknown"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "invalid choice: 'unknown'" in line
