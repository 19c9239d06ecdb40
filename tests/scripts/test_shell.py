"""Linters report nothing about scripts and launch files, and launchers accept the commands in the documentation."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from stand_ins import SCRIPTS

SHELL_SCRIPTS = [*SCRIPTS.rglob("*.sh"), SCRIPTS / "launch" / "slurm.sbatch", SCRIPTS.parent / ".ci" / "run"]


def lint(name, *words, text=None):
    """Run a linter of the dev extra, and check that it reports nothing."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"install the dev extra, which contains {name}"
    done = subprocess.run([found, *words], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_shellcheck_reports_nothing_about_scripts_and_the_commands_of_skypilot():
    lint("shellcheck", *SHELL_SCRIPTS)
    task = yaml.safe_load((SCRIPTS / "launch" / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        lint("shellcheck", "--shell=bash", "-", text=task[part])


def test_the_dockerfile_follows_the_rules_of_hadolint():
    lint("hadolint", SCRIPTS / "launch" / "Dockerfile")


@pytest.mark.slow
def test_launch_commands_in_the_documentation_are_accepted(sandbox):
    text = (SCRIPTS.parent / "docs" / "clusters.md").read_text().replace("\\\n", " ")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    tried = 0
    for command in commands:
        words = shlex.split(command, comments=True)
        if "scripts/tpu/pod.sh" in words:
            words = words[words.index("scripts/tpu/pod.sh") + 1 :]
            status, out, err = sandbox.pod(words[0], "--dry-run", *words[1:])
        elif "scripts/launch/slurm.sbatch" in words:
            words = words[words.index("scripts/launch/slurm.sbatch") + 1 :]
            status, out, err = sandbox.run("launch/slurm.sbatch", "--dry-run", *words)
        else:
            continue
        assert (status, err) == (0, ""), command
        assert shlex.split(out)
        tried += 1
    assert tried == 4
