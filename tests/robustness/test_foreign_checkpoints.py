"""A checkpoint is bound to its step and its run: one that was renamed, exchanged or copied is never used."""

import json
import shutil

import pytest
from trained_workdirs import DIGITS
from training_runs import digits_command

from dcvit import cli, evaluate, predict
from dcvit.runs.steps import complete_steps

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]


def resume(folder):
    return digits_command(folder, "--accept", "total_steps", base=DIGITS, total_steps=62)


def evaluated(folder):
    return cli.run(evaluate.main, ["--workdir", str(folder)])


def refusals(folder, capsys, *commands):
    """Yield the line that each command prints about the folder, which it refuses."""
    for command in commands:
        capsys.readouterr()
        assert command(folder) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        yield err


@pytest.fixture
def folder(digits_workdir, tmp_path):
    """A copy of a run with checkpoints of the steps 30 and 60."""
    return shutil.copytree(digits_workdir, tmp_path / "run")


@pytest.fixture
def other(digits_workdir, tmp_path):
    """A copy of the run that claims to have had another seed, with valid checksums."""
    from dcvit.runs import checksums

    root = shutil.copytree(digits_workdir, tmp_path / "other")
    about = root / "checkpoints" / "60" / "about" / "metadata"
    content = json.loads(about.read_text())
    content["config"]["seed"] = 1
    about.write_text(json.dumps(content))
    (root / "checkpoints" / "60" / checksums.NAME).unlink()
    checksums.write(root / "checkpoints" / "60")
    return root


def exchange(checkpoints):
    (checkpoints / "30").rename(checkpoints / "x")
    (checkpoints / "60").rename(checkpoints / "30")
    (checkpoints / "x").rename(checkpoints / "60")


def rename(checkpoints):
    (checkpoints / "60").rename(checkpoints / "61")


@pytest.mark.parametrize("change", [exchange, rename])
def test_checkpoint_under_the_name_of_another_step_is_damaged(folder, capsys, change):
    change(folder / "checkpoints")
    step = complete_steps(folder / "checkpoints")[-1]
    for line in refusals(folder, capsys, evaluated, resume):
        assert f"checkpoint {folder}/checkpoints/{step} is damaged: about/metadata belongs to step " in line


def test_checkpoint_of_another_run_is_refused(folder, other, capsys):
    path = folder / "checkpoints" / "60"
    shutil.rmtree(path)
    shutil.copytree(other / "checkpoints" / "60", path)
    image = folder.parent / "a.png"
    image.write_bytes(b"")
    predicted = lambda folder: cli.run(predict.main, ["--workdir", str(folder), str(image)])  # noqa: E731
    for line in refusals(folder, capsys, evaluated, resume, predicted):
        assert f"{path} " in line
        assert "config.seed (saved: 1, now: 0)" in line


def test_checkpoint_whose_description_was_changed_is_damaged_and_not_of_another_run(folder, capsys):
    about = folder / "checkpoints" / "60" / "about" / "metadata"
    description = json.loads(about.read_text())
    description["config"]["seed"] = 1
    about.write_text(json.dumps(description))
    for line in refusals(folder, capsys, evaluated, resume):
        assert f"checkpoint {folder}/checkpoints/60 is damaged: about/metadata differs from what was saved" in line
