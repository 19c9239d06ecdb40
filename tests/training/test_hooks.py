"""What happens between steps: nothing that is not finite is saved, the best checkpoint is kept, rows are whole."""

import json

import jax
import numpy as np
import pytest
from test_train import make, same

from dcvit.checkpoint.checkpointer import load_params, saved_steps
from dcvit.runs import metrics
from dcvit.training import tasks
from dcvit.training.step import not_finite
from dcvit.training.trainer import Loop

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture
def poisoned(monkeypatch):
    """Makes the labels of some steps, counted from 1, NaN."""

    def poison(*steps):
        real = tasks.TrainingData.batches

        def batches(self, start_step, rows=None):
            for step, batch in enumerate(real(self, start_step, rows), start=start_step + 1):
                yield batch | ({"labels": np.full_like(batch["labels"], np.nan)} if step in steps else {})

        monkeypatch.setattr(tasks.TrainingData, "batches", batches)

    return poison


def test_a_step_that_is_not_finite_changes_nothing_but_the_counts():
    state, batch, update = make(ema_decay=0.9, schedule={"decay_type": "constant"})
    after, numbers = update(state, batch | {"labels": batch["labels"] * np.nan})
    assert not np.isfinite(numbers["loss"])
    for name in ("params", "opt_state", "ema"):
        assert same(getattr(state, name), getattr(after, name))
    assert (after.step, after.nonfinite, numbers["nonfinite"]) == (1, 1, 1)
    finite, numbers = update(after, batch)
    assert not same(finite.params, state.params)
    assert (finite.step, finite.nonfinite) == (2, 1)


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(digits_run, capsys, poisoned):
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


def test_a_stop_just_after_a_step_that_is_not_finite_saves_nothing(digits_run, poisoned, monkeypatch):
    """The main thread looks at a step when the next one is under way already."""
    poisoned(4)
    real, said = Loop._advance, []

    def advance(self, update, step, state, batch):
        state = real(self, update, step, state, batch)
        if step == 5:
            with pytest.raises(FloatingPointError, match="1 steps so far were not finite; stopped"):
                self.stop()
            said.append(step)
        return state

    monkeypatch.setattr(Loop, "_advance", advance)
    status, workdir = digits_run(log_steps=100)
    assert (status, said, saved_steps(workdir)) == (2, [5], [3])


def test_as_many_steps_as_asked_for_are_skipped_and_no_more(digits_run, capsys, poisoned):
    poisoned(2, 4, 5)
    status, workdir = digits_run("two", nonfinite_skip=2, log_steps=1, ckpt_steps=1, ckpt_keep=9)
    assert status == 2
    err = capsys.readouterr().err
    assert "step 2: the loss is nan; skipped, 1 of at most 2" in err
    assert "step 5: the loss is nan; stopped after 2 that were skipped" in err
    assert saved_steps(workdir) == [1, 2, 3, 4]
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["loss"] is None for row in rows[1:]] == [False, True, False, True]
    assert [row["nonfinite"] for row in rows[1:]] == [0, 1, 1, 2]
    status, workdir = digits_run("two", nonfinite_skip=3, log_steps=1, ckpt_steps=1)
    assert status == 0
    assert not not_finite(load_params(workdir))


def test_a_state_that_is_not_finite_is_not_saved(digits_run, capsys, monkeypatch):
    """A step may overflow a parameter though its loss and gradient were finite."""
    real = Loop._advance

    def overflow(self, update, step, state, batch):
        state = real(self, update, step, state, batch)
        if step == 3:
            head = {"kernel": state.params["head"]["kernel"].at[0, 0].set(np.inf)}
            state = state.replace(params={**state.params, "head": {**state.params["head"], **head}})
            self.done.state = state
        return state

    monkeypatch.setattr(Loop, "_advance", overflow)
    status, workdir = digits_run(ckpt_steps=1, ckpt_keep=9, evals={})
    assert status == 2
    assert "step 3: params/head/kernel is not finite; not saved" in capsys.readouterr().err
    assert saved_steps(workdir) == [1, 2]


