"""The commands of the page about labels run as written, on the images that its script generates."""

import html
import json
import re
from pathlib import Path

import pytest
from markdown_pages import ROOT, blocks, commands, run_commands

from dcvit.runs import metrics

PAGE = ROOT / "docs/labels.md"
MARKER = "<!-- run by tests/docs/test_labels.py -->"


@pytest.mark.weekly
def test_the_commands_of_the_page_run_as_written(tmp_path, monkeypatch, library_promotion, capsys):
    (script,), (block,) = (blocks(PAGE, language, MARKER) for language in ("python", "bash"))
    monkeypatch.chdir(tmp_path)
    exec(compile(script, PAGE.name, "exec"), {})
    run_commands(commands(block), tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert "config.input.data: 160 read, 0 damaged" in out
    rows = metrics.read(Path("runs/colors/metrics.jsonl"))
    first, last = rows[0], rows[-1]
    assert last["val/n"] == 72
    assert last["val/mean_ap"] > max(first["val/mean_ap"], 0.8)
    chosen = json.loads(Path("runs/colors/thresholds.json").read_text())
    assert (chosen["evaluation"], chosen["step"]) == ("val", last["step"])
    assert [*chosen["thresholds"]] == ["blue", "green", "red"]
    page = html.unescape(Path("runs/colors.html").read_text())
    assert f"The thresholds maximize F1 on 'val' at step {last['step']}" in page
    assert "Confusion matrix" not in page
    assert re.search(r"colors/images/0\.png +(red|green|blue|none)", out)
