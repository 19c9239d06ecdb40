"""A workdir that is removed or moved during a run stops the run with one line."""

import shutil

import pytest

from dcvit.runs.steps import saved_steps
from dcvit.training import hooks

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]


def relink(workdir):
    """The workdir becomes a link to a copy of itself, as after a move to a larger disk."""
    shutil.copytree(workdir, workdir.with_name("copy"))
    workdir.rename(workdir.with_name("moved"))
    workdir.symlink_to("copy")


@pytest.mark.parametrize("change", [relink, pytest.param(shutil.rmtree, marks=pytest.mark.exhaustive)])
def test_change_during_a_run_stops_it_at_the_next_save(digits_run, tmp_path, capsys, monkeypatch, change):
    started = []

    def before_step(self, step):
        started.append(step)
        if step == 3:
            change(tmp_path / "run")

    monkeypatch.setattr(hooks.MetricsHook, "before_step", before_step)
    status, workdir = digits_run(ckpt_steps=4)
    assert (status, started) == (2, [1, 2, 3, 4])
    err = capsys.readouterr().err
    assert err.startswith(f"error: {workdir}/.lock was removed or replaced during the run")
    assert err.count("\n") == 1
    assert saved_steps(workdir) == []
