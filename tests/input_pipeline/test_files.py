"""Files that a user names: only regular files of a limited size are read, and unknown users are named."""

import os
import socket

import pytest

from dcvit import cli, predict
from dcvit.inference.texts import read_prompts
from input_pipeline import InputError
from input_pipeline.files import expand, read_regular


@pytest.fixture
def special(tmp_path, request):
    """The path of a file that is not regular."""
    path = tmp_path / "file.png"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            yield path
            return
    yield path


SPECIAL = pytest.mark.parametrize("special", ["pipe", "folder", "device", "socket"], indirect=True)


@SPECIAL
def test_what_is_not_a_regular_file_is_refused_without_waiting(special):
    with pytest.raises(InputError, match="not a regular file"):
        read_regular(special)
    with pytest.raises(InputError, match=f"cannot read {special}: not a regular file"):
        read_prompts([], [special])


@pytest.mark.parametrize("special", ["pipe", "device", "socket"], indirect=True)
def test_predict_reports_what_is_not_a_regular_file(special, digits_workdir, capsys):
    assert cli.run(predict.main, ["--workdir", str(digits_workdir), str(special)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {special}: ")
    assert err.count("\n") == 1


def test_sparse_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "huge.png"
    path.touch()
    os.truncate(path, 40_000_000_000)
    with pytest.raises(InputError, match="the file has 40,000,000,000 bytes, more than the limit of 1,073,741,824"):
        read_regular(path)


def test_unknown_user_is_named(capsys):
    with pytest.raises(InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        expand("~nosuchuser/x")
    assert cli.run(predict.main, ["--workdir", "~nosuchuser/x", "a.png"]) == 2
    assert "there is no user 'nosuchuser'" in capsys.readouterr().err
    assert expand("~/x").is_absolute()
