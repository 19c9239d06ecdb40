"""The process of a command asks for huge pages where the kernel gives them to programs that ask, and nowhere else."""

import os
import subprocess
import sys

import pytest

from dcvit.process import TUNABLES

# It prints a line before and one after the call; a replaced process prints the first line twice.
PROGRAM = """
import os, pathlib, sys
from dcvit.process import use_huge_pages
print("start", sys.argv[1:], os.getpid())
sys.argv[0] = os.environ.get("PROGRAM", "dcvit")
use_huge_pages(pathlib.Path(sys.argv[1]))
print("run", os.environ.get("GLIBC_TUNABLES"))
"""


def run(setting, environment=None):
    """Run the program, which takes itself for the command `dcvit`, with the file of the kernel's setting."""
    clean = {key: value for key, value in os.environ.items() if key != TUNABLES}
    command = [sys.executable, "-c", PROGRAM, str(setting), "two words"]
    result = subprocess.run(command, env={**clean, **(environment or {})}, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_the_process_is_replaced_once_with_the_same_arguments(tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    first, second, last = run(setting)
    assert first == second
    assert "'two words'" in first
    assert last == "run glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("text", ["[always] madvise never", "always madvise [never]", "", None])
def test_other_settings_of_the_kernel_need_no_request(tmp_path, text):
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    assert run(setting)[1:] == ["run None"]


def test_a_setting_of_the_user_stays(tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("[madvise]")
    assert run(setting, {TUNABLES: "glibc.malloc.check=0"})[1:] == ["run glibc.malloc.check=0"]


def test_a_program_that_calls_a_command_is_not_replaced(tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("[madvise]")
    for program in ("-c", "-", "", "/usr/lib/pytest/__main__.py"):
        assert run(setting, {"PROGRAM": program})[1:] == ["run None"]


def test_a_command_prints_the_same_with_and_without_a_setting():
    clean = {key: value for key, value in os.environ.items() if key != TUNABLES}
    command = [sys.executable, "-m", "dcvit", "--version"]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for environment in (clean, {**clean, TUNABLES: ""})
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("dcvit ")
