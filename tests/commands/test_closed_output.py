"""A reader of the output that goes away: training continues, and the other commands end silently."""

import os
import subprocess
import sys

import pytest
from trained_workdirs import TINY

from dcvit import cli
from dcvit.runs import metrics
from dcvit.runs.steps import saved_steps

TIMEOUT = 300


@pytest.mark.exhaustive
def test_training_continues_without_reader(tmp_path):
    command = [sys.executable, "-u", "-m", "dcvit", "train", "--config", "vit_digits", "--workdir", str(tmp_path)]
    words = [f"--config.{key}={value}" for key, value in TINY.items()]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*command, *words], text=True, **streams) as process:
        assert process.stdout.readline().startswith("dcvit train: vit_digits")
        process.stdout.close()
        assert process.wait(TIMEOUT) == 0
    assert saved_steps(tmp_path)[-1] == TINY["total_steps"]
    assert metrics.read(tmp_path / "metrics.jsonl")[-1]["step"] == TINY["total_steps"]


@pytest.mark.slow
def test_other_commands_end_silently_without_reader():
    """More rows than a pipe holds, of which `head -1` reads the first."""
    code = (
        "import sys; from dcvit import cli\n"
        "def main(argv):\n  cli.show([{'name': 'a' * 20, 'value': i} for i in range(9999)], 'csv'); return 0\n"
        "sys.exit(cli.run(main, []))"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}  # it hides short writes
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], env=env, text=True, **streams) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(TIMEOUT)) == ("", cli.EXIT_SIGPIPE)
