"""The command evaluate on trained models."""

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from markdown_pages import ROOT
from trained_workdirs import DIGITS, load_params

import dcvit
from dcvit import cli, evaluate, predict
from dcvit.errors import NOT_FINITE, CheckpointError, InputError
from dcvit.runs import metrics

pytestmark = pytest.mark.usefixtures("library_promotion")

DIGITS_MODEL = [f"--config.{key}={value}" for key, value in DIGITS.items() if key.startswith("model.")]


@pytest.fixture
def call(capsys):
    """Run the command; return (exit status, stdout, stderr)."""

    def run(*argv):
        capsys.readouterr()
        status = cli.run(evaluate.main, [str(word) for word in argv])
        return status, *capsys.readouterr()

    return run


@pytest.mark.exhaustive
def test_evaluation_equals_the_last_row_of_the_training_run(digits_workdir, call):
    last = metrics.read(digits_workdir / "metrics.jsonl")[-1]
    status, out, _ = call("--workdir", digits_workdir, "--format", "json")
    assert status == 0
    (row,) = json.loads(out)
    assert row.pop("images_per_second") > 0
    assert row == {
        "evaluation": "test",
        "model": "ViT",
        "step": last["step"],
        "parameters": metrics.read(digits_workdir / "metrics.jsonl")[0]["num_params"],
        "gflops": pytest.approx(5e-5, abs=5e-5),  # rounded to four digits
        "image_size": "8x8",
        **{k: pytest.approx(last[f"test/{k}"], rel=1e-5) for k in ("top1", "top5", "mean_recall", "loss", "n")},
    }
    step = digits_workdir / "checkpoints" / str(last["step"])
    status, out, _ = call("--config", "vit_digits", *DIGITS_MODEL, "--checkpoint", step, "--format", "csv")
    assert status == 0
    assert next(csv.DictReader(io.StringIO(out)))["top1"] == str(row["top1"])


def test_report_has_the_printed_numbers(digits_workdir, tmp_path, call):
    path = tmp_path / "report.html"
    path.write_text("an earlier report")
    status, out, err = call("--workdir", digits_workdir, "--format", "json", "--report", path)
    assert (status, err) == (0, f"report: {path}\n")
    (row,) = json.loads(out)
    assert call("--workdir", digits_workdir, "--format", "json")[1].rpartition(",")[0] == out.rpartition(",")[0]
    text = path.read_text()
    tiles = dict(re.findall(r'<dt>(.*?)</dt><dd class="value">(.*?)</dd>', text))
    assert tiles["Accuracy"] == f"{row['top1']:.2%}".replace("%", "&#160;%")
    assert tiles["Top-5 accuracy"] == f"{row['top5']:.2%}".replace("%", "&#160;%")
    assert (tiles["Loss"], tiles["Images"]) == (f"{row['loss']:.4f}", f"{row['n']:,}")
    correct = sum(int(count) for count in re.findall(r'<td class="hit[^>]*>(\d+)<', text))
    assert correct / row["n"] == row["top1"]
    assert len(re.findall("<img", text)) == min(24, row["n"] - correct)
    for fact in (f"{digits_workdir}/checkpoints/{row['step']}", f"{row['parameters']:,}", "model.width", "digits"):
        assert fact in text
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_results_of_each_class_agree_with_the_totals(digits_workdir, tmp_path, call):
    words = ("--workdir", digits_workdir, "--format", "json", "--per-class")
    status, out, err = call(*words, tmp_path / "classes.json")
    assert (status, err) == (0, f"classes: {tmp_path / 'classes.json'}\n")
    (total,), rows = json.loads(out), json.loads((tmp_path / "classes.json").read_text())
    assert [row["class"] for row in rows] == [str(c) for c in range(10)]
    assert sum(row["examples"] for row in rows) == sum(row["predictions"] for row in rows) == total["n"]
    assert sum(row["recall"] * row["examples"] for row in rows) == pytest.approx(total["top1"] * total["n"])
    assert np.mean([row["recall"] for row in rows]) == pytest.approx(total["mean_recall"])
    assert call(*words)[0] == 2  # two tables are not JSON
    assert call("--workdir", digits_workdir, "--per-class", tmp_path / "classes.txt")[0] == 2
    assert not (tmp_path / "classes.txt").exists()


def test_outputs_that_are_not_finite_are_an_error(digits_workdir, tmp_path, capsys):
    """Every parameter is finite; the logits overflow."""
    params = flatten_dict(load_params(digits_workdir), sep="/")
    params["head/kernel"] = np.full_like(params["head/kernel"], 3e38)
    np.savez(tmp_path / "huge.npz", **params)
    words = ["--config", "vit_digits", *DIGITS_MODEL, "--checkpoint", str(tmp_path / "huge.npz")]
    image = str(ROOT / "tests" / "data" / "seven.png")
    for main, more in ((evaluate.main, ()), (predict.main, (image,)), (predict.main, (image, "--format", "json"))):
        assert cli.run(main, [*words, *more]) == 2
        found = capsys.readouterr()
        assert found.out == ""
        assert found.err.splitlines()[-1].endswith(NOT_FINITE)
    model = dcvit.load(digits_workdir)
    images = np.zeros((2, 8, 8, 1), np.float32)
    head = {**model.params["head"], "bias": np.full(10, np.inf)}
    huge = dataclasses.replace(model, params={**model.params, "head": head})
    for call_model in (huge.predict, lambda x: huge.features(x, "logits")):
        with pytest.raises(CheckpointError, match="not finite"):
            call_model(images)
    with pytest.raises(InputError, match="not finite"):
        model.predict(images * np.nan)
