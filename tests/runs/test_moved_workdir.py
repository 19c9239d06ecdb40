"""A workdir, or a file in it, that is removed, moved or replaced during a run stops the run with one line."""

import shutil

import pytest

from dcvit.runs import lock
from dcvit.runs.steps import saved_steps
from dcvit.training import hooks

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]


def relink(workdir):
    """The workdir becomes a link to a copy of itself, as after a move to a larger disk."""
    shutil.copytree(workdir, workdir.with_name("copy"))
    workdir.rename(workdir.with_name("moved"))
    workdir.symlink_to("copy")


def replace_metrics(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    (workdir / "metrics.jsonl").rename(workdir / "other")
    (workdir / "metrics.jsonl").write_text(text)


def lock_again(workdir):
    """Remove the lock, and lock the workdir as a second run does."""
    (workdir / lock.LOCK).unlink()
    with lock.WorkdirLock(workdir):
        pass


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (relink, ".lock"),
        pytest.param(replace_metrics, "metrics.jsonl", marks=pytest.mark.exhaustive),
        pytest.param(shutil.rmtree, ".lock", marks=pytest.mark.exhaustive),
        pytest.param(lambda w: (w / "metrics.jsonl").unlink(), "metrics.jsonl", marks=pytest.mark.exhaustive),
        pytest.param(lock_again, ".lock", marks=pytest.mark.exhaustive),
    ],
)
def test_change_during_a_run_stops_it_at_the_next_save(digits_run, tmp_path, capsys, monkeypatch, change, file):
    started = []

    def before_step(self, step):
        started.append(step)
        if step == 3:
            change(tmp_path / "run")

    monkeypatch.setattr(hooks.MetricsHook, "before_step", before_step)
    status, workdir = digits_run(ckpt_steps=4)
    assert (status, started) == (2, [1, 2, 3, 4])
    err = capsys.readouterr().err
    assert err.startswith(f"error: {workdir / file} was removed or replaced during the run")
    assert err.count("\n") == 1
    assert saved_steps(workdir) == []


@pytest.mark.parametrize(
    "names", [[".lock"], pytest.param(["metrics.jsonl.new", "config.json.new"], marks=pytest.mark.exhaustive)]
)
def test_links_in_a_workdir_never_change_their_targets(digits_run, tmp_path, capsys, names):
    target = tmp_path / "valuable"
    target.write_text("content")
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).symlink_to(target)
    status, workdir = digits_run()
    assert target.read_text() == "content"
    if names == [".lock"]:
        assert (status, capsys.readouterr().err.count("is a symbolic link")) == (2, 1)
    else:
        assert status == 0
        assert not any((workdir / name).exists() for name in names)
