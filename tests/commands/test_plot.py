"""`dcvit plot`: training curves of one or several runs."""

import json

import pytest

from dcvit import plot
from dcvit.cli import run


def test_curves_of_several_runs_are_drawn(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [{"step": s, "loss": 2.0 - s, "val/top1": 0.1 * s} for s in range(3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "curves.png"
    assert run(plot.main, [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert run(plot.main, [str(tmp_path / "absent"), "--out", str(out)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err


def test_image_of_an_unknown_type_is_refused(tmp_path, capsys):
    assert run(plot.main, [str(tmp_path), "--out", "curves.xyz"]) == 2
    assert "expected a name ending in .png" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[{"step": 0, "num_params": 3}], [{"step": 0, "loss": 1.0}]])
def test_curves_of_a_run_with_one_row_are_drawn(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    plot.plot([tmp_path], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
