"""Hooks between the steps: the non-finite guard and the best checkpoint."""

import functools
import json
import re

import jax
import numpy as np
import pytest
from trained_workdirs import load_params
from training_runs import interrupted_before

from dcvit.runs import metrics
from dcvit.runs.steps import saved_steps
from dcvit.training import inputs
from dcvit.training.loop import Trainer

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]


@pytest.fixture
def digits_run(digits_run):
    """Train a model without layers, which compiles fastest."""
    return functools.partial(digits_run, **{"model.depth": 0})


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
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(load_params(workdir)))
    assert "NaN" not in (workdir / "metrics.jsonl").read_text()


def test_non_finite_state_is_not_saved(digits_run, capsys, monkeypatch):
    """A step may overflow a parameter although its loss and gradient are finite."""
    real = Trainer._after_step

    def overflow(self, previous, result):
        if result.step == 3:
            params = result.state.params
            head = {"kernel": params["head"]["kernel"].at[0, 0].set(np.inf)}
            result.state = result.state.replace(params={**params, "head": {**params["head"], **head}})
        return real(self, previous, result)

    monkeypatch.setattr(Trainer, "_after_step", overflow)
    status, workdir = digits_run(ckpt_steps=1, ckpt_keep=9, evals={})
    assert status == 2
    assert "step 3: params/head/kernel is not finite; not saved" in capsys.readouterr().err
    assert saved_steps(workdir) == [1, 2]


def test_run_prints_the_fields_of_the_model_that_it_trains(digits_run, capsys):
    """Arguments such as `runlocal` replace the model that the command names."""
    assert digits_run(total_steps=1, **{"model.width": 12})[0] == 0
    assert re.search(r"\nmodel: vit .*width=12.*: [0-9,]+ parameters, 1 steps\n", capsys.readouterr().out)


def test_checkpoints_of_the_second_interval_are_saved_and_kept(digits_run):
    status, workdir = digits_run(ckpt_steps=4, keep_ckpt_steps=3, ckpt_keep=1, total_steps=7, evals={})
    assert status == 0
    assert saved_steps(workdir) == [3, 6, 7]


def test_best_checkpoint_is_saved_and_kept_also_by_a_resumed_run(digits_run, monkeypatch):
    """The test loss falls, so that its maximum is at step 1, which a run that resumes at step 3 has to remember."""
    options = {"ckpt_best": ("test/loss", "max"), "ckpt_keep": 1, "ckpt_steps": 3, "evals.test.log_steps": 1}
    with interrupted_before(monkeypatch, 5):
        assert digits_run(**options)[0] == 130
    status, workdir = digits_run(**options)
    assert status == 0
    losses = {row["step"]: row["test/loss"] for row in metrics.read(workdir / "metrics.jsonl") if row["step"]}
    assert saved_steps(workdir) == sorted({max(losses, key=losses.get), 6})
