"""A workdir holds one run: another config, other data or a second process is refused."""

import functools
import json
import shutil

import numpy as np
import pytest
from sources import ListSource
from trained_workdirs import DIGITS
from training_runs import digits_command

import dcvit
from dcvit.config import values
from dcvit.errors import ConfigError
from dcvit.runs import identity, workdir
from dcvit.runs.steps import saved_steps
from dcvit.training import loop
from input_pipeline.shuffle import Blocks

pytestmark = pytest.mark.usefixtures("library_promotion")


run = functools.partial(digits_command, base=DIGITS)


@pytest.fixture
def folder(digits_workdir, tmp_path):
    """A copy of a completed run of 60 steps."""
    return shutil.copytree(digits_workdir, tmp_path / "run")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*.json*")}


DIFFERENT = {
    "seed": 1, "input.data.limit": 400, "model.width": 16, "optax_name": "scale_by_lion", "optax": {},
}  # fmt: skip


def test_run_of_another_config_is_refused_with_all_differences_before_anything_changes(folder, capsys):
    before = contents(folder)
    assert run(folder, **DIFFERENT) == 2
    err = capsys.readouterr().err
    assert f"{folder} holds a run of another config: " in err
    for difference in (
        "config.seed (saved: 0, now: 1)",
        "config.input.data.limit (saved: None, now: 400)",
        "data.examples (saved: 1437, now: 400)",
        "config.model.width (saved: 32, now: 16)",
        "config.optax_name (saved: 'scale_by_adam', now: 'scale_by_lion')",
    ):
        assert difference in err
        assert f"--accept {difference.partition(' ')[0].removeprefix('config.')}" in err.partition("To resume")[2]
    assert err.count("\n") == 1
    assert contents(folder) == before


def test_checkpoint_identifies_the_run_if_its_files_are_missing(folder, capsys):
    (folder / "config.json").unlink()
    (folder / "data.json").unlink()
    assert run(folder, seed=1, **{"input.data.limit": 400}) == 2
    err = capsys.readouterr().err
    assert "config.seed (saved: 0, now: 1)" in err
    assert "data.examples (saved: 1437, now: 400)" in err
    assert run(folder) == 0
    assert (folder / "config.json").is_file()


@pytest.mark.slow
def test_run_that_failed_before_its_first_step_does_not_bind_the_workdir(tmp_path, capsys, monkeypatch):
    """The run failed, for example, because its batch was too large for the memory."""
    monkeypatch.setattr(loop.Trainer, "_compile", lambda *_: (_ for _ in ()).throw(OSError("out of memory")))
    for seed in (1, 0):
        assert run(tmp_path, seed=seed) == 2
        assert "error: out of memory" in capsys.readouterr().err
        assert values.read_json(tmp_path / "config.json").seed == seed


def test_the_key_for_damaged_images_of_an_earlier_evaluator_is_that_of_the_input(tmp_path):
    evals = {"val": {"type": "classification", "corrupt": "skip", "corrupt_max": 5}}
    (tmp_path / "config.json").write_text(json.dumps({"model_name": "vit", "input": {}, "evals": evals}))
    config = values.read_json(tmp_path / "config.json")
    assert (config.input.corrupt, config.evals.val.to_dict()) == ("skip", {"type": "classification"})


@pytest.mark.slow
def test_accepted_difference_is_reported_and_recorded_and_accepted_later(folder, capsys):
    accept = ("--accept", "total_steps")
    assert run(folder, *accept, total_steps=62, seed=1) == 2
    assert "config.total_steps" not in capsys.readouterr().err
    assert run(folder, *accept, "--accept", "lr", lr=0.02, total_steps=62) == 0
    err = capsys.readouterr().err
    for difference in ("lr (saved: 0.01, now: 0.02)", "total_steps (saved: 60, now: 62)"):
        assert f"accepted from step 61: config.{difference}\n" in err
    recorded = json.loads((folder / workdir.ACCEPTED).read_text())
    assert recorded["accept"] == ["lr", "total_steps"]
    assert "from step 61: config.lr (saved: 0.01, now: 0.02)" in recorded["changes"]
    shutil.rmtree(folder / "checkpoints" / "62")
    assert run(folder, lr=0.02, total_steps=62) == 0
    assert saved_steps(folder)[-1] == 62
    assert values.read_json(folder / "config.json").total_steps == 62


