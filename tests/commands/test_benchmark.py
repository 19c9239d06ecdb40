"""`dcvit benchmark`: its rows in every format, without data and libraries that read it, and invalid arguments."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcvit import benchmark, cli

ROOT = Path(__file__).resolve().parents[2]
LM = [
    "--config", "lm_text:data_dir=/nowhere,context=2048", "--mode", "forward", "--rounds", "2",
    "--config.model.depth=1", "--config.model.width=16", "--config.model.num_heads=2", "--config.model.mlp_dim=24",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
def test_a_batch_that_does_not_fit_is_a_row_and_the_others_are_measured(capsys):
    """The logits of 900,000 rows of 2,048 tokens have 1.9 TB."""
    assert cli.run(benchmark.main, [*LM, "--batch-size", "8", "900000", "--format", "csv"]) == 0
    measured, lacking = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (measured["batch"], measured["error"], lacking["batch"], lacking["ms"]) == ("8", "", "900000", "")
    assert float(measured["rate"]) == pytest.approx(8 * 2048 / float(measured["ms"]) * 1e3)
    assert lacking["error"].startswith("out of memory: ")
    assert (float(measured["memory_mb"]) > 0, lacking["memory_mb"]) == (True, "")
    assert cli.run(benchmark.main, [*LM, "--batch-size", "900000", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["error"].startswith("out of memory: ")


BLOCKED = """
import sys
for name in ("tensorflow", "tensorflow_datasets", "clu", "sklearn", "pyarrow", "numba", "matplotlib", "scipy.stats"):
    sys.modules[name] = None
from dcvit.benchmark import main
words = "--config vit_i1k:variant=ViT-mu/16 --mode train --rounds 1 --batch-size 2 --format csv --config.model.depth=1"
sys.exit(main(words.split()))
"""


@pytest.mark.exhaustive
def test_images_need_no_library_that_reads_them():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", BLOCKED], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = [*csv.DictReader(done.stdout.splitlines())]
    assert [(row["mode"], row["unit"], row["error"]) for row in rows] == [("train", "img/s", "")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "vit_digts"], "no config named 'vit_digts'; did you mean 'vit_digits'?"),
        (["--config", "vit_digits", "--batch-size", "0"], "--batch-size: 0 should be an integer, 1 or more"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_one_line_before_anything_compiles(words, message, capsys, monkeypatch):
    monkeypatch.setattr("dcvit.training.measure.Program", lambda *_: pytest.fail("compiled"))
    assert cli.run(benchmark.main, words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
