"""A student alone and distilled: the runs differ in the teacher alone, and the page has the table."""

import pytest
from fake_training import FakeTraining
from markdown_pages import ROOT

from dcvit.config.load import load
from dcvit.reproduction.distillation import ALONE, DIGITS, DISTILLED
from dcvit.reproduction.seeded import train_all


def test_runs_of_a_seed_differ_in_the_teacher_and_its_loss_alone(tmp_path):
    runs = DIGITS.runs(tmp_path, 7)["DCViT"]
    alone, distilled = (load(runs[arm].spec, runs[arm].words(3)).to_dict() for arm in (ALONE, DISTILLED))
    assert (alone.pop("distill"), distilled.pop("distill")["teacher"]) == ({}, "digits")
    assert (alone.pop("label_smoothing"), distilled.pop("label_smoothing")) == (0.1, 0.0)
    assert alone == distilled
    assert (alone["seed"], alone["total_steps"], alone["model"]["compose"]) == (3, 7, "both")


def test_the_table_compares_the_distilled_student_with_the_one_alone(tmp_path):
    train = FakeTraining(lambda arm, config: {"test/top1": 0.6 + 0.1 * bool(config.distill) + 0.02 * config.seed})
    assert train_all(DIGITS.plan(tmp_path, 7), [0, 1], train) == 0
    alone, distilled = DIGITS.table(tmp_path, [0, 1], 7).rows
    assert (alone["model"], alone["verdict"]) == ("DCViT alone", "–")
    assert (distilled["difference"], distilled["verdict"]) == (pytest.approx(10), "gain")


def test_the_page_has_the_table_that_the_command_wrote():
    page = (ROOT / "docs" / "distillation.md").read_text().split("\n## Does it help?\n")[1]
    written = (ROOT / "docs" / "reproduction" / "distillation.md").read_text().splitlines()
    rows = [line for line in page.splitlines() if line.startswith("| DCViT ")]
    assert len(rows) == 2
    assert {*rows} <= {*written}
    *_, difference, interval, _, _ = (cell.strip() for cell in rows[1].split("|"))
    assert f"a gain of {float(difference):.1f} ± {float(interval):.1f} points" in page