@pytest.mark.slow
def test_complete_run_keeps_its_files_although_a_difference_is_accepted(folder, capsys):
    before = {path: path.read_bytes() for path in folder.glob("*.json*")}
    assert run(folder, "--accept", "lr", lr=0.02) == 0
    assert "the run is complete: all 60 steps are done" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.glob("*.json*")} == before
    assert run(folder) == 0


def test_data_is_identified_by_its_content():
    examples = [{"tokens": bytes([i])} for i in range(100)]

    def identified(examples, blocks=None):
        source = ListSource(examples)
        source.blocks = blocks
        return identity.data_identity(source)

    one = identified(examples)
    assert identified(examples) == one
    assert identified([*examples[:99], {"tokens": b"x"}])["sample"] != one["sample"]
    assert identified(examples[:50])["examples"] == 50
    assert identified(examples[:1]) != identified(examples[1:2])
    # the same examples in other row groups are trained in another order
    found = [identified(examples, Blocks(np.array(sizes), window=10))["sample"] for sizes in ([50, 50], [40, 60])]
    assert len({*found, one["sample"]}) == 3


def test_keys_without_effect_on_a_step_may_change(tmp_path):
    config = {"seed": 0, "log_steps": 50, "ckpt_keep": 1, "mesh": [], "evals": {}}
    other = {"seed": 0, "log_epochs": 1, "ckpt_keep": 2, "mesh": [["fsdp", -1]], "evals": {"a": {}}}
    assert identity.check_same_run(tmp_path, {"config": config}, other, {}) == []
    with pytest.raises(ConfigError, match=r"config\.seed \(saved: 0, now: None\)\. To resume it anyway: --accept seed"):
        identity.check_same_run(tmp_path, {"config": config}, {}, {})


def test_a_removed_key_that_an_earlier_version_recorded_refuses_a_run_only_if_it_was_set(tmp_path):
    assert identity.check_same_run(tmp_path, {"config": {"lora": {}}}, {}, {}) == []
    with pytest.raises(ConfigError, match=r"config\.lora \(saved: \{'rank': 2\}, now: None\)"):
        identity.check_same_run(tmp_path, {"config": {"lora": {"rank": 2}}}, {}, {})


def test_other_devices_and_software_are_reported():
    here = {"software": {"jax": "1"}, "devices": {"kind": "cpu", "count": 8}}
    assert identity.resume_warnings({}, here) == identity.resume_warnings(here, here) == []
    (line,) = identity.resume_warnings({**here, "devices": {"kind": "cpu", "count": 4}}, here)
    assert "resuming with other devices; " in line
    assert "devices.count (saved: 4, now: 8)" in line
    (line,) = identity.resume_warnings({**here, "software": {"jax": "99.0"}}, here)
    assert line.startswith(
        "resuming with other software; the result is not bitwise reproducible: software.jax (saved: "
    )


def test_unset_keys_of_an_earlier_version_are_no_difference():
    assert identity.compare({"config": {"lora": {}}}, {"lora": {}, "mlflow": {}}, None, ()).refused == {}


def test_a_workdir_is_found_from_itself_and_its_checkpoints(digits_workdir, tmp_path):
    checkpoint = digits_workdir / "checkpoints" / "30"
    assert workdir.find(digits_workdir) == workdir.find(checkpoint) == digits_workdir
    assert workdir.find(tmp_path) is workdir.find(tmp_path / "missing") is None
    alone = tmp_path / "alone" / "checkpoints" / "30"
    shutil.copytree(checkpoint, alone)
    with pytest.raises(ConfigError, match=r"30 is a checkpoint without the config.json of its run in .*alone"):
        dcvit.load(alone)


@pytest.mark.parametrize("number", ["9" * 5000, str(10**400), "NaN", "[]"])
def test_damaged_thresholds_are_one_line(tmp_path, number):
    (tmp_path / workdir.THRESHOLDS).write_text(f'{{"evaluation": "val", "step": 1, "thresholds": {{"a": {number}}}}}')
    with pytest.raises(ConfigError, match=r"cannot read .*thresholds\.json: ") as error:
        workdir.read_thresholds(tmp_path, ["a"])
    assert "\n" not in str(error.value)
