"""Training runs as the command makes them: deterministic, resumable, initialized, logged and profiled."""

import json
import re

import jax
import pytest
from training_runs import interrupted_before, lm_command, same

from dcvit import config as configs
from dcvit.checkpoint.checkpointer import load_params
from dcvit.runs import metrics

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]

COMPOSED = {"model.compose": "both"}
NO_UPDATE = {"total_steps": 1, "ckpt_steps": 1, "lr": 0.0, "wd": 0.0}


def test_equal_seeds_give_equal_runs_and_another_seed_another_run(digits_run):
    runs = [digits_run(name, **o) for name, o in {"a": {}, "b": {}, "c": {"seed": 1}}.items()]
    assert [status for status, _ in runs] == [0, 0, 0]
    a, b, c = (load_params(workdir) for _, workdir in runs)
    assert same(a, b)
    assert not same(a, c)
    texts = [(workdir / "metrics.jsonl").read_bytes() for _, workdir in runs]
    assert texts[0] == texts[1] != texts[2]


def test_run_writes_config_data_and_one_row_per_logged_step(digits_run):
    status, workdir = digits_run(log_steps=4)
    assert status == 0
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 4, 6]
    assert rows[0]["num_params"] == sum(x.size for x in jax.tree.leaves(load_params(workdir)))
    assert ["test/top1" in row for row in rows] == [True, True, False, True]
    assert all(row["test/n"] == 360 for row in rows if "test/n" in row)
    assert [row["step"] for row in metrics.read(workdir / "timing.jsonl")] == [4, 6]
    data = json.loads((workdir / "data.json").read_text())
    assert (data["examples"], data["class_names"]) == (1437, list("0123456789"))
    assert configs.read_json(workdir / "config.json").total_steps == 6
    table = (workdir / "parameters.txt").read_text()
    assert "head/kernel" in table
    assert f"{rows[0]['num_params']:,}" in table
    before = (workdir / "metrics.jsonl").read_bytes()
    assert digits_run(log_steps=4)[0] == 0  # nothing is left to do
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_interrupted_run_resumes_to_the_same_bits(digits_run, monkeypatch):
    options = {"ema_decay": 0.9, "mixup": 0.2, **COMPOSED}
    _, uninterrupted = digits_run("uninterrupted", **options)
    with interrupted_before(monkeypatch, 5) as steps:
        status, workdir = digits_run("interrupted", **options)
    assert (status, steps) == (130, [1, 2, 3, 4, 5])
    assert [row["step"] for row in metrics.read(workdir / "metrics.jsonl")] == [0, 2, 3, 4]
    with interrupted_before(monkeypatch, None) as steps:
        status, workdir = digits_run("interrupted", **options)
    assert (status, steps) == (0, [4, 5, 6])  # from the checkpoint of step 3
    assert same(load_params(uninterrupted), load_params(workdir))
    assert (uninterrupted / "metrics.jsonl").read_bytes() == (workdir / "metrics.jsonl").read_bytes()
    seconds = [row["seconds"] for row in metrics.read(workdir / "timing.jsonl")]
    assert seconds == sorted(seconds)  # the wall time counts on
    assert len(seconds) == 3


def test_interrupted_language_model_resumes_to_the_same_bits(tmp_path, monkeypatch):
    assert lm_command(tmp_path / "uninterrupted") == 0
    with interrupted_before(monkeypatch, 5):
        assert lm_command(tmp_path / "interrupted") == 130
    assert lm_command(tmp_path / "interrupted") == 0
    one, other = tmp_path / "uninterrupted", tmp_path / "interrupted"
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert same(load_params(one), load_params(other))
    rows = metrics.read(one / "metrics.jsonl")
    assert rows[-1]["validation/bits_per_byte"] < rows[0]["validation/bits_per_byte"] <= 8.1


def test_frozen_parameters_do_not_change(digits_run):
    status, workdir = digits_run(frozen=["Transformer/.*"], ckpt_keep=2)
    assert status == 0
    earlier, end = (load_params(workdir / "checkpoints" / step) for step in ("3", "6"))
    assert same(end["Transformer"], earlier["Transformer"])
    assert not same(end["head"], earlier["head"])


def test_run_starts_from_the_parameters_of_another_run(digits_run):
    _, first = digits_run("first")
    _, fresh = digits_run("fresh", **NO_UPDATE)
    status, second = digits_run("second", model_init=first, **NO_UPDATE)
    assert status == 0
    assert same(load_params(first), load_params(second))
    status, mixed = digits_run("mixed", model_init=first, **{"model_load.dont_load": ["head/.*"]}, **NO_UPDATE)
    assert status == 0
    assert same(load_params(mixed)["Transformer"], load_params(first)["Transformer"])
    assert same(load_params(mixed)["head"], load_params(fresh)["head"])  # what is not loaded starts from the seed
    assert not same(load_params(mixed)["head"], load_params(first)["head"])


@pytest.mark.parametrize("steps", [(2, 3), pytest.param((6, 100), marks=pytest.mark.exhaustive)])
def test_profile_is_recorded_for_the_given_steps(digits_run, steps):
    status, workdir = digits_run(profile=steps)
    assert status == 0
    assert list((workdir / "profile").rglob("*.xplane.pb"))


@pytest.mark.exhaustive
def test_profile_window_that_started_before_an_interruption_is_recorded_after_it(digits_run, monkeypatch):
    with interrupted_before(monkeypatch, 2):
        assert digits_run(profile=(2, 5), ckpt_steps=1)[0] == 130
    with interrupted_before(monkeypatch, 2):
        status, workdir = digits_run(profile=(1, 5), ckpt_steps=1)
    assert status == 130
    status, workdir = digits_run(profile=(1, 5), ckpt_steps=1)
    assert status == 0
    assert list((workdir / "profile").rglob("*.xplane.pb"))


def test_last_step_evaluates_with_every_interval(digits_run):
    status, workdir = digits_run(**{"evals.test.log_steps": 0}, log_steps=0)
    assert status == 0
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 6]
    assert rows[-1]["test/n"] == 360


def test_diverged_run_ends_with_one_line(digits_run, capsys):
    status, workdir = digits_run(lr=1e38, grad_clip_norm="none")
    assert status == 2
    assert re.search(r"error: step \d: the loss is (nan|inf); stopped", capsys.readouterr().err)
    assert "NaN" not in (workdir / "metrics.jsonl").read_text()


def test_tensorboard_gets_the_metrics_if_it_is_installed(digits_run):
    pytest.importorskip("tensorflow", reason="TensorBoard is written only if tensorflow is installed")
    status, workdir = digits_run(tensorboard=True)
    assert status == 0
    events = b"".join(p.read_bytes() for p in workdir.glob("events.out.tfevents*"))
    assert b"test/top1" in events
    assert b"grad_norm" in events


def test_workdir_of_another_config_is_refused_and_unchanged(digits_run, capsys):
    _, workdir = digits_run(total_steps=2)
    before = (workdir / "config.json").read_bytes()
    status, _ = digits_run(total_steps=2, lr=0.1)
    assert status == 2
    err = capsys.readouterr().err
    assert "lr" in err
    assert "0.002" in err
    assert "0.1" in err
    assert (workdir / "config.json").read_bytes() == before
    assert digits_run(total_steps=2, ckpt_steps=1)[0] == 0
