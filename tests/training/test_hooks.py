"""Hooks between the steps: the non-finite guard, the best checkpoint, and complete rows of metrics."""

import json

import numpy as np
import pytest
from training_runs import interrupted_before, same

from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.steps import saved_steps
from dcvit.runs import metrics
from dcvit.training import hooks, inputs
from dcvit.training.step import non_finite_arrays
from dcvit.training.trainer import Trainer

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]


@pytest.fixture
def poisoned(monkeypatch):
    """Make the labels of some steps, counted from 1, NaN."""

    def poison(*steps):
        real = inputs.TrainingData.batches

        def batches(self, start_step, rows=None):
            for step, batch in enumerate(real(self, start_step, rows), start=start_step + 1):
                yield batch | ({"labels": np.full_like(batch["labels"], np.nan)} if step in steps else {})

        monkeypatch.setattr(inputs.TrainingData, "batches", batches)

    return poison


def test_non_finite_loss_stops_the_run_and_is_not_saved(digits_run, capsys, poisoned):
    poisoned(3)
    status, workdir = digits_run(ckpt_steps=1, log_steps=100, ckpt_keep=9)
    assert status == 2
    assert f"step 3: the loss is nan; stopped, its examples are in {workdir}/nonfinite-3.json, earlier checkpoints" in (
        err := capsys.readouterr().err
    )
    assert err.count("\n") == 1
    assert saved_steps(workdir) == [1, 2]
    dump = json.loads((workdir / "nonfinite-3.json").read_text())
    assert (dump["step"], dump["not finite"]) == (3, ["loss", "grad_norm"])
    assert len({(example["epoch"], example["index"]) for example in dump["examples"]}) == 64
    assert all("digits" in example["id"] for example in dump["examples"])


def test_stop_after_a_non_finite_step_saves_nothing(digits_run, poisoned, monkeypatch):
    """The main thread checks a step while the devices execute the next one."""
    poisoned(4)
    real, stopped = Trainer._advance, []

    def advance(self, update, step, state, batch):
        result = real(self, update, step, state, batch)
        if step == 5:
            with pytest.raises(FloatingPointError, match="1 steps so far were not finite; stopped"):
                self.stop()
            stopped.append(step)
        return result

    monkeypatch.setattr(Trainer, "_advance", advance)
    status, workdir = digits_run(log_steps=100)
    assert (status, stopped, saved_steps(workdir)) == (2, [5], [3])


def test_nonfinite_skip_is_the_number_of_skipped_steps(digits_run, capsys, poisoned):
    poisoned(2, 4, 5)
    status, workdir = digits_run("two", nonfinite_skip=2, log_steps=1, ckpt_steps=1, ckpt_keep=9)
    assert status == 2
    err = capsys.readouterr().err
    assert "step 2: the loss is nan; skipped, 1 of at most 2" in err
    assert "step 5: the loss is nan; stopped after 2 skipped steps" in err
    assert saved_steps(workdir) == [1, 2, 3, 4]
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["loss"] is None for row in rows[1:]] == [False, True, False, True]
    assert [row["nonfinite"] for row in rows[1:]] == [0, 1, 1, 2]
    status, workdir = digits_run("two", nonfinite_skip=3, log_steps=1, ckpt_steps=1)
    assert status == 0
    assert not non_finite_arrays(load_params(workdir))


def test_non_finite_state_is_not_saved(digits_run, capsys, monkeypatch):
    """A step may overflow a parameter although its loss and gradient are finite."""
    real = Trainer._advance

    def overflow(self, update, step, state, batch):
        result = real(self, update, step, state, batch)
        if step == 3:
            params = result.state.params
            head = {"kernel": params["head"]["kernel"].at[0, 0].set(np.inf)}
            result.state = result.state.replace(params={**params, "head": {**params["head"], **head}})
        return result

    monkeypatch.setattr(Trainer, "_advance", overflow)
    status, workdir = digits_run(ckpt_steps=1, ckpt_keep=9, evals={})
    assert status == 2
    assert "step 3: params/head/kernel is not finite; not saved" in capsys.readouterr().err
    assert saved_steps(workdir) == [1, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_checkpoint_is_saved_and_kept(digits_run, mode):
    options = {"ckpt_best": ("test/loss", mode), "ckpt_keep": 1, "ckpt_steps": 6, "evals.test.log_steps": 1}
    status, workdir = digits_run(**options)
    assert status == 0
    losses = {row["step"]: row["test/loss"] for row in metrics.read(workdir / "metrics.jsonl") if row["step"]}
    best = {"min": min, "max": max}[mode](losses, key=losses.get)
    assert saved_steps(workdir) == sorted({best, 6})


def test_best_checkpoint_is_remembered_by_a_resumed_run(digits_run, monkeypatch):
    options = {"ckpt_best": ("test/loss", "max"), "ckpt_keep": 1, "ckpt_steps": 3, "evals.test.log_steps": 1}
    with interrupted_before(monkeypatch, 5):
        assert digits_run(**options)[0] == 130
    status, workdir = digits_run(**options)
    assert status == 0
    assert saved_steps(workdir) == [1, 6]


def test_row_lost_in_a_kill_is_written_by_the_resumed_run(digits_run, monkeypatch):
    """The latest checkpoint may be of a step whose evaluations did not run, or whose row was lost."""
    _, uninterrupted = digits_run("uninterrupted")
    with interrupted_before(monkeypatch, 5):
        assert digits_run("cut")[0] == 130
    path = uninterrupted.with_name("cut") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 3, 4]
    path.write_text("".join(lines[:2]) + lines[2][:20])
    status, cut = digits_run("cut")
    assert status == 0
    assert (cut / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()


def test_stop_during_the_last_evaluation_loses_neither_step_nor_row(digits_run, monkeypatch):
    """A signal calls `stop` from another thread; here an evaluation calls it and does not return."""
    _, uninterrupted = digits_run("uninterrupted")
    real_run, real_record = Trainer.run_steps, hooks.MetricsHook._record
    trainers = []

    def run_steps(self, state):
        trainers.append(self)
        real_run(self, state)

    def record(self, step, *args):
        if step == 6:
            assert trainers[0].stop() == "step 6 is saved"
            raise KeyboardInterrupt
        real_record(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_steps", run_steps)
        patch.setattr(hooks.MetricsHook, "_record", record)
        status, workdir = digits_run("stopped", ckpt_steps=100)
    assert status == 130
    assert saved_steps(workdir) == [6]
    assert metrics.read(workdir / "metrics.jsonl")[-1]["step"] == 4
    assert digits_run("stopped", ckpt_steps=100)[0] == 0
    assert (workdir / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert same(load_params(workdir), load_params(uninterrupted))
