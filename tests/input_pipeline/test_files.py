"""Files that a user names: only regular files are read, and unknown users are named."""

import os

import pytest
from refusals import refused

from dcvit import cli, predict
from dcvit.inference.images import find_images
from dcvit.inference.texts import read_prompts
from input_pipeline import InputError, open_source, tfrecord
from input_pipeline.files import expand, files_below, read_regular
from input_pipeline.text.tokenizer import open_tokenizer


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


def test_predict_reports_what_is_not_a_regular_file(pipe, digits_workdir, capsys):
    assert cli.run(predict.main, ["--workdir", str(digits_workdir), str(pipe)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {pipe}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "a.tfrecord", "a.txt", "a.bin"])
def test_no_source_opens_what_is_not_a_regular_file(pipe, name, tmp_path):
    (tmp_path / "a.idx").write_bytes(b"")
    path = pipe.rename(tmp_path / name)
    opened = {
        "tokenizer.json": lambda: open_tokenizer(str(path)),
        "a.tfrecord": lambda: tfrecord.TFRecordFile(str(path)),
        "a.txt": lambda: open_source("text", path=str(path), context=8),
        "a.bin": lambda: open_source("megatron", path=str(path), context=8),
    }
    with refused(InputError, str(path)):
        opened[name]()


@pytest.fixture
def deep(tmp_path, monkeypatch):
    """A folder with folders inside each other, whose path is too long for the system."""
    monkeypatch.chdir(tmp_path)
    for _ in range(25):
        os.mkdir("d" * 200)  # noqa: PTH102 -- the path is too long for the system
        os.chdir("d" * 200)
    yield tmp_path
    for _ in range(25):
        os.chdir("..")
        os.rmdir("d" * 200)  # noqa: PTH106


def test_path_that_is_too_long_is_a_one_line_error(deep):
    for search in (
        lambda: open_source("folder", data_dir=str(deep.parent), split=deep.name),
        lambda: find_images([deep], pytest.fail),
        lambda: open_source("text", path=str(deep), context=8),
    ):
        with pytest.raises(InputError, match=r"cannot read .*ddd…: File name too long") as error:
            search()
        assert len(str(error.value)) < 600


def test_unknown_user_is_named():
    with pytest.raises(InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        expand("~nosuchuser/x")
    assert expand("~/x").is_absolute()


def test_link_to_itself_is_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "loop").symlink_to("loop")
    assert list(files_below(tmp_path, hidden=True)) == [str(tmp_path / "a.txt")]