def test_what_is_not_finite_is_found_wherever_it_lies():
    mesh = jax.make_mesh((8,), ("x",))
    tree = {name: np.zeros((16, 2), np.float32) for name in "abc"} | {"n": np.int32(3)}
    tree["b"][15, 1] = np.nan
    tree["c"][0, 0] = -np.inf
    split = jax.NamedSharding(mesh, jax.P("x"))
    placed = {k: jax.device_put(v, split if v.ndim else jax.NamedSharding(mesh, jax.P())) for k, v in tree.items()}
    with jax.set_mesh(mesh):
        assert not_finite(placed) == ["b", "c"]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_checkpoint_is_made_and_kept(digits_run, mode):
    options = {"ckpt_best": ("test/loss", mode), "ckpt_keep": 1, "ckpt_steps": 6, "evals.test.log_steps": 1}
    status, workdir = digits_run(**options)
    assert status == 0
    losses = {row["step"]: row["test/loss"] for row in metrics.read(workdir / "metrics.jsonl") if row["step"]}
    best = {"min": min, "max": max}[mode](losses, key=losses.get)
    assert saved_steps(workdir) == sorted({best, 6})


def test_the_best_is_remembered_by_a_run_that_goes_on(digits_run, monkeypatch):
    options = {"ckpt_best": ("test/loss", "max"), "ckpt_keep": 1, "ckpt_steps": 3, "evals.test.log_steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_profile", lambda self, step, *_: interrupt() if step == 5 else None)
        assert digits_run(**options)[0] == 130
    status, workdir = digits_run(**options)
    assert status == 0
    assert saved_steps(workdir) == [1, 6]


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("best", "message"),
    [
        (("tset/top1", "max"), "no evaluation yields 'tset/top1'; did you mean 'test/top1'"),
        (("test/top_1", "max"), "no evaluation yields 'test/top_1'; did you mean 'test/top1'"),
        (("test/top1", "most"), 'should be ("NAME/METRIC", "max" or "min")'),
    ],
)
def test_a_best_of_what_is_not_measured_is_refused(digits_run, capsys, best, message):
    assert digits_run(ckpt_best=best)[0] == 2
    assert message in capsys.readouterr().err


def test_a_row_that_a_kill_cut_off_is_written_by_the_run_that_goes_on(digits_run, monkeypatch):
    """The last checkpoint may be of a step whose evaluations were not done, or whose row was lost."""
    _, whole = digits_run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_profile", lambda self, step, *_: interrupt() if step == 5 else None)
        assert digits_run("cut")[0] == 130
    path = whole.with_name("cut") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 3, 4]
    path.write_text("".join(lines[:2]) + lines[2][:20])
    status, cut = digits_run("cut")
    assert status == 0
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_stop_during_the_last_evaluation_loses_neither_step_nor_row(digits_run, monkeypatch):
    """`stop` is what a signal calls from another thread; here an evaluation calls it, and never comes back."""
    _, whole = digits_run("whole")
    real = Loop._evaluations

    def stopped(self, step, state, names):
        if step == 6:
            assert self.stop() == "step 6 is saved"
            raise KeyboardInterrupt
        return real(self, step, state, names)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_evaluations", stopped)
        status, workdir = digits_run("stopped", ckpt_steps=100)
    assert status == 130
    assert saved_steps(workdir) == [6]
    assert metrics.read(workdir / "metrics.jsonl")[-1]["step"] == 4
    assert digits_run("stopped", ckpt_steps=100)[0] == 0
    assert (workdir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert same(load_params(workdir), load_params(whole))


def test_timing_goes_on_where_it_was(digits_run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_profile", lambda self, step, *_: interrupt() if step == 5 else None)
        digits_run()
    _, workdir = digits_run()
    seconds = [row["seconds"] for row in metrics.read(workdir / "timing.jsonl")]
    assert seconds == sorted(seconds)
    assert len(seconds) == 3
