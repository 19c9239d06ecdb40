"""The ImageNet config: its data and evaluations, and a whole run on small data sets in ImageNet's format."""

import csv
import io
import json
import re
import shutil

import image_datasets
import numpy as np
import pytest
from batches import assert_same_batches
from training_runs import interrupted_before, same_runs

import input_pipeline
from dcvit import evaluate, predict, train
from dcvit.cli import run
from dcvit.config import load as config
from dcvit.runs import metrics
from dcvit.training import setup

I1K = "configs/vit_i1k.py"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Prepare the training data, its validation split and ImageNet-V2; return the folder."""
    pytest.importorskip("tensorflow_datasets")
    root = tmp_path_factory.mktemp("data")
    image_datasets.imagenet2012(root, n_train=400, n_val=10)
    image_datasets.derived(root, "imagenet_v2")
    return root


@pytest.fixture
def i1k(tmp_path, monkeypatch, library_promotion):
    """Return a function that trains the unmodified config in small on the data of a folder: (exit status, workdir)."""

    def train_it(data_dir, name, arguments="", *overrides):
        monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
        spec = f"{I1K}:variant=DCViT-S/16,runlocal=true{arguments}"
        argv = ["--config", spec, "--workdir", str(tmp_path / name), "--config.tensorboard=false", *overrides]
        return run(train.main, argv), tmp_path / name

    return train_it


@pytest.mark.weekly
def test_config_trains_resumes_and_evaluates_on_every_set(i1k, data_dir, tmp_path, capsys, monkeypatch):
    root = shutil.copytree(data_dir, tmp_path / "all")
    image_datasets.imagenet2012_real(root)
    for name in ("imagenet_a", "imagenet_r", "imagenet_sketch"):
        image_datasets.derived(root, name)
    status, uninterrupted = i1k(root, "uninterrupted")
    assert status == 0
    rows = metrics.read(uninterrupted / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8, 10, 12]
    names = {"train", "minival", "val", "real", "v2", "a", "r", "sketch"}
    counts = {name: rows[-1][f"{name}/n"] for name in names}
    assert counts == {**dict.fromkeys(names, 10), "train": 8, "minival": 4, "real": 6}  # of ReaL, four have no label
    assert i1k(root, "uninterrupted")[0] == 0  # nothing is left to do

    with interrupted_before(monkeypatch, 8):
        assert i1k(root, "stopped")[0] == 130
    status, stopped = i1k(root, "stopped")
    assert status == 0
    assert same_runs(uninterrupted, stopped)

    capsys.readouterr()
    assert run(evaluate.main, ["--workdir", str(uninterrupted), "--format", "csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["evaluation"] for row in table} == names
    for row in table:
        assert (row["model"], row["step"], row["image_size"]) == ("DCViT-mu/16", "12", "32x32")
        assert float(row["top1"]) == pytest.approx(rows[-1][f"{row['evaluation']}/top1"])
        assert float(row["images_per_second"]) > 0
        assert int(row["parameters"]) == rows[0]["num_params"]
    image = tmp_path / "a.jpg"
    image.write_bytes(image_datasets.jpeg(3))
    assert run(predict.main, ["--workdir", str(uninterrupted), str(image), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["label"].startswith("n")


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
def test_parquet_files_have_the_batches_of_tfds_in_a_window_of_all_images(data_dir, tmp_path, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    for split in ("train", "validation"):
        source = input_pipeline.open_source("tfds", name="imagenet2012", split=split, data_dir=str(data_dir))
        examples = [source[i] for i in range(len(source))]
        images = [{"bytes": e["image"], "path": None} for e in examples]
        rows = pa.table({"image": images, "label": [e["label"] for e in examples]})
        pq.write_table(rows, tmp_path / f"{split}-00000-of-00001.parquet", row_group_size=20)
    spec = f"{I1K}:variant=DCViT-S/16,runlocal=true"
    tfds, parquet, window = (
        setup.make_setup(config.load(f"{spec}{arguments}", ["model.depth=0", *words]))
        for arguments, *words in ([""], [f",data_dir={tmp_path}"], [f",data_dir={tmp_path}", "input.data.window=50"])
    )
    assert_same_batches(tfds.data.batches(0), parquet.data.batches(0), 12)
    one, other = (made.evaluators["val"].data.source for made in (tfds, parquet))
    assert [one[i]["image"] for i in range(len(one))] == [other[i]["image"] for i in range(len(other))]
    first, smaller = (next(made.data.batches(0)) for made in (parquet, window))
    assert not np.array_equal(first["image"], smaller["image"])


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
def test_missing_optional_evaluation_sets_are_skipped_with_one_warning(data_dir, caplog, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    made = setup.make_setup(config.load(f"{I1K}:variant=ViT-S/16,runlocal=true"))
    skipped = re.findall(r"^config\.evals\.(\w+): skipped, ", "\n".join(caplog.messages), re.MULTILINE)
    assert sorted(skipped) == ["a", "r", "real", "sketch"]
    assert set(made.evaluators) == {"train", "minival", "val", "v2"}
