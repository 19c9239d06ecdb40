"""`config.early_stop`: when it stops, how it ends a run, and that a resumed run decides as an uninterrupted one."""

import math

import pytest
from training_runs import interrupted_before, same

from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.steps import saved_steps
from dcvit.runs import metrics
from dcvit.training.hooks import EarlyStop

pytestmark = pytest.mark.usefixtures("library_promotion")
# The test loss falls, so that its maximum is the first evaluation, at step 1; the run would have six steps.
OPTIONS = {"early_stop": ("test/loss", "max", 3), "evals.test.log_steps": 1, "log_steps": 3, "ckpt_steps": 100}


def stopped_at(values, mode="min", patience=2):
    """The evaluation, counted from 1, after which a run stops."""
    early = EarlyStop(("val/loss", mode, patience))
    early.update(0, {"val/loss": -9.0})  # before training
    for step, value in enumerate(values, start=1):
        early.update(step, {"loss": 0.0})
        early.update(step, {"val/loss": value})
        if early.reason:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "mode", "patience", "expected"),
    [
        ([3, 2, 1, 0.5], "min", 1, None),
        ([3, 2, 2, 1], "min", 1, 3),  # an equal value is no improvement
        ([3, 4, 2, 3, 3], "min", 2, 5),
        ([3, 4, 2, 3, 3], "max", 2, 4),
        ([3, math.nan, None, 2], "min", 2, 3),
        ([math.nan, None], "min", 2, 2),
    ],
)
def test_a_run_stops_after_that_many_evaluations_without_improvement(values, mode, patience, expected):
    assert stopped_at(values, mode, patience) == expected


def test_only_the_latest_evaluation_decides():
    """`early_stop` may change when a run is resumed, whose earlier rows would have stopped it."""
    early = EarlyStop(("val/loss", "min", 2))
    for step, value in enumerate([1.0, 2.0, 2.0, 0.5, 0.4], start=1):
        early.update(step, {"val/loss": value})
    assert early.reason is None


def test_nothing_stops_a_run_without_the_key():
    early = EarlyStop(())
    early.update(1, {"val/loss": 1.0})
    assert early.reason is None


@pytest.mark.exhaustive
def test_stopped_run_is_evaluated_saved_and_complete(digits_run, capsys):
    again = {"type": "classification", "data": {"kind": "digits", "split": "test", "limit": 8}, "pp": "onehot(10)"}
    again["pp"] = 'value_range(-1, 1)|onehot(10)|keep("image", "labels")'
    status, workdir = digits_run(**OPTIONS, **{"evals.again": again | {"log_steps": 100}})
    assert status == 0
    out = capsys.readouterr().out
    assert out.count("stopped early at step 4: the best test/loss is ") == 1
    assert " at step 1, 3 evaluations ago" in out
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert ["again/loss" in row for row in rows] == [True, False, False, False, True]
    assert saved_steps(workdir) == [4]
    assert digits_run(**OPTIONS, **{"evals.again": again | {"log_steps": 100}})[0] == 0
    assert "the run is complete: stopped early at step 4" in capsys.readouterr().out
    assert metrics.read(workdir / "metrics.jsonl") == rows
    more = OPTIONS | {"early_stop": ("test/loss", "max", 9)}
    assert digits_run(**more, **{"evals.again": again | {"log_steps": 100}})[0] == 0
    assert saved_steps(workdir) == [4, 6]


@pytest.mark.slow
def test_resumed_run_stops_at_the_same_step_with_the_same_bits(digits_run, monkeypatch):
    options = OPTIONS | {"ckpt_steps": 2}
    _, uninterrupted = digits_run("uninterrupted", **options)
    with interrupted_before(monkeypatch, 4):
        assert digits_run("interrupted", **options)[0] == 130
    status, workdir = digits_run("interrupted", **options)
    assert (status, saved_steps(workdir)) == (0, [2, 4])
    assert (workdir / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert same(load_params(workdir), load_params(uninterrupted))


@pytest.mark.exhaustive
def test_row_of_the_last_step_lost_in_a_kill_is_written_by_the_next_start(digits_run, capsys):
    _, workdir = digits_run(**OPTIONS)
    path = workdir / "metrics.jsonl"
    complete = path.read_bytes()
    path.write_bytes(b"".join(complete.splitlines(keepends=True)[:-1]))
    assert digits_run(**OPTIONS)[0] == 0
    assert path.read_bytes() == complete
    assert "the run is complete: stopped early at step 4" in capsys.readouterr().out
