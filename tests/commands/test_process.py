"""A command asks for huge pages where the kernel gives them to programs that ask; no other process is replaced."""

import os
import subprocess
import sys

import pytest

from dcvit.process import ASKED, TUNABLES

# It prints a line before and one after the call; a replaced process prints the first line twice.
PROGRAM = """
import os, pathlib, sys
from dcvit.process import use_huge_pages
{before}
print("start", sys.argv[1:], os.getpid(), flush=True)
use_huge_pages(pathlib.Path(os.environ["SETTING"]))
print("run", os.environ.get("GLIBC_TUNABLES"))
"""


@pytest.fixture
def setting(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    return path


def run(setting, *, name="dcvit", before="", environment=None, stdin=False):
    """Run the program as a file with a name, or from stdin, with the kernel's setting, and return its lines."""
    clean = {key: value for key, value in os.environ.items() if key not in (TUNABLES, ASKED)}
    file = setting.parent / name
    file.write_text(PROGRAM.format(before=before))
    result = subprocess.run(
        [sys.executable, "-" if stdin else str(file), "two words"], input=file.read_text() if stdin else None,
        env={**clean, "SETTING": str(setting), **(environment or {})}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return result.stdout.splitlines()


def test_the_process_is_replaced_once_with_the_same_arguments(setting):
    first, second, last = run(setting)
    assert first == second
    assert "'two words'" in first
    assert last == "run glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("text", ["[always] madvise never", "always madvise [never]", "", None])
def test_other_settings_of_the_kernel_need_no_request(setting, text):
    setting.unlink()
    if text is not None:
        setting.write_text(text)
    assert run(setting)[1:] == ["run None"]


def test_a_setting_of_the_user_stays(setting):
    environment = {TUNABLES: "glibc.malloc.check=0"}
    assert run(setting, environment=environment)[1:] == ["run glibc.malloc.check=0"]


def test_a_system_that_removes_the_setting_is_asked_once(setting):
    """Programs with capabilities lose GLIBC_TUNABLES when they start."""
    assert run(setting, environment={ASKED: "1"})[1:] == ["run None"]


@pytest.mark.parametrize(
    "case",
    [
        {"name": "program.py"},  # that calls a command
        {"before": 'sys.argv = ["dcvit", "train"]', "stdin": True},  # whose text is not there a second time
        {"before": 'sys.argv[1:] = ["other"]'},
        {"before": "sys.argv = []"},
        {"before": "sys.executable = None"},
        {"before": "sys.settrace(lambda *_: None)"},  # a debugger would lose its breakpoints
    ],
)
def test_other_programs_are_not_replaced(setting, case):
    assert run(setting, **case)[1:] == ["run None"]


def test_an_interpreter_that_cannot_be_started_again_runs_on(setting):
    assert run(setting, before='sys.executable = "/missing/python"')[1:] == ["run glibc.malloc.hugetlb=1"]
