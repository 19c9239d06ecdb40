"""One run to a folder, and none that is not the one it holds."""

import os

import pytest
from training_runs import same

from dcvit import config as configs
from dcvit.checkpoint.checkpointer import load_params
from dcvit.checkpoint.steps import saved_steps
from dcvit.runs import lock, metrics, workdir
from dcvit.training import trainer

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_workdir_in_use_is_refused_before_anything_is_written(digits_run, capsys, tmp_path):
    with lock.WorkdirLock(tmp_path / "run"):
        status, folder = digits_run()
    assert status == 2
    assert f"error: workdir {folder} is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [lock.LOCK]


@pytest.mark.parametrize(
    ("overrides", "difference", "flag"),
    [
        ({"seed": 1}, "config.seed (there 0, here 1)", "--accept seed"),
        ({"input.batch_size": 72}, "config.input.batch_size (there 64, here 72)", "--accept input.batch_size"),
        ({"input.data.limit": 400}, "data.examples (there 1437, here 400)", "--accept data.examples"),
        ({"model.width": 32}, "config.model.width (there 16, here 32)", "--accept model.width"),
        ({"optax_name": "scale_by_lion", "optax": {}}, "(there 'scale_by_adam', here 'scale_by_lion')", "optax_name"),
        ({"total_steps": 8}, "config.total_steps (there 6, here 8)", "--accept total_steps"),
    ],
)
def test_another_run_is_refused_with_all_differences_before_anything_changes(
    digits_run, capsys, overrides, difference, flag
):
    _, folder = digits_run()
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    capsys.readouterr()
    assert digits_run(**overrides)[0] == 2
    err = capsys.readouterr().err
    assert difference in err
    assert flag in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before


def test_where_the_config_is_gone_the_checkpoint_says_what_the_run_is(digits_run, capsys):
    _, folder = digits_run()
    (folder / "config.json").unlink()
    (folder / "data.json").unlink()
    assert digits_run(seed=1)[0] == 2
    assert "config.seed (there 0, here 1)" in capsys.readouterr().err
    assert digits_run(**{"input.data.limit": 400})[0] == 2
    assert "data.examples (there 1437, here 400)" in capsys.readouterr().err
    assert digits_run()[0] == 0


def test_a_start_that_got_nowhere_claims_nothing(digits_run, monkeypatch):
    """As of one whose batch was too large for the memory: the next command need not name what it mended."""
    with monkeypatch.context() as broken:
        broken.setattr(trainer.Trainer, "_advance", lambda *_: (_ for _ in ()).throw(OSError("out of memory")))
        assert digits_run(seed=1)[0] == 2
    status, folder = digits_run()
    assert (status, configs.read_json(folder / "config.json").seed) == (0, 0)
    assert digits_run(seed=1)[0] == 2


def test_a_difference_that_is_accepted_is_said_and_becomes_the_runs_own(digits_run, capsys, monkeypatch):
    from dcvit import cli

    _, folder = digits_run(**{"schedule.decay_type": "constant"})
    real = cli.run
    monkeypatch.setattr(cli, "run", lambda main, argv: real(main, [*argv, *accepted]))
    accepted = ["--accept", "total_steps"]
    assert digits_run(**{"schedule.decay_type": "constant"}, total_steps=8, seed=1)[0] == 2
    assert "config.total_steps" not in capsys.readouterr().err
    assert digits_run(**{"schedule.decay_type": "constant"}, total_steps=8)[0] == 0
    assert "accepted: config.total_steps (there 6, here 8)" in capsys.readouterr().err
    assert saved_steps(folder)[-1] == 8
    assert configs.read_json(folder / "config.json").total_steps == 8
    accepted = []
    assert digits_run(**{"schedule.decay_type": "constant"}, total_steps=8)[0] == 0
    accepted = ["--accept", "ema_decay"]
    assert digits_run(**{"schedule.decay_type": "constant"}, total_steps=8, ema_decay=0.5)[0] == 2
    assert "checkpoints/8 has no ema" in capsys.readouterr().err
    accepted = ["--accept", "sead"]
    assert digits_run()[0] == 2
    assert "--accept sead; did you mean 'seed'" in capsys.readouterr().err


def test_data_is_known_by_its_content(tmp_path):
    class Source(list):
        class_names = None

        def describe(self, index):
            return f"example {index}"

        def nbytes(self):
            return len(self)

    one = Source({"tokens": bytes([i])} for i in range(100))
    other = Source(one)
    assert workdir.data_identity(one) == workdir.data_identity(other)
    other[99] = {"tokens": b"x"}
    assert workdir.data_identity(one)["sample"] != workdir.data_identity(other)["sample"]
    assert workdir.data_identity(Source(one[:50]))["examples"] == 50
    assert workdir.data_identity(Source(one[:1])) != workdir.data_identity(Source(one[1:2]))


def test_other_software_and_devices_are_said(digits_run, capsys, monkeypatch):
    _, whole = digits_run("whole", ckpt_steps=3)
    _, folder = digits_run(total_steps=6)
    for path in (folder / "checkpoints").glob("6*"):
        path.rename(folder / "six")
    monkeypatch.setattr(workdir, "software", lambda: {"jax": "99.0"})
    capsys.readouterr()
    assert digits_run()[0] == 0
    err = capsys.readouterr().err
    assert "going on with other software, so no longer bit for bit: " in err
    assert "software.jax (there " in err
    assert "devices" not in err
    assert same(load_params(whole), load_params(folder))


def test_a_workdir_that_cannot_be_written_to_is_one_line(digits_run, capsys, tmp_path):
    (tmp_path / "run").write_text("a file")
    assert digits_run()[0] == 2
    assert capsys.readouterr().err == f"error: cannot write to workdir {tmp_path / 'run'}: File exists\n"


def test_a_full_disk_ends_a_log_with_its_name(tmp_path):
    rows = metrics.JsonLines(tmp_path / "metrics.jsonl")
    rows.write(1, {"loss": 1.0})
    rows.file.close()
    rows.file = open("/dev/full", "a")  # noqa: SIM115, PTH123
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        rows.write(2, {"loss": 1.0})
    rows.close()
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    from dcvit.checkpoint import files

    path = tmp_path / "config.json"
    files.replace(path, "old")
    path.with_name("config.json.new").mkdir()  # stands in for what cannot be written
    with pytest.raises(OSError, match=r"config\.json"):
        files.replace(path, "new")
    assert path.read_text() == "old"
