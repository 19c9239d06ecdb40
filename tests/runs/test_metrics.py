"""The files a run writes: one row a step, nothing twice, and only what stands after a kill."""

import json

import pytest

from dcvit import errors, plot
from dcvit.cli import run
from dcvit.runs import metrics


def test_a_row_is_never_written_twice_and_a_lost_stretch_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = metrics.JsonLines(path)
    for step in (0, 2, 2, 4, 3, 6):
        rows.write(step, {"x": step})
    rows.close()
    assert [r["step"] for r in metrics.read(path)] == [0, 2, 4, 6]
    again = metrics.JsonLines(path, resume_step=4)
    again.write(4, {"x": "twice"})
    again.write(6, {"x": "new"})
    again.close()
    assert metrics.read(path) == [*({"step": s, "x": s} for s in (0, 2, 4)), {"step": 6, "x": "new"}]
    metrics.JsonLines(path).close()
    assert metrics.read(path) == []


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 2, "lo')
    assert metrics.read(path) == [{"step": 0}]
    metrics.JsonLines(path, resume_step=2).close()
    assert path.read_text() == '{"step": 0}\n'


def test_curves_are_drawn_for_several_runs(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [{"step": s, "loss": 2.0 - s, "val/top1": 0.1 * s} for s in range(3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "curves.png"
    assert run(plot.main, [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert run(plot.main, [str(tmp_path / "absent"), "--out", str(out)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["\0\0\0", "[1]", "{}", '{"step": "x"}', "3"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(errors.MetricsError, match=r"metrics\.jsonl:2 is damaged"):
        metrics.JsonLines(path, resume_step=2)
    assert line in path.read_text()


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path, capsys):
    assert run(plot.main, [str(tmp_path), "--out", "curves.xyz"]) == 2
    assert "expected a name ending in .png" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[{"step": 0, "num_params": 3}], [{"step": 0, "loss": 1.0}]])
def test_curves_of_a_run_that_has_barely_begun(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    plot.plot([tmp_path], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
