"""Trackers: their rows are those of the metrics, also after a kill; errors of a tracker do not end a run."""

import json
import math
import os
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest
from training_runs import interrupted_before, refusal, small_setup

from dcvit.errors import ConfigError
from dcvit.runs import metrics, tracking
from dcvit.runs.tracking import TrackedRun, Trackers

pytestmark = pytest.mark.usefixtures("library_promotion")
ROOT = Path(__file__).parents[2]
CONFIG = {"lr": 0.1, "model": {"width": 8}, "evals": {}}
KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from dcvit.runs.metrics import MetricWriter

writer = MetricWriter(Path(sys.argv[1]), resumed={}, trackers=json.loads(sys.argv[2]), config=json.loads(sys.argv[3]))
for step in range(8):
    writer.write(step, {"loss": 1 / (step + 1), "val/top1": step / 8}, {"step_seconds": 0.5})
os.kill(os.getpid(), signal.SIGKILL)
"""


def rows_of(workdir):
    """Return the metrics and timings of each step in the files of a workdir."""
    rows = {row.pop("step"): row for row in metrics.read(workdir / "metrics.jsonl")}
    for row in metrics.read(workdir / "timing.jsonl"):
        rows[row.pop("step")] |= row
    return rows


def tensorboard_rows(workdir):
    """Return the rows that TensorBoard shows; it stores numbers in single precision."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workdir)).Reload()
    rows = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in rows.setdefault(event.step, {})
            rows[event.step][tag] = event.value
    return rows


def single_precision(rows):
    return {step: {n: struct.unpack("f", struct.pack("f", x))[0] for n, x in row.items()} for step, row in rows.items()}


def killed(workdir, trackers):
    """Write rows of eight steps to trackers in another process, which is then killed."""
    workdir.mkdir(exist_ok=True)
    words = [sys.executable, "-c", KILLED, workdir, json.dumps(trackers), json.dumps(CONFIG)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, words)], env=environment, cwd=workdir.parent, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


def resumed(workdir, trackers, *, failed=False):
    """Resume that run from step 4, and write the rows to step 9."""
    writer = metrics.MetricWriter(workdir, resumed={"step": 4}, trackers=trackers, config=CONFIG)
    assert writer.trackers.active.keys() == trackers.keys()
    for step in range(5, 10):
        writer.write(step, {"loss": 1 / (step + 1), "val/top1": step / 8}, {"step_seconds": 0.5})
    writer.trackers.close(failed=failed)
    writer.close()
    assert [*rows_of(workdir)] == [*range(10)]


class Recorder:
    """A tracker that has the rows up to `last_step`, and fails in the method `fails`."""

    def __init__(self, run, options):
        self.last_step, self.fails = options["last_step"], options.get("fails")
        self.rows, self.ended = {}, None
        self._fail("start")

    def write(self, step, row):
        self._fail("write")
        assert step not in self.rows
        self.rows[step] = row

    def close(self, *, failed):
        self._fail("close")
        self.ended = failed

    def _fail(self, method):
        if self.fails == method:
            raise RuntimeError("no connection\nmore")


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(tracking, "_module", lambda name: types.SimpleNamespace(Tracker=Recorder))


@pytest.mark.parametrize(("last_step", "sent"), [(-1, [0, 2, 4, 6, 8]), (2, [4, 6, 8]), (6, [8])])
def test_a_resumed_run_sends_the_rows_that_a_tracker_lacks(tmp_path, recorder, last_step, sent):
    before = [{"step": step, "loss": None if step == 2 else 1.0} for step in (0, 2, 4)]
    trackers = Trackers({"a": {"last_step": last_step}}, TrackedRun(tmp_path, {}, 4), before)
    for step in (6, 8):
        trackers.write(step, {"loss": 0.5})
    tracker = trackers.active["a"]
    trackers.close(failed=True)
    assert ([*tracker.rows], tracker.ended) == (sent, True)
    assert all(math.isnan(row["loss"]) == (step == 2) for step, row in tracker.rows.items())


@pytest.mark.parametrize("method", ["start", "write", "close"])
def test_an_error_of_a_tracker_is_logged_once_and_others_continue(tmp_path, recorder, caplog, method):
    options = {"a": {"last_step": -1, "fails": method}, "b": {"last_step": -1}}
    trackers = Trackers(options, TrackedRun(tmp_path, {}, 0))
    other = trackers.active["b"]
    for step in range(3):
        trackers.write(step, {"loss": 0.5})
    trackers.close(failed=False)
    assert (len(other.rows), other.ended) == (3, False)
    assert caplog.messages == ["a failed, and training continues without it: RuntimeError: no connection"]


