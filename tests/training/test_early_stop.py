"""`config.early_stop`: when it stops, how it ends a run, and that a resumed run decides as an uninterrupted one."""

import math
import shutil

import pytest
from training_runs import digits_command

from dcvit.runs import metrics
from dcvit.runs.steps import saved_steps
from dcvit.training.hooks import EarlyStop

pytestmark = pytest.mark.usefixtures("library_promotion")
# The test loss falls, so that its maximum is the first evaluation, at step 1; the run would have six steps.
AGAIN = {
    "type": "classification", "data": {"kind": "digits", "split": "test", "limit": 8}, "log_steps": 100,
    "pp": 'value_range(-1, 1)|onehot(10)|keep("image", "labels")',
}  # fmt: skip
OPTIONS = {
    "early_stop": ("test/loss", "max", 3), "evals.test.log_steps": 1, "evals.again": AGAIN, "log_steps": 3,
    "ckpt_steps": 100, "model.depth": 0,  # compiles fastest
}  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The workdir of a run that stops early; a test that writes to it copies it first."""
    workdir = tmp_path_factory.mktemp("early") / "run"
    assert digits_command(workdir, **OPTIONS) == 0
    return workdir


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
    ],
)
def test_a_run_stops_after_that_many_evaluations_without_improvement(values, mode, patience, expected):
    assert stopped_at(values, mode, patience) == expected


@pytest.mark.exhaustive
def test_stopped_run_is_evaluated_saved_and_complete(stopped, digits_run, tmp_path, capsys):
    """Also if a kill lost the row of its last step, which the next start writes. More patience continues the run."""
    workdir = shutil.copytree(stopped, tmp_path / "run")
    path = workdir / "metrics.jsonl"
    complete, rows = path.read_bytes(), metrics.read(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert ["again/loss" in row for row in rows] == [True, False, False, False, True]
    assert saved_steps(workdir) == [4]
    for found in (complete, b"".join(complete.splitlines(keepends=True)[:-1])):
        path.write_bytes(found)
        assert digits_run(**OPTIONS)[0] == 0
        assert "the run is complete: stopped early at step 4" in capsys.readouterr().out
        assert path.read_bytes() == complete
    assert digits_run(**OPTIONS | {"early_stop": ("test/loss", "max", 9)})[0] == 0
    assert saved_steps(workdir) == [4, 6]
