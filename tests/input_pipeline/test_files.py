"""Files that a user names: unknown users are named."""

import pytest

from input_pipeline import InputError
from input_pipeline.files import expand, files_below


def test_unknown_user_is_named():
    with pytest.raises(InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        expand("~nosuchuser/x")
    assert expand("~/x").is_absolute()


def test_link_to_itself_is_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "loop").symlink_to("loop")
    assert list(files_below(tmp_path, hidden=True)) == [str(tmp_path / "a.txt")]
