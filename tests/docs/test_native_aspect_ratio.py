"""The commands and the code of the page about native aspect ratios run."""

import shlex

import image_datasets
import pytest
from markdown_pages import ROOT, blocks, commands

from dcvit import __main__, cli
from dcvit.runs import metrics

PAGE = ROOT / "docs/native_aspect_ratio.md"
MARK = "<!-- run by tests/docs/test_native_aspect_ratio.py -->"
FASTER = [
    "model.variant=ViT-mu/16", "total_epochs=None", "total_steps=2", "input.batch_size=8", "ckpt_epochs=None",
    "input.pack={'images': 1, 'rows': 1, 'tokens': 1024}", "evals.val.batch_size=12",
]  # fmt: skip


@pytest.mark.exhaustive
def test_the_commands_run(tmp_path, monkeypatch, library_promotion, capsys):
    pytest.importorskip("tensorflow")
    image_datasets.image_folder(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(PAGE, "sh", MARK)
    train, predict = (shlex.split(line)[1:] for line in commands(block))
    assert cli.run(__main__.dispatch, [*train, *(f"--config.{option}" for option in FASTER)]) == 0
    assert metrics.read(tmp_path / "runs/native/metrics.jsonl")[-1]["val/n"] == 12
    capsys.readouterr()
    assert cli.run(__main__.dispatch, predict) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.exhaustive
def test_the_code_runs(library_promotion, capsys):
    (code,) = blocks(PAGE, "python", MARK)
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert f"print(grid.tolist(), logits.shape)  # {printed}" in code
