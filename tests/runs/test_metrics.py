"""Metrics files of a run: one row per step, also after a kill."""

import pytest

from dcvit import errors
from dcvit.runs import metrics


def test_steps_are_written_once_and_rows_after_the_resumed_step_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = metrics.JsonLines(path)
    for step in (0, 2, 2, 4, 3, 6):
        rows.write(step, {"x": step})
    rows.close()
    assert [r["step"] for r in metrics.read(path)] == [0, 2, 4, 6]
    resumed = metrics.JsonLines(path, resume_step=4)
    assert resumed.last_step == 4
    resumed.write(4, {"x": 40})
    resumed.write(6, {"x": 60})
    resumed.close()
    assert metrics.read(path) == [*({"step": s, "x": s} for s in (0, 2, 4)), {"step": 6, "x": 60}]
    metrics.JsonLines(path).close()
    assert metrics.read(path) == []


def test_values_that_are_not_finite_are_null(tmp_path):
    rows = metrics.JsonLines(tmp_path / "metrics.jsonl")
    rows.write(1, {"nan": float("nan"), "inf": float("inf"), "n": 3})
    rows.close()
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 1, "nan": None, "inf": None, "n": 3}]


def test_line_truncated_by_a_kill_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 2, "lo')
    assert metrics.read(path) == [{"step": 0}]
    metrics.JsonLines(path, resume_step=2).close()
    assert metrics.read(path) == [{"step": 0}]


DAMAGED = {
    "step of another type": '{"step": "x"}',
    "step of the line before": '{"step": 0}',
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_damaged_line_is_named_and_kept(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(errors.MetricsError, match=r"metrics\.jsonl:2 is damaged \(.*\); remove this line") as raised:
        metrics.JsonLines(path, resume_step=2)
    assert "\n" not in str(raised.value)
    assert line in path.read_text()
