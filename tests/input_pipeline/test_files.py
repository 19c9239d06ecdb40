"""Files that a user names: only regular files of a limited size are read, and unknown users are named."""

import os
import socket

import pytest
from refusals import refused

from dcvit import cli, predict
from dcvit.inference.images import find_images
from dcvit.inference.texts import read_prompts
from input_pipeline import InputError, open_source, tfrecord
from input_pipeline.files import expand, files_below, read_regular
from input_pipeline.text.tokenizer import open_tokenizer


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
            listener.bind(str(path))  # the file stays
    return path


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


@SPECIAL
@pytest.mark.parametrize("name", ["tokenizer.json", "a.tfrecord", "a.txt", "a.bin"])
def test_no_source_opens_what_is_not_a_regular_file(special, name, tmp_path):
    (tmp_path / "a.idx").write_bytes(b"")
    path = special.rename(tmp_path / name)
    opened = {
        "tokenizer.json": lambda: open_tokenizer(str(path)),
        "a.tfrecord": lambda: tfrecord.TFRecordFile(str(path)),
        "a.txt": lambda: open_source("text", path=str(path), context=8),
        "a.bin": lambda: open_source("megatron", path=str(path), context=8),
    }
    with refused(InputError, str(path)):
        opened[name]()


@pytest.mark.parametrize("special", ["pipe"], indirect=True)
def test_offsets_that_are_not_a_regular_file_are_ignored(special, tmp_path):
    special.rename(tmp_path / "a.tfrecord.offsets")
    (tmp_path / "a.tfrecord").write_bytes(b"")
    assert len(tfrecord.TFRecordFile(str(tmp_path / "a.tfrecord"))) == 0


@pytest.fixture
def deep(tmp_path, monkeypatch, request):
    """A folder with one image and one text, nested in folders of the given number and length of the name."""
    count, length = request.param
    monkeypatch.chdir(tmp_path)
    for _ in range(count):
        os.mkdir("d" * length)  # noqa: PTH102 -- the path is too long for the system
        os.chdir("d" * length)
    for name in ("a.png", "a.txt"):
        with open(name, "w") as file:  # noqa: PTH123
            file.write("some text")
    yield tmp_path
    for name in ("a.png", "a.txt"):
        os.unlink(name)  # noqa: PTH108
    for _ in range(count):
        os.chdir("..")
        os.rmdir("d" * length)  # noqa: PTH106


@pytest.mark.parametrize("deep", [(1100, 1)], indirect=True)
def test_files_in_folders_nested_deeply_are_found(deep):
    source = open_source("folder", data_dir=str(deep.parent), split=deep.name)
    assert source[0]["image"] == b"some text"
    assert len(find_images([deep], pytest.fail)) == 1
    assert len(open_source("text", path=str(deep), context=8)) == 1


@pytest.mark.parametrize("deep", [(25, 200)], indirect=True)
def test_path_that_is_too_long_is_a_one_line_error(deep):
    for search in (
        lambda: open_source("folder", data_dir=str(deep.parent), split=deep.name),
        lambda: find_images([deep], pytest.fail),
        lambda: open_source("text", path=str(deep), context=8),
    ):
        with pytest.raises(InputError, match=r"cannot read .*ddd…: File name too long") as error:
            search()
        assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "folder", "data_dir": "a\0b"},
        {"kind": "text", "path": "a\0b", "context": 8},
        {"kind": "text", "path": "a", "tokenizer": "a\0b", "context": 8},
        {"kind": "megatron", "path": "a\0b", "context": 8},
        {"kind": "input_ids", "path": "a\0b", "context": 8},
    ],
)
def test_nul_in_a_path_is_an_error(options):
    with pytest.raises(InputError, match=r"the path 'a\\x00b' contains a NUL character"):
        open_source(**options)


def test_unknown_user_is_named():
    with pytest.raises(InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        expand("~nosuchuser/x")
    assert expand("~/x").is_absolute()


def test_link_to_itself_is_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "loop").symlink_to("loop")
    assert list(files_below(tmp_path, hidden=True)) == [str(tmp_path / "a.txt")]