@pytest.mark.slow
def test_tensorboard_shows_each_row_once_after_a_kill(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    killed(tmp_path / "run", {"tensorboard": True})
    resumed(tmp_path / "run", {"tensorboard": True})
    assert len([*(tmp_path / "run").glob("events.out.tfevents*")]) == 2
    assert tensorboard_rows(tmp_path / "run") == single_precision(rows_of(tmp_path / "run"))


@pytest.mark.slow
def test_tensorboard_added_to_a_resumed_run_shows_all_rows(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    killed(tmp_path / "run", {})
    resumed(tmp_path / "run", {"tensorboard": True})
    assert tensorboard_rows(tmp_path / "run") == single_precision(rows_of(tmp_path / "run"))


@pytest.mark.slow
def test_tensorboard_is_written_without_tensorflow(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    code = "import sys; from dcvit.runs.metrics import MetricWriter; from pathlib import Path\n"
    code += "MetricWriter(Path(sys.argv[1]), resumed={}, trackers={'tensorboard': True}).write(0, {'x': 1})\n"
    code += "sys.exit('tensorflow' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code, tmp_path], env=environment).returncode == 0
    assert tensorboard_rows(tmp_path) == {0: {"x": 1}}


@pytest.mark.slow
def test_an_interrupted_and_resumed_training_has_one_row_per_step_in_tensorboard(digits_run, monkeypatch):
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    with interrupted_before(monkeypatch, 5):
        assert digits_run(tensorboard=True)[0] == 130
    status, workdir = digits_run(tensorboard=True)
    assert status == 0
    found = tensorboard_rows(workdir)
    assert found == single_precision(rows_of(workdir))
    assert {"test/top1", "grad_norm", "examples_per_second"} <= found[6].keys()


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for W&B, with the runs that are started; `steps` is the server's number of steps of each id."""
    module = types.ModuleType("wandb")
    module.runs, module.steps, module.__file__ = [], {}, "wandb.py"

    class FakeRun:
        def __init__(self, arguments):
            self.arguments, self.rows, self.exit_code = arguments, {}, None
            self.offline = arguments["mode"] == "offline"
            self.step = 0 if self.offline else module.steps.get(arguments["id"], 0)

        def log(self, row, step, commit):
            assert commit
            self.rows[step] = row
            module.steps[self.arguments["id"]] = step + 1

        def finish(self, exit_code):
            self.exit_code = exit_code

    def init(project: str | None = None, name=None, mode=None, tags=None, settings=None, resume_from=None, **own):
        module.runs.append(FakeRun({"project": project, "name": name, "mode": mode, "settings": settings, **own}))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", pytest.param("offline", marks=pytest.mark.exhaustive)])
def test_a_resumed_run_continues_its_run_of_wandb(digits_run, wandb, monkeypatch, mode):
    options = {"project": "digits", "mode": mode}
    with interrupted_before(monkeypatch, 5):
        assert digits_run(wandb=options)[0] == 130
    status, workdir = digits_run(wandb=options)
    assert status == 0
    first, second = wandb.runs
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert (first.arguments["id"], first.arguments["resume"]) == (second.arguments["id"], "allow")
    assert json.loads((workdir / "wandb.json").read_text()) == {"id": first.arguments["id"]}
    assert (first.arguments["project"], first.arguments["name"]) == ("digits", "run")
    assert first.arguments["config"]["total_steps"] == 6
    assert first.arguments["dir"] == str(workdir)
    sent = first.rows | second.rows
    assert sent.keys() == rows_of(workdir).keys()
    assert sent[6] == rows_of(workdir)[6]
    assert mode == "offline" or not first.rows.keys() & second.rows.keys()


def test_new_run_in_a_workdir_is_a_new_run_of_wandb(tmp_path, wandb):
    for step in (0, 3, 0):
        Trackers({"wandb": {"project": "digits"}}, TrackedRun(tmp_path, {}, step))
    first, second, third = (run.arguments["id"] for run in wandb.runs)
    assert first == second != third


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projet": "x"}, "config.wandb has no option 'projet'; did you mean 'project'?"),
        ({"id": "x"}, "config.wandb has no option 'id'"),
        ({"mode": "ofline"}, "config.wandb.mode='ofline'; did you mean 'offline'?"),
        ({"project": 3}, "config.wandb: project=3 should be of type str | None, not int"),
    ],
)
def test_invalid_option_is_refused(wandb, options, message):
    with pytest.raises(ConfigError) as error:
        tracking.check({"wandb": options})
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_missing_library_is_refused_before_anything_compiles(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert small_setup().options.trackers == {"tensorboard": True}
    message = refusal(small_setup, **{name: {"project": "x"}})
    assert message == f'config.{name} needs {name}, which is not installed: pip install "dcvit[{name}]"'


def test_folder_with_the_name_of_a_library_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "wandb" / "run").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="which is not installed"):
        tracking.library("wandb")
    sys.modules.pop("wandb", None)


