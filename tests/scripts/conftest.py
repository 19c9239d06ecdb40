"""A checkout with stand-ins for the programs that launchers call."""

import runpy

import pytest
from markdown_pages import ROOT
from stand_ins import Sandbox


@pytest.fixture
def sandbox(tmp_path):
    """The checkout; a job that still waits at the end of a test is released."""
    found = Sandbox(tmp_path)
    yield found
    (found.folder / "go").touch()


@pytest.fixture(scope="session")
def paper_main():
    """The function of the command `python scripts/paper`."""
    return runpy.run_path(str(ROOT / "scripts" / "paper"))["main"]
