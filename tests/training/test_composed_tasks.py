"""Runs of the configs with generated data: they train, are evaluated by task, and speak the words of their data."""

import csv
import io

import pytest

from dcvit import cli, evaluate, generate, train
from input_pipeline.text.synthetic import Source

pytestmark = pytest.mark.usefixtures("library_promotion")
TINY = [
    "model.width=16", "model.mlp_dim=16", "model.depth=1", "model.compose=None", "input.batch_size=8",
    "tensorboard=False",
]  # fmt: skip


def evaluated(argv, capsys):
    """Train, and return the rows of an evaluation."""
    assert cli.run(train.main, argv) == 0
    capsys.readouterr()
    assert cli.run(evaluate.main, ["--workdir", argv[3], "--format", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.weekly
def test_a_run_on_generated_tasks_is_evaluated_by_task_and_generates_words(tmp_path, capsys):
    limits = [f"evals.validation.{word}" for word in ("data.limit=116", "batch_size=58", "log_percent=100")]
    words = [f"--config.{word}" for word in [*TINY, *limits]]
    workdir = str(tmp_path / "run")
    argv = ["--config", "lm_synthetic:steps=3,shots=1", "--workdir", workdir, *words]
    rows = evaluated(argv, capsys)
    names = [
        f"validation/{name}" for name in Source(tasks=["first/*", "last/*", "in/*", "unlike/*", "odd/*"]).task_names
    ]
    assert [row["evaluation"] for row in rows] == ["validation", *names, "validation/0-shot", "validation/1-shot"]
    assert [row["answers"] for row in rows] == ["232", *["4"] * 58, "116", "116"]
    argv = ["--workdir", workdir, "--prompt", "apple . wolf .", "--tokens", "3", "--temperature", "0"]
    assert cli.run(generate.main, argv) == 0
    out = capsys.readouterr().out.split()
    assert out[:4] == ["apple", ".", "wolf", "."]
    assert {*out} <= {*Source().tokenizer.words}
    assert cli.run(generate.main, ["--workdir", workdir, "--prompt", "aple ."]) == 2
    assert "no word 'aple' in the vocabulary; did you mean 'apple'" in capsys.readouterr().err


@pytest.mark.weekly
def test_a_run_on_scenes_trains_and_is_evaluated_on_two_splits(tmp_path, capsys):
    words = [f"--config.{word}" for word in [*TINY, "evals.validation.data.limit=9", "evals.test.data.limit=5"]]
    rows = evaluated(["--config", "vit_scenes:steps=3", "--workdir", str(tmp_path / "run"), *words], capsys)
    assert [(row["evaluation"], row["n"], row["image_size"]) for row in rows] == [
        ("test", "5", "27x27"), ("validation", "9", "27x27")
    ]  # fmt: skip