@pytest.mark.interop
def test_wandb_writes_a_run_offline(digits_run, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb (80 MB) is not installed")
    options = {"project": "digits", "mode": "offline"}
    with interrupted_before(monkeypatch, 5):
        assert digits_run(wandb=options)[0] == 130
    status, workdir = digits_run(wandb=options)
    assert status == 0
    identifier = json.loads((workdir / "wandb.json").read_text())["id"]
    logs = sorted((workdir / "wandb").glob(f"offline-run-*/run-{identifier}.wandb"))
    assert len(logs) == 2
    found = [row for log in logs for row in wandb_rows(log.read_bytes())]
    expected = rows_of(workdir)
    assert {row["_step"] for row in found} == expected.keys()
    assert all(row["loss"] == expected[row["_step"]]["loss"] for row in found if row["_step"])
    assert expected[6].items() <= found[-1].items()
    assert b"num_params" in logs[0].read_bytes()


def wandb_rows(data):
    """Yield the rows in a file of W&B: records in blocks of 32 KiB, each with checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, held = 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        held, at = held + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record, held = Record.FromString(held), b""
            if record.WhichOneof("record_type") == "history":
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow without network and statistics about its use."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    return pytest.importorskip("mlflow", reason="the extra mlflow is not installed")


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")  # MLflow uses deprecated functions of its libraries
@pytest.mark.parametrize("failed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_mlflow_has_each_row_once_after_a_kill(tmp_path, mlflow, failed):
    uri, workdir = f"sqlite:///{tmp_path}/store.db", tmp_path / "run"
    options = {"mlflow": {"tracking_uri": uri, "experiment": "digits", "tags": {"team": "vision"}}}
    killed(workdir, options)
    resumed(workdir, options, failed=failed)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FAILED" if failed else "FINISHED")
    assert run.info.run_id == json.loads((workdir / "mlflow.json").read_text())["id"]
    assert run.data.params == {"lr": "0.1", "model.width": "8", "evals": "{}"}
    assert run.data.tags["team"] == "vision"
    found = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert name not in found.setdefault(metric.step, {})
            found[metric.step][name] = metric.value
    assert found == rows_of(workdir)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_names_that_it_allows(tmp_path, mlflow):
    options = {"tracking_uri": f"sqlite:///{tmp_path}/store.db", "experiment": "digits"}
    trackers = Trackers({"mlflow": options}, TrackedRun(tmp_path, {"evals": {"a@b": 1}}, 0))
    trackers.write(0, {"a@b/top1": math.nan, "n": 3})
    assert trackers.active
    trackers.close(failed=False)
    run = mlflow.MlflowClient(options["tracking_uri"]).get_run(json.loads((tmp_path / "mlflow.json").read_text())["id"])
    assert run.data.params == {"evals.a_b": "1"}
    assert math.isnan(run.data.metrics.pop("a_b/top1"))
    assert run.data.metrics == {"n": 3}


@pytest.mark.interop
def test_trackio_has_each_row_once_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio", reason="the extra trackio is not installed")
    for module in (trackio.utils, trackio.sqlite_storage):  # the library may be imported with another folder
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    options, workdir = {"trackio": {"project": "digits", "group": "small"}}, tmp_path / "run"
    killed(workdir, options)
    resumed(workdir, options)
    (run,) = trackio.Api().runs("digits")
    assert run.name == json.loads((workdir / "trackio.json").read_text())["id"]
    assert run.name.startswith("run-")
    assert {key: value for key, value in run.config.items() if not key.startswith("_")} == CONFIG
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("digits", run.name)
    found = {row["step"]: {k: v for k, v in row.items() if k not in ("step", "timestamp")} for row in rows}
    assert len(rows) == len(found)
    assert found == rows_of(workdir)


@pytest.mark.interop
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlflow", {"experimant": "x"}, "config.mlflow has no option 'experimant'; did you mean 'experiment'?"),
        ("mlflow", {"experiment": 3}, "config.mlflow.experiment=3 should be a string"),
        ("mlflow", {"tags": "x"}, "config.mlflow: tags='x' should be of type dict[str, Any] | None, not str"),
        ("trackio", {"name": "x"}, "config.trackio: missing a required argument: 'project'"),
        ("trackio", {"project": "x", "grup": "y"}, "config.trackio has no option 'grup'; did you mean 'group'?"),
        ("wandb", {"project": "x", "tagz": "y"}, "config.wandb has no option 'tagz'; did you mean 'tags'?"),
    ],
)
def test_invalid_option_of_a_library_is_refused(name, options, message):
    pytest.importorskip(name, reason=f"the extra {name} is not installed")
    assert refusal(small_setup, **{name: options}) == message
