"""A checkout with stand-ins for the programs that launchers call."""

import pytest
from stand_ins import Sandbox


@pytest.fixture
def sandbox(tmp_path):
    """The checkout; a job that still waits at the end of a test is released."""
    found = Sandbox(tmp_path)
    yield found
    (found.folder / "go").touch()
