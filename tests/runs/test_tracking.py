"""`config.wandb`: the rows of metrics.jsonl in Weights & Biases, one W&B run per workdir, and errors of W&B."""

import importlib.metadata
import json
import sys
import types

import pytest
from training_runs import interrupted_before, small_setup

from dcvit.errors import ConfigError
from dcvit.runs import metrics
from dcvit.runs.tracking import WandbRun, check_wandb

pytestmark = pytest.mark.usefixtures("library_promotion")
OPTIONS = {"project": "digits", "mode": "offline"}


@pytest.fixture
def wandb(monkeypatch):
    """A module that records the runs that are started, their rows and how they ended; `fails` names a failing call."""
    module = types.SimpleNamespace(runs=[], fails=None)

    class FakeRun:
        def __init__(self, arguments):
            self.arguments, self.rows, self.exit_code = arguments, {}, None

        def log(self, row, step):
            if module.fails == "log":
                raise RuntimeError("no connection\nmore")
            assert step not in self.rows
            self.rows[step] = row

        def finish(self, exit_code):
            self.exit_code = exit_code

    def init(project=None, name=None, mode=None, tags=None, settings=None, **own):
        if module.fails == "init":
            raise OSError("no space left")
        module.runs.append(FakeRun({"project": project, "name": name, "mode": mode, "settings": settings, **own}))
        return module.runs[-1]

    module.init = init
    version = importlib.metadata.version
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0" if name == "wandb" else version(name))
    return module


def rows_of(workdir):
    return {row.pop("step"): row for row in metrics.read(workdir / "metrics.jsonl")}


@pytest.mark.slow
def test_rows_are_those_of_the_metrics_and_a_resumed_run_continues(digits_run, wandb, monkeypatch):
    with interrupted_before(monkeypatch, 5):
        assert digits_run(wandb=OPTIONS)[0] == 130
    status, workdir = digits_run(wandb=OPTIONS)
    assert status == 0
    first, second = wandb.runs
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert (first.arguments["id"], first.arguments["resume"]) == (second.arguments["id"], "allow")
    assert json.loads((workdir / "wandb.json").read_text()) == {"id": first.arguments["id"]}
    assert (first.arguments["project"], first.arguments["name"]) == ("digits", "run")
    assert first.arguments["config"]["total_steps"] == 6
    assert first.arguments["dir"] == str(workdir)
    assert first.rows | second.rows == rows_of(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["log", pytest.param("init", marks=pytest.mark.exhaustive)])
def test_error_of_wandb_does_not_end_the_run(digits_run, wandb, capsys, call):
    wandb.fails = call
    status, workdir = digits_run(wandb=OPTIONS)
    assert (status, max(rows_of(workdir))) == (0, 6)
    err = capsys.readouterr().err
    assert err.count("Weights & Biases failed, and training continues without it") == 1
    assert "more" not in err


def test_new_run_in_a_workdir_is_a_new_wandb_run(tmp_path, wandb):
    for resumed in (False, True, False):
        WandbRun(tmp_path, OPTIONS, {}, resumed=resumed)
    first, second, third = (run.arguments["id"] for run in wandb.runs)
    assert first == second != third


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projet": "x"}, "config.wandb has no option 'projet'; did you mean 'project'?"),
        ({"mode": "ofline"}, "config.wandb.mode='ofline'; did you mean 'offline'?"),
    ],
)
def test_unknown_option_is_refused(wandb, options, message):
    with pytest.raises(ConfigError) as error:
        check_wandb(options)
    assert message in str(error.value)


@pytest.mark.slow
def test_missing_package_is_refused_before_anything_compiles(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert small_setup().options.wandb == {}
    with pytest.raises(ConfigError, match=r'pip install "dcvit\[wandb\]"'):
        small_setup(wandb=OPTIONS)


@pytest.mark.interop
def test_the_real_package_writes_a_run_offline(digits_run):
    wandb = pytest.importorskip("wandb", reason="the extra wandb (80 MB) is not installed")
    status, workdir = digits_run(wandb=OPTIONS)
    assert status == 0
    assert not wandb.run
    (log,) = (workdir / "wandb").glob("offline-run-*/run-*.wandb")
    assert json.loads((workdir / "wandb.json").read_text())["id"] in log.name
    content = log.read_bytes()
    for name in ("test/top1", "grad_norm", "num_params"):
        assert name.encode() in content
