"""The command predict on image files, and its errors on unusable runs."""

import csv
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_datasets import encoded
from PIL import Image
from trained_workdirs import load_params

import dcvit
import input_pipeline
from dcvit import predict
from dcvit.cli import run
from dcvit.config import values
from dcvit.hub import kinds
from dcvit.inference import images as inference
from dcvit.training.evaluation import predictor

pytestmark = pytest.mark.usefixtures("library_promotion")


@pytest.fixture
def images(tmp_path):
    """Six test digits as PNG and JPEG files of several sizes and modes, and their labels by file name."""
    source = input_pipeline.open_source("digits", split="test")
    labels = {}
    for i, mode in enumerate(["L", "RGB", "RGBA", "P", "L", "L"]):
        name = f"{i}.{'jpg' if i == 4 else 'png'}"
        image = Image.fromarray(source[i]["image"][..., 0]).convert(mode)
        image.resize((16, 16) if i == 5 else (8, 8), Image.Resampling.NEAREST).save(tmp_path / name, quality=95)
        labels[str(tmp_path / name)] = str(source[i]["label"])
    return labels


def call(capsys, *argv):
    """Exit status, standard output and standard error of the command."""
    capsys.readouterr()
    status = run(predict.main, [str(a) for a in argv])
    return status, *capsys.readouterr()


@pytest.mark.slow
def test_predictions_equal_the_models_logits_for_files_and_folders(digits_workdir, images, tmp_path, capsys):
    status, out, _ = call(capsys, "--workdir", digits_workdir, tmp_path, "--topk", "3", "--format", "csv")
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["file"] for row in rows[::3]] == list(images)
    config = values.read_json(digits_workdir / "config.json")
    pixels = input_pipeline.open_source("digits", split="test").images[:4].astype(np.float32)  # stored without loss
    params = jax.tree.map(jnp.asarray, load_params(digits_workdir))
    logits = predictor(kinds.make_model(config))(params, jnp.asarray(pixels / 127.5 - 1))[0]
    assert [row["label"] for row in rows[::3]][:4] == [str(i) for i in jnp.argmax(logits, axis=-1)]
    assert sum(row["label"] == images[row["file"]] for row in rows[::3]) >= 4  # a short training
    for i in range(0, len(rows), 3):
        shares = [float(row["probability"]) for row in rows[i : i + 3]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1 + 1e-5
    status, out, _ = call(capsys, "--workdir", digits_workdir, *images, "--topk", "1", "--format", "json")
    assert [row["label"] for row in json.loads(out)] == [row["label"] for row in rows[::3]]
    first = rows[:3]
    status, out, _ = call(capsys, "--workdir", digits_workdir, *images, "--topk", "3")
    assert status == 0
    line = out.splitlines()[0]
    assert line.split() == [
        first[0]["file"],
        *(word for row in first for word in (row["label"], f"{100 * float(row['probability']):.1f}", "%")),
    ]


def test_probabilities_are_sigmoids_if_the_loss_is(digits_workdir, images, tmp_path, capsys):
    copy = tmp_path / "sigmoid"
    shutil.copytree(digits_workdir, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "loss": "sigmoid_xent"}))
    (copy / "accepted.json").write_text('{"accept": ["loss"]}')
    first = next(iter(images))
    rows = [
        json.loads(call(capsys, "--workdir", w, first, "--topk", "10", "--format", "json")[1])
        for w in (digits_workdir, copy)
    ]
    softmax, sigmoid = ({row["label"]: row["probability"] for row in each} for each in rows)
    assert sum(softmax.values()) == pytest.approx(1, abs=1e-4)
    for label, share in softmax.items():  # the odds of sigmoid are the exponentials that softmax normalizes
        odds = sigmoid[label] / (1 - sigmoid[label])
        best = sigmoid[rows[1][0]["label"]]
        assert odds / (best / (1 - best)) == pytest.approx(share / rows[0][0]["probability"], rel=0.01, abs=1e-4)


def test_unreadable_files_are_errors_and_the_others_are_classified(digits_workdir, images, tmp_path, capsys):
    good = list(images)[:2]
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    bad = [tmp_path / "text.png", tmp_path / "empty.jpg", tmp_path / "absent.png"]
    status, out, err = call(capsys, "--workdir", digits_workdir, *bad, *good, "--format", "json")
    assert status == 1
    assert {row["file"] for row in json.loads(out)} == set(good)
    assert len(err.splitlines()) == 3
    assert all(f"error: {path}: " in err for path in bad)


def test_batch_is_yielded_before_the_files_of_the_next_are_read(digits_workdir, monkeypatch):
    """Any number of files needs the memory of one batch."""
    model = dcvit.load(digits_workdir)
    data, read = encoded(Image.new("L", (8, 8), 255), "PNG"), []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or data)
    files = [Path(f"{i}.png") for i in range(2 * inference.BATCH + 1)]
    images = inference.read_images(files, "decode(1)|value_range(-1, 1)", pytest.fail)
    batches = model.classify(images, topk=1)
    for number in (1, 2):
        batch = next(batches)
        assert (len(batch), len(read)) == (inference.BATCH, number * inference.BATCH)
    assert [len(batch) for batch in batches] == [1]
