"""The page on images of other channels: its data set, statistics and commands."""

import re

import pytest
from markdown_pages import ROOT, blocks, commands, run_commands

from dcvit.runs import metrics

pytest.importorskip("tifffile")
PAGE = ROOT / "docs/channels.md"
MARKER = "<!-- run by tests/docs/test_channels_page.py -->"


@pytest.fixture
def land(tmp_path, monkeypatch):
    """A folder with the page's data set, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(PAGE, "python", MARKER)
    exec(compile(block, "channels.md", "exec"), {})
    return tmp_path


def test_statistics_are_those_on_the_page(land, monkeypatch, capsys):
    first, _ = blocks(PAGE, "bash", MARKER)
    run_commands(commands(first), land, monkeypatch)
    (shown,) = blocks(PAGE, "", "<!-- printed by the command above -->")
    found = capsys.readouterr().out
    assert all(part.strip() in found for part in shown.split("…"))


@pytest.mark.weekly
def test_its_commands_run_as_written(land, monkeypatch, library_promotion, capsys):
    pytest.importorskip("tensorflow")
    _, second = blocks(PAGE, "bash", MARKER)
    run_commands(commands(second), land, monkeypatch)
    assert metrics.read(land / "runs/land_run/metrics.jsonl")[-1]["val/top1"] > 0.8
    assert re.search(r"val/water/0\.tif +(crops|forest|town|water) ", capsys.readouterr().out)
    assert "They show the first of 13 channels." in (land / "runs/land.html").read_text()
    assert (land / "runs/land_explore.html").exists()
