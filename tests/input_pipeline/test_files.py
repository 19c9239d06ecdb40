"""Files that a user names: unknown users are named."""

import pytest

from input_pipeline import InputError
from input_pipeline.files import expand


def test_unknown_user_is_named():
    with pytest.raises(InputError, match="~nosuchuser/x: there is no user 'nosuchuser'"):
        expand("~nosuchuser/x")
    assert expand("~/x").is_absolute()
