"""The command compare: its numbers are those of the files of the runs, which may be damaged or still be written."""

import csv
import io
import json
import math
from pathlib import Path

import pytest

from dcvit import cli, compare
from dcvit.config import values

CONFIG = {**values.defaults(), "total_steps": 4, "input": {"data": {"kind": "digits"}, "pp": "", "batch_size": 8}}


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def make_run(tmp_path):
    """Write the files of a run: evaluations of some steps, and a config with changed keys."""

    def make(name, top1=(), timing=(), **config):
        rows = [{"step": 0, "num_params": 10}]
        rows += [{"step": i + 1, "loss": 1 / (i + 1), "val/top1": x, "val/n": 9} for i, x in enumerate(top1)]
        write_rows(tmp_path / name / "metrics.jsonl", rows)
        write_rows(tmp_path / name / "timing.jsonl", timing)
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **config}))
        return tmp_path / name

    return make


@pytest.fixture
def compared(capsys):
    """Run the command; return its rows, its errors and its status."""

    def run(*words, status=0):
        assert cli.run(compare.main, [*map(str, words), "--format", "json"]) == status
        out, err = capsys.readouterr()
        return (json.loads(out) if out else []), err.splitlines()

    return run


def test_results_are_those_of_the_files(make_run, compared):
    timing = [{"step": s, "step_seconds": 0.1 * s, "examples_per_second": 80 / s, "seconds": s} for s in (1, 2, 4)]
    rows, errors = compared(make_run("a", [0.2, 0.8, None, 0.6], timing), make_run("b", [0.5], lr=1e-5))
    assert errors == []
    a, b = rows
    assert (a["step"], a["parameters"]) == (4, 10)
    assert (a["val/top1"], a["best val/top1"], a["loss"]) == (0.6, 0.8, 0.25)
    assert (a["examples_per_second"], a["step_seconds"], a["seconds"]) == (40, 0.2, 4)
    assert (b["step"], b["val/top1"], b["examples_per_second"]) == (1, 0.5, None)
    assert "val/n" not in a


def test_metric_selects_and_sorts(make_run, compared):
    runs = [make_run("a", [0.5]), make_run("b", []), make_run("c", [0.9, 0.1])]
    rows, _ = compared(*runs, "--metric", "val/top1")
    assert [Path(row["run"]).name for row in rows] == ["c", "a", "b"]


def test_a_run_that_is_given_twice_is_one_row(make_run, compared, tmp_path, monkeypatch):
    workdir = make_run("a", [0.5])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(workdir)
    rows, _ = compared(workdir, "a", "./a/", "link")
    assert [row["run"] for row in rows] == [str(workdir)]


def test_a_folder_of_seeds_stands_for_its_runs(make_run, compared, tmp_path):
    for seed in (0, 1):
        make_run(f"vit/seed{seed}", [0.5], seed=seed)
    rows, _ = compared(tmp_path / "vit", make_run("other", [0.3]))
    assert [Path(row["run"]).name for row in rows] == ["seed0", "seed1", "other"]


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_output_has_each_run_and_no_control_characters(make_run, capsys, monkeypatch, form):
    monkeypatch.setenv("COLUMNS", "80")
    runs = [make_run("a|a", [0.25, 0.5]), make_run("b\x1b[31m", [0.75])]
    write_rows(runs[1] / "metrics.jsonl", [{"step": 1, "val\x1b[2J/top1": 0.75}])
    picture = runs[0] / "a.svg"
    assert cli.run(compare.main, [*map(str, runs), "--format", form, "--out", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err + picture.read_text()
    assert form == "table" or "val\\x1b[2J/top1" in out  # a narrow table folds names
    if form == "csv":
        a, b = csv.DictReader(io.StringIO(out))
        assert (a["run"], a["val/top1"], b["val\\x1b[2J/top1"]) == (str(runs[0]), "0.5", "0.75")
    else:
        assert all(text in out for text in ("0.5000", "0.7500"))
        assert max(len(line) for line in out.splitlines()) <= 80 or form == "markdown"
        assert form == "table" or "a\\|a" in out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 0}\n{\n', "metrics.jsonl:2 is damaged"),
        ("metrics.jsonl", f'{{"step": 0, "loss": {"9" * 400}}}\n', "expected a finite number or null for 'loss'"),
        ("metrics.jsonl", '{"step": 0, "loss": Infinity}\n', "expected a finite number or null for 'loss'"),
        ("config.json", f'{{"total_steps": {"9" * 5000}}}', "cannot read"),
        ("config.json", '{"evals": 3}', "config.evals=3 should be of type dict, not int"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(make_run, compared, name, text, message):
    intact, damaged = make_run("a", [0.5]), make_run("b", [0.6])
    (damaged / name).write_text(text)
    rows, (error,) = compared(intact, damaged, status=2)
    assert [row["run"] for row in rows] == [str(intact)]
    assert message in error
    assert str(damaged) in error
    assert len(compared(damaged, damaged, status=2)[1]) == 1


def test_curves_are_drawn_for_runs_with_few_metrics(make_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run("_0")
    make_run("$a_{$", [0.5, None])
    for words in (["_0"], ["_0", "$a_{$", "--metric", "val/top1"]):
        assert cli.run(compare.main, [*words, "--out", "curves.svg"]) == 0
        assert (tmp_path / "curves.svg").read_text().count("</svg>") == 1
    assert "<!-- $a_{$ val/top1 -->" in (tmp_path / "curves.svg").read_text()
    assert capsys.readouterr().err == 2 * "curves: curves.svg\n"
    assert cli.run(compare.main, ["_0", "--out", "curves.gif"]) == 2
    make_run("huge", [1e308, -1e308, 10**300])
    assert cli.run(compare.main, ["huge", "--out", "huge.png"]) == 0


@pytest.mark.parametrize(("rows", "best"), [([0.2, math.nan, 0.1], 0.2), ([None, None], None)])
def test_values_that_are_not_finite_are_no_result(make_run, compared, rows, best):
    rows = [None if x is None or math.isnan(x) else x for x in rows]
    (row,), _ = compared(make_run("a", rows))
    assert row["best val/top1"] == best
