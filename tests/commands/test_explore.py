"""The command explore: pages of runs and of imported weights, and errors in one line."""

import re

import numpy as np
import pytest
from explorer_pages import facts_of
from markdown_pages import ROOT

import dcvit
from dcvit import cli, explore
from dcvit.pages import explorer

IMAGES = [str(ROOT / "tests" / "data" / name) for name in ("seven.png", "four.png")]


def run(*words):
    return cli.run(explore.main, [str(word) for word in words])


def test_a_page_of_images_compares_two_models(digits_workdir, tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["--compare", digits_workdir / "checkpoints" / "30", "--out", out]
    assert run("--workdir", digits_workdir, *IMAGES, *words) == 0
    assert re.fullmatch(rf"explorer: {out} \([\d.]+ MB\)\n", capsys.readouterr().out)
    facts = facts_of(out.read_text())
    assert [sample["name"] for sample in facts["samples"]] == ["seven.png", "four.png"] * 2
    assert [sample["run"] for sample in facts["samples"]] == [0, 0, 1, 1]
    model = dcvit.load(digits_workdir)
    for sample, predictions in zip(facts["samples"], model.predict(IMAGES), strict=False):
        assert [label for label, _ in sample["predictions"]] == [p.label for p in predictions]
        shown = [p for _, p in sample["predictions"]]
        np.testing.assert_allclose(shown, [p.probability for p in predictions], atol=1e-4)
        assert (sample["rows"], sample["columns"], sample["extra"]) == (2, 2, 0)
        assert len(sample["ablations"]) == model.module.num_heads
    for found in facts["runs"]:
        assert found["diversity"]["qk"][-1] == 1
        assert np.all(np.diff(found["diversity"]["ov"]) >= 0)


@pytest.mark.exhaustive
def test_a_page_of_text_shows_the_first_tokens(lm_workdir, tmp_path, capsys):
    file, out = tmp_path / "text.py", tmp_path / "page.html"
    file.write_text("import sys\n" * 4)
    words = ["--prompt", "def f(", "--length", 15, "--no_ablations"]
    assert run("--workdir", lm_workdir, file, *words, "--out", out) == 0
    assert "text.py: the first 15 of 44 tokens are shown" in capsys.readouterr().err
    facts = facts_of(out.read_text())
    assert ["".join(sample["text"]) for sample in facts["samples"]] == ["def f(", "import sys\nimpo"]
    assert facts["samples"][0]["oldest"] == [0] * 6
    assert not facts["samples"][0]["ablations"]
    assert facts["samples"][0]["contributions"]
    assert facts["runs"][0]["facts"].startswith("language model, layers 1, heads 2")


def test_errors_are_one_line(digits_workdir, tmp_path, capsys):
    out = ["--out", tmp_path / "page.html"]
    digits = ["--workdir", digits_workdir, *out]
    for words, message in [
        ([*digits], "no image files"),
        ([*digits, IMAGES[0], "--data", "test"], "removed in 0.3.0: give inputs"),
    ]:
        assert run(*words) == 2, words
        lines = capsys.readouterr().err.splitlines()
        assert message in lines[-1], lines
        assert all(line.startswith("error: ") for line in lines)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_is_too_large_is_refused(digits_workdir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explorer, "MAX_BYTES", 5000)
    assert run("--workdir", digits_workdir, *IMAGES * 50, "--no_ablations", "--out", tmp_path / "page.html") == 2
    assert re.fullmatch(
        r"error: a page of \d inputs has 0 MB, more than 0: .*", capsys.readouterr().err.splitlines()[-1]
    )
    assert not (tmp_path / "page.html").exists()
