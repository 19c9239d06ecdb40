"""Training runs as the command makes them: deterministic, resumable, initialized, logged and profiled."""

import json
import shutil

import jax
import pytest
from conversion_models import open_saved
from trained_workdirs import load_params
from training_runs import digits_command, interrupted_before, same, same_runs

from dcvit.config import values
from dcvit.runs import metrics
from dcvit.runs.steps import saved_steps
from dcvit.weights.export import conversion

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]

RANDOM = {  # without layers a model compiles fastest
    "mixup": 0.2, "cutmix": 1.0, "reprob": 0.25, "ema_decay": 0.9, "model.depth": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The workdir of a complete run; a test that writes to it copies it first."""
    workdir = tmp_path_factory.mktemp("complete") / "run"
    assert digits_command(workdir, **RANDOM) == 0
    return workdir


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    """The workdir of a run with a profile, TensorBoard if it is installed, and no intervals."""
    workdir = tmp_path_factory.mktemp("special") / "run"
    options = {"model.depth": 0, "profile": (2, 3), "tensorboard": True}
    assert digits_command(workdir, **options, log_steps=0, **{"evals.test.log_steps": 0}) == 0
    return workdir


def test_run_writes_config_data_and_one_row_per_logged_step(complete, tmp_path, digits_run):
    workdir = shutil.copytree(complete, tmp_path / "run")
    rows = metrics.read(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 3, 4, 6]
    assert rows[0]["num_params"] == sum(x.size for x in jax.tree.leaves(load_params(workdir)))
    assert ["test/top1" in row for row in rows] == [True, False, True, False, True]
    assert all(row["test/n"] == 360 for row in rows if "test/n" in row)
    assert [row["step"] for row in metrics.read(workdir / "timing.jsonl")] == [2, 4, 6]
    data = json.loads((workdir / "data.json").read_text())
    assert (data["examples"], data["class_names"]) == (1437, list("0123456789"))
    assert values.read_json(workdir / "config.json").total_steps == 6
    table = (workdir / "parameters.txt").read_text()
    assert "head/kernel" in table
    assert f"{rows[0]['num_params']:,}" in table
    before = (workdir / "metrics.jsonl").read_bytes()
    assert digits_run(**RANDOM)[0] == 0  # nothing is left to do
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_interrupted_run_resumes_to_the_same_bits(complete, digits_run, monkeypatch):
    """Also if the row of the checkpoint was lost, and a row of a later step was cut."""
    with interrupted_before(monkeypatch, 5) as steps:
        status, workdir = digits_run("interrupted", **RANDOM)
    assert (status, steps) == (130, [1, 2, 3, 4, 5])
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 3, 4]
    (workdir / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    with interrupted_before(monkeypatch, None) as steps:
        status, workdir = digits_run("interrupted", **RANDOM)
    assert (status, steps) == (0, [4, 5, 6])  # from the checkpoint of step 3
    assert same_runs(complete, workdir)
    seconds = [row["seconds"] for row in metrics.read(workdir / "timing.jsonl")]
    assert seconds == sorted(seconds)  # the wall time counts on
    assert len(seconds) == 3


def test_run_starts_from_the_parameters_of_another_run_but_for_those_that_are_not_loaded(complete, digits_run):
    options = {"total_steps": 1, "ckpt_steps": 1, "lr": 0.0, "wd": 0.0, "seed": 1, "model.depth": 0}
    statuses, workdirs = zip(
        digits_run("fresh", **options),
        digits_run("mixed", model_init=complete, **{"model_load.dont_load": ["embedding/.*"]}, **options),
        strict=True,
    )
    assert statuses == (0, 0)
    first, fresh, mixed = map(load_params, (complete, *workdirs))
    assert same(mixed["embedding"], fresh["embedding"])  # what is not loaded starts from the seed
    assert not same(fresh["embedding"], first["embedding"])
    assert not same(fresh.pop("head"), first["head"])
    for params in (first, mixed):
        del params["embedding"]
    assert same(mixed, first)


def test_run_starts_from_the_converted_model_in_its_workdir_and_keeps_it(complete, digits_run, tmp_path, monkeypatch):
    """Also after a kill before its first checkpoint, and if its later checkpoints are removed."""
    workdir = tmp_path / "converted"
    conversion.convert([complete], workdir, "dcvit", open_saved)
    with interrupted_before(monkeypatch, 2):
        assert digits_run("converted", **RANDOM) == (130, workdir)
    trained, start = metrics.read(complete / "metrics.jsonl")[-1], metrics.read(workdir / "metrics.jsonl")
    evaluation = {name: value for name, value in trained.items() if name.startswith("test/")}
    assert start == [{"step": 0, "num_params": start[0]["num_params"], **evaluation}]
    assert digits_run("converted", **RANDOM)[0] == 0
    rows = (workdir / "metrics.jsonl").read_bytes()
    assert saved_steps(workdir) == [0, 3, 6]
    for step in ("3", "6"):
        shutil.rmtree(workdir / "checkpoints" / step)
    assert digits_run("converted", **RANDOM)[0] == 0
    assert (workdir / "metrics.jsonl").read_bytes() == rows
    assert same(load_params(workdir / "checkpoints" / "0"), load_params(complete))


def test_profile_is_recorded_for_the_given_steps(special):
    assert list((special / "profile").rglob("*.xplane.pb"))


def test_tensorboard_gets_the_metrics_if_it_is_installed(special):
    pytest.importorskip("tensorboard", reason="TensorBoard is written only if it is installed")
    events = b"".join(p.read_bytes() for p in special.glob("events.out.tfevents*"))
    assert b"test/top1" in events
    assert b"grad_norm" in events
