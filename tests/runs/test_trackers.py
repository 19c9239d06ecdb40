"""Trackers: their rows are those of the metrics, also after a kill; errors of a tracker do not end a run."""

import json
import struct
import subprocess
import sys
import types

import pytest
from training_runs import interrupted_before, refusal, small_setup

from dcvit.errors import ConfigError
from dcvit.runs import metrics, trackers
from dcvit.runs.trackers import Trackers
from input_pipeline import MissingLibraryError

pytestmark = pytest.mark.usefixtures("library_promotion")


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


class Recorder:
    """A tracker that fails in the method `fails`."""

    def __init__(self, workdir, *more):
        self.fails, self.rows, self.ended = more[-1], [], None
        self._fail("start")

    def write(self, step, row):
        self._fail("write")
        self.rows.append(step)

    def close(self, *, failed):
        self._fail("close")
        self.ended = failed

    def _fail(self, method):
        if self.fails == method:
            raise RuntimeError("no connection\nmore")


@pytest.mark.parametrize("method", ["start", "write", "close"])
def test_an_error_of_a_tracker_is_logged_once_and_others_continue(tmp_path, monkeypatch, caplog, method):
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    monkeypatch.setattr(trackers, "WandB", Recorder)
    monkeypatch.setattr(trackers, "TensorBoard", Recorder)
    started = Trackers({"wandb": method, "tensorboard": True}, tmp_path, {}, 0)
    other = started.active["tensorboard"]
    for step in range(3):
        started.write(step, {"loss": 0.5})
    started.close(failed=False)
    assert (other.rows, other.ended) == ([0, 1, 2], False)
    assert caplog.messages == ["wandb failed, and training continues without it: RuntimeError: no connection"]


def test_events_are_written_without_the_writer_of_tensorboard(tmp_path):
    """It imports boto3 where that is installed, which takes a second."""
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    code = (
        "import pathlib, sys; from dcvit.runs.trackers import TensorBoard; "
        "TensorBoard(pathlib.Path(sys.argv[1]), 0).close(failed=False); print('tensorboard.summary' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True).stdout
    assert found == "False\n"
    assert [*tmp_path.glob("events.out.tfevents*")]


def test_tensorboard_shows_each_row_once_after_a_kill(tmp_path):
    """The rows of steps 5 to 7, after the checkpoint of step 4, are in the files of both starts."""
    pytest.importorskip("tensorboard", reason="the extra data is not installed")
    writers = []
    for resumed, steps in (({}, range(8)), ({"step": 4}, range(5, 10))):
        writer = metrics.MetricWriter(tmp_path, resumed=resumed, trackers={"tensorboard": True})
        writers.append(writer)
        for step in steps:  # the files are not closed yet, as after a kill
            writer.write(step, {"loss": 1 / (step + 1), "val/top1": step / 8}, {"step_seconds": 0.5})
    assert len([*tmp_path.glob("events.out.tfevents*")]) == 2
    assert [*rows_of(tmp_path)] == [*range(10)]
    assert tensorboard_rows(tmp_path) == single_precision(rows_of(tmp_path))
    for writer in writers:
        writer.close()


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
        Trackers({"wandb": {"project": "digits"}}, tmp_path, {}, step)
    first, second, third = (run.arguments["id"] for run in wandb.runs)
    assert first == second != third


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projet": "x"}, "config.wandb has no option 'projet'; did you mean 'project'?"),
        ({"project": 3}, "config.wandb: project=3 should be of type str | None, not int"),
        ({"id": "x"}, "config.wandb.id is set by the run"),
    ],
)
def test_invalid_option_is_refused(wandb, options, message):
    with pytest.raises(ConfigError) as error:
        trackers.check({"wandb": options})
    assert message in str(error.value)


@pytest.mark.slow
def test_missing_library_is_refused_before_anything_compiles(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert small_setup().trackers == {"tensorboard": True}
    with pytest.raises(MissingLibraryError, match=r'^this needs wandb, .*: pip install "dcvit\[wandb\]"$'):
        small_setup(wandb={"project": "x"})


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
    assert b"num_params" in logs[0].read_bytes()


@pytest.mark.interop
def test_invalid_option_of_the_library_is_refused():
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    message = refusal(small_setup, wandb={"project": "x", "tagz": "y"})
    assert message == "config.wandb has no option 'tagz'; did you mean 'tags'?"
