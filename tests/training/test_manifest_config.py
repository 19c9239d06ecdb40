"""configs/vit_manifest.py: training with several labels, resumed bit for bit, evaluated, reported, and used."""

import html
import json
import re
import shutil

import jax
import manifests
import numpy as np
import pytest

import dcvit
from dcvit import cli, evaluate, predict, train
from dcvit.runs import metrics
from dcvit.runs.workdir import THRESHOLDS

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]
SMALL = {
    "tensorboard": False, "model.num_heads": 2, "model.depth": 0, "model.width": 16, "model.mlp_dim": 16, "lr": 0.02,
    "ckpt_steps": 5, "log_steps": 1, "evals.val.log_steps": 5, "class_weights": "balanced", "pos_weight": "balanced",
    "mixup": 0.2, "label_smoothing": 0.05,
}  # fmt: skip
PRECISE = "decode(precise=True)|resize_pillow(16)|value_range(-1, 1)"


def command(folder, workdir, arguments="sep=|", **overrides):
    pp = PRECISE + ("" if "sep" in arguments else "|onehot({num_classes}, ignore=-1)") + "|keep('image', 'labels')"
    options = {**SMALL, "input.pp": pp, "evals.val.pp": pp, "pp_predict": PRECISE, "total_steps": 20, **overrides}
    spec = f"vit_manifest:manifest={folder / 'labels.csv'},variant=ViT-mu/8,res=16,batch_size=8,{arguments}"
    words = [f"--config.{key}={value}" for key, value in options.items()]
    return cli.run(train.main, ["--config", spec, "--workdir", str(workdir), *words])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """48 images to train and 16 to evaluate, of which two have no known label."""
    folder = tmp_path_factory.mktemp("colors") / "data"
    manifests.multilabel_manifest(folder, unknown=(5, 50))
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("multilabel") / "run"
    with jax.numpy_dtype_promotion("standard"):
        assert command(data, workdir) == 0
    return workdir


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_training_learns_the_colors(trained):
    rows = metrics.read(trained / "metrics.jsonl")
    assert rows[-1]["val/n"] == 15
    assert rows[-1]["val/mean_ap"] > 0.9
    assert rows[-1]["loss"] < rows[1]["loss"]


def test_a_changed_label_is_other_data(data, copied, tmp_path, capsys):
    folder = shutil.copytree(data, tmp_path / "data")
    assert command(folder, copied, total_steps=21) == 2
    assert "config.input.data.manifest" in capsys.readouterr().err  # another place, which the config names
    text = (data / "labels.csv").read_text()
    (data / "labels.csv").write_text(text.replace("images/001.png,blue", "images/001.png,red"))
    try:
        assert command(data, copied) == 2
    finally:
        (data / "labels.csv").write_text(text)
    assert re.search(r"data\.files \(labels\.csv.* changed\)", capsys.readouterr().err)


def evaluated(workdir, capsys, *words):
    assert cli.run(evaluate.main, ["--workdir", str(workdir), "--format", "json", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return row


def test_thresholds_are_chosen_stored_and_used(copied, data, capsys, tmp_path):
    plain = evaluated(copied, capsys)
    assert dcvit.load(copied).thresholds == 0.5
    chosen = evaluated(copied, capsys, "--thresholds", "val", "--report", str(tmp_path / "r.html"))
    assert chosen["f1_macro"] >= plain["f1_macro"]
    assert chosen["mean_ap"] == plain["mean_ap"]
    again = evaluated(copied, capsys)
    assert again["f1_macro"] == chosen["f1_macro"]
    page = html.unescape((tmp_path / "r.html").read_text())
    for text in (*manifests.COLORS, "Threshold", "maximize F1 on 'val' at step 20", "45 known labels"):
        assert text in page
    assert "Confusion" not in page
    model = dcvit.load(copied)
    stored = json.loads((copied / THRESHOLDS).read_text())["thresholds"]
    assert dict(zip(model.class_names, model.thresholds, strict=True)) == stored
    words = ["--workdir", str(copied), "--checkpoint", str(copied / "checkpoints" / "15")]
    assert cli.run(evaluate.main, words) == 0
    assert f"{THRESHOLDS} is of step 20, the model of step 15" in capsys.readouterr().err


def test_predict_prints_the_classes_that_reach_their_thresholds(copied, data, capsys):
    files = [data / "images" / f"{i:03}.png" for i in (0, 1, 3, 7)]
    values = {"blue": 0.0, "green": 1.0, "red": 0.5}
    content = {"evaluation": "val", "step": 20, "thresholds": values}
    (copied / THRESHOLDS).write_text(json.dumps(content))
    model = dcvit.load(copied)
    for row, every in zip(model.predict(files), model.predict(files, topk=3), strict=True):
        expected = {p.label for p in every if p.label == "blue" or (p.label == "red" and p.probability >= 0.5)}
        assert {p.label for p in row} == expected
    content["thresholds"] = dict.fromkeys(values, 1.0)
    (copied / THRESHOLDS).write_text(json.dumps(content))
    assert dcvit.load(copied).predict(files[:1]) == [[]]
    words = ["--workdir", str(copied), str(files[0])]
    assert cli.run(predict.main, words) == 0
    assert re.fullmatch(r"\S+000\.png  none\n", capsys.readouterr().out)
    assert cli.run(predict.main, [*words, "--topk", "1", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["rank"] == 1


def test_damaged_thresholds_are_one_line(copied, data, capsys):
    (copied / THRESHOLDS).write_text('{"evaluation": "val", "step": 20, "thresholds": {"blue": 0.5}}')
    assert cli.run(predict.main, ["--workdir", str(copied), str(data / "images" / "000.png")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "no entry 'green'; remove the file" in last


def test_one_label_with_unknown_ones_trains_with_a_softmax(data, tmp_path, capsys):
    """The same images with the first color of each, or none; folds instead of splits."""
    text = [line.split(",") for line in (data / "labels.csv").read_text().splitlines()]
    folder = shutil.copytree(data, tmp_path / "data")
    rows = [(path, label.split("|")[0]) for path, label, _ in text[1:]]
    manifests.write_csv(folder / "labels.csv", ("path", "label"), rows)
    assert command(folder, tmp_path / "run", "val=fold 1 of 4", pos_weight=None, total_steps=5) == 0
    last = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    unknown = sum(not label for _, label in rows)
    assert 16 - unknown <= last["val/n"] <= 16
    assert np.isfinite(last["loss"])


def test_an_evaluator_of_another_loss_is_one_line_and_writes_nothing(data, tmp_path, capsys):
    assert command(data, tmp_path / "run", "sep=|", loss="softmax_xent", pos_weight=None) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "type='multilabel' is for loss='sigmoid_xent'" in last
    assert not (tmp_path / "run").exists()
