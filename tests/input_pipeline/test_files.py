"""Files that a user names: only regular files are read, and unknown users are named."""

import os

import pytest

from dcvit.inference.texts import read_prompts
from input_pipeline import InputError
from input_pipeline.files import expand, read_regular


@pytest.fixture
def pipe(tmp_path):
    """The path of a named pipe, which would block its reader."""
    os.mkfifo(tmp_path / "file.png")
    return tmp_path / "file.png"


def test_what_is_not_a_regular_file_is_refused_without_waiting(pipe, tmp_path):
    for path in (pipe, tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            read_regular(path)
    with pytest.raises(InputError, match=f"cannot read {pipe}: not a regular file"):
        read_prompts([], [pipe])


def test_unknown_user_is_named():
    with pytest.raises(InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        expand("~nosuchuser/x")
    assert expand("~/x").is_absolute()
