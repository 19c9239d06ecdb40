"""Table 4: questions of local tasks, their results by the harness, and paired differences beside the paper's."""

import csv
import importlib.util

import pytest
from fake_training import write_run

from dcvit import cli, reproduce
from dcvit.inference import harness_tasks
from dcvit.reproduction import downstream, scaling
from dcvit.reproduction.downstream import CHOICE, CLOZE
from dcvit.reproduction.seeded import run_checksum, stored
from dcvit.runs.seeds import workdir_of

TEXT = "import os\n\ndef path_of(name):\n    return path_of + os.path_of(name)\n    # path_of name with ten names\n"
LINES = "".join(f"line {i} of other names\nand names of line {i}\n" for i in range(9))


def test_a_word_of_a_cloze_is_in_its_context_which_ends_before_it():
    (found,) = (q for q in downstream.clozes("the name of some name here" + " " * 30, 64) if q["target"] == " name")
    assert found["context"] == "the name of some"
    for text in (TEXT, *downstream.held_out_files()[:3]):
        for question in downstream.clozes(text, 40):
            whole = question["context"] + question["target"]
            assert whole in text
            assert len(whole.encode()) <= 40
            assert question["target"].strip() in question["context"]
            assert question["context"][-1:].strip(), "the harness moves spaces at the end to the target"


def test_the_labeled_choice_follows_its_context_and_the_others_are_different_lines_of_other_texts():
    files = sorted((text for text in downstream.held_out_files() if text.isascii()), key=len)
    text, others = files[-1], sorted({f"\n{line}"[: downstream.LONGEST_LINE] for line in files[-2].split("\n")})
    questions = downstream.choices(text, others, 40)
    assert questions == downstream.choices(text, others, 40)
    squeezed = "\n".join(line.rstrip() for line in text.split("\n"))
    for question in questions:
        wrong = [*question["choices"]]
        right = wrong.pop(question["label"])
        assert question["context"] + right in squeezed
        assert len({*wrong, right}) == downstream.CHOICES
        assert {*wrong} <= {*others}
        assert all(len((question["context"] + choice).encode()) <= 40 for choice in question["choices"])
        assert question["context"] == question["context"].rstrip()
    counts = [sum(question["label"] == i for question in questions) for i in range(downstream.CHOICES)]
    assert min(counts) > 0.8 * len(questions) / downstream.CHOICES  # no place is right more often


def test_lines_after_empty_ones_and_text_of_other_characters_are_no_choices():
    assert downstream.line_starts("first line\nsecond line \n\nafter an empty one\n}\n") == {1: "\nsecond line"}
    assert downstream.line_starts("first line\nsecond line ü\n") == {}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Complete runs of both models with seeds 0 and 1, and stored results of the harness."""
    monkeypatch.setattr(downstream, "held_out_files", lambda: [TEXT + LINES, LINES.replace("line", "row")])
    for family, run in downstream.models(tmp_path, 8).items():
        for seed in (0, 1):
            workdir = workdir_of(run.folder, seed)
            write_run(workdir, {"total_steps": 8, "seed": seed}, {downstream.METRIC: 2.5 + seed})
            better = 0.1 * (1 + seed) if family == "DCPythia" else 0.0
            found = {f"{CLOZE} acc": 0.2 + better, downstream.LOG_PERPLEXITY: 9 - seed, f"{CHOICE} acc_norm": 0.5}
            stored(workdir / "harness.json", run_checksum(workdir), lambda value=found: value)
    return tmp_path


@pytest.mark.weekly
def test_differences_are_paired_by_seed_beside_those_of_the_paper(runs):
    rows = {row["measure"].split(" (")[0]: row for row in downstream.table(runs, [0, 1], 8).rows}
    cloze, average = rows["cloze accuracy %"], rows["average accuracy %"]
    assert (cloze["Pythia"], cloze["Pythia ± 95 %"], cloze["DCPythia"]) == pytest.approx((20, 0, 35))
    assert cloze["difference"] == pytest.approx(15)
    assert cloze["difference ± 95 %"] == pytest.approx(12.706 * 5, rel=1e-3)  # t of one degree of freedom
    assert average["DCPythia"] == pytest.approx((35 + 50) / 2)
    assert [average[f"difference {size}, paper"] for size in ("2.8B", "6.9B")] == pytest.approx([1.4, 1.6])
    assert rows["cloze, log2 of the perplexity"]["Pythia"] == 8.5
    assert rows["cloze, log2 of the perplexity"]["difference 6.9B, paper"] is None


def test_without_the_library_nothing_is_trained(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    assert cli.run(reproduce.main, ["table4", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert 'pip install "dcvit[eval]"' in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


needs_library = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")


@pytest.fixture
def small_library(monkeypatch):
    """The library without its own tasks, which take long to list; no network."""
    import harness_library  # before lm_eval, whose libraries read its variables  # noqa: F401
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **options: manager(**options, include_defaults=False))
    for name in (*harness_tasks.OFFLINE, "DISABLE_MULTIPROC"):
        monkeypatch.setenv(name, "1")


@needs_library
@pytest.mark.weekly
@pytest.mark.usefixtures("library_promotion", "small_library")
def test_tiny_models_are_trained_once_for_the_table_and_figure_4(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "SIZES", ((16, 1, 2), (32, 1, 2)))
    monkeypatch.setattr(downstream, "PER_FILE", 1)
    words = ["--steps", "4", "--seeds", "1", "--out", str(tmp_path)]
    assert cli.run(reproduce.main, ["figure4", *words]) == 0
    assert "DCPythia has a lower loss than Pythia" in capsys.readouterr().out
    with (tmp_path / "figure4.csv").open(newline="") as file:
        assert [row["family"] for row in csv.DictReader(file)] == ["Pythia", "Pythia", "DCPythia", "DCPythia"]
    for name, absent in (("table4", f": {downstream.METRIC} "), ("table4", "seed0"), ("figure4", "seed0")):
        assert cli.run(reproduce.main, [name, *words]) == 0
        assert absent not in capsys.readouterr().out  # nothing was trained, or measured, again
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
