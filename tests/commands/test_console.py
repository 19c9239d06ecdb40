"""The commands print lines of their own only: none of TensorFlow, absl, libtpu or XLA."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from trained_workdirs import DIGITS

ROOT = Path(__file__).resolve().parents[2]
# Runs commands in one process. Python's own output goes to a file, so that the pipes of stdout and stderr receive only
# what libraries write without Python.
DRIVER = """
import sys
from pathlib import Path
out, root = sys.argv[1:]
sys.path.insert(0, root)
sys.stdout = sys.stderr = Path(out).open("w", buffering=1)
from dcvit import cli
from dcvit.__main__ import dispatch
status = [cli.run(dispatch, words) for words in {commands}]
sys.exit(any(status))
"""
MODEL = [f"--config.{key}={value}" for key, value in DIGITS.items() if key.startswith("model.")]
FOREIGN = re.compile(r"^[IWEF]\d{4} |WARNING|\bTPU\b|absl|tensorflow|oneDNN|XLA|cuda|Warning:|Traceback", re.IGNORECASE)


@pytest.mark.weekly
def test_train_evaluate_and_predict_print_no_foreign_line(digits_workdir, tmp_path):
    """In the environment of a user: no backend of JAX is selected."""
    without = ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    Image.new("L", (8, 8)).save(tmp_path / "a.jpg")
    short = ["total_steps=2", "model.depth=1", "model.width=16", "model.compose=none", "tensorboard=true"]
    resize = "decode(1)|resize(8)|value_range(-1, 1)"  # by TensorFlow
    commands = [
        ["train", "--config", "vit_digits", "--workdir", str(tmp_path / "run"), *(f"--config.{w}" for w in short)],
        ["evaluate", "--workdir", str(digits_workdir)],
        ["predict", str(tmp_path / "a.jpg"), "--workdir", str(digits_workdir), "--config", "vit_digits"],
    ]
    commands[-1] += [f"--config.pp_predict={resize}", *MODEL]
    output = tmp_path / "output.txt"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.format(commands=commands), str(output), str(ROOT)], env=environment, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    lines = output.read_text().splitlines()
    assert done.returncode == 0, (done.stderr, lines)
    assert (done.stdout, done.stderr) == ("", "")
    assert lines
    assert [line for line in lines if FOREIGN.search(line)] == []
    table = (tmp_path / "run" / "parameters.txt").read_text()  # instead of the console
    assert "pos_embedding" in table
    assert "Total: " in table
