"""The tutorial of own images runs word for word, with generated photographs in place of those of the package."""

import re
from pathlib import Path

import pytest
from image_datasets import solar_cell_package
from markdown_pages import ROOT, blocks, commands, run_commands

from dcvit.runs import metrics

PAGE, MARKER = ROOT / "docs/tutorials/own_images.md", "<!-- run by tests/docs/test_own_images.py -->"


@pytest.mark.weekly
def test_the_commands_of_the_tutorial_run_as_written(tmp_path, monkeypatch, library_promotion, capsys):
    pytest.importorskip("tensorflow")
    solar_cell_package(tmp_path / "site", 80)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (folders,), (block,) = (blocks(PAGE, language, MARKER) for language in ("python", "bash"))
    monkeypatch.chdir(tmp_path)
    exec(compile(folders, "own_images.md", "exec"), {})
    run_commands(commands(block), tmp_path, monkeypatch)
    written = {path.name for path in Path("runs").iterdir()}
    assert written >= {"solar.html", "solar_explore.html", "solar.png"}
    assert {"val/top1", "val/mean_recall"} <= {*metrics.read(Path("runs/solar/metrics.jsonl"))[-1]}
    assert re.search(r"cell0014\.png +(defective|functional)", capsys.readouterr().out)
