"""Runs on TIFFs of 13 channels of 16 bits: evaluation, prediction and conversion."""

import jax
import numpy as np
import pytest
from trained_workdirs import load_params

import dcvit
from dcvit import cli, convert, evaluate, predict, train
from dcvit.runs import metrics

tifffile = pytest.importorskip("tifffile")
pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]

DECODE = 'decode(13, dtype="uint16")'
VALUES = "value_range(-1, 1, 0, 5000)"
LABELS = 'onehot({num_classes})|keep("image", "labels")'


@pytest.fixture(scope="module")
def land(tmp_path_factory):
    """Images of two classes, in root/{train,val}/CLASS/N.tif."""
    root, rng = tmp_path_factory.mktemp("land") / "land", np.random.default_rng(0)
    options = {"photometric": "minisblack", "planarconfig": "separate", "compression": "zlib", "metadata": None}
    for split, number in (("train", 8), ("val", 4)):
        for name, level in (("land", 3000), ("water", 600)):
            (folder := root / split / name).mkdir(parents=True)
            for i in range(number):
                image = rng.normal(level, 200, (13, 20, 16)).clip(0).astype(np.uint16)
                tifffile.imwrite(folder / f"{i}.tif", image, **options)
    return root


def words(folder, workdir):
    """The command line of a run of four steps, without layers, which compiles fastest."""
    resized = f"{DECODE}|resize_pillow(16)|{VALUES}"
    common = {
        "model.num_heads": 4, "model.depth": 0, "tensorboard": False, "log_steps": 1, "ckpt_steps": 2,
        "input.pp": f"{DECODE}|random_crop(16)|flip_lr|{VALUES}|{LABELS}", "pp_predict": resized,
        "evals.val.pp": f"{resized}|{LABELS}", "evals.val.batch_size": 8, "input.batch_size": 8,
    }  # fmt: skip
    options = [f"--config.{key}={value}" for key, value in common.items()]
    config = f"vit_folder:variant=ViT-mu/8,res=16,epochs=2,data_dir={folder}"
    return ["--config", config, *options, "--workdir", str(workdir)]


@pytest.fixture(scope="module")
def trained(land, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained") / "run"
    with jax.numpy_dtype_promotion("standard"):
        assert cli.run(train.main, words(land, workdir)) == 0
    return workdir


def test_evaluation_and_prediction_of_files_and_arrays_agree(trained, land, tmp_path, capsys):
    assert load_params(trained)["embedding"]["kernel"].shape == (8, 8, 13, 32)
    report = tmp_path / "report.html"
    assert cli.run(evaluate.main, ["--workdir", str(trained), "--report", str(report)]) == 0
    assert f"{metrics.read(trained / 'metrics.jsonl')[-1]['val/top1']:.4f}" in capsys.readouterr().out
    files = sorted(land.glob("val/*/*.tif"))
    assert cli.run(predict.main, ["--workdir", str(trained), *map(str, files)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*map(str, files)]
    model = dcvit.load(trained)
    arrays = [np.moveaxis(tifffile.imread(file), 0, 2) for file in files]
    expected = [[(p.label, p.probability) for p in row] for row in model.predict(files)]
    assert [[(p.label, p.probability) for p in row] for row in model.predict(arrays)] == expected
    with pytest.raises(dcvit.errors.InputError, match="12 channels; expected 13"):
        model.predict(arrays[0][..., :12])
    with pytest.raises(dcvit.errors.InputError, match="expected uint8, uint16 or int16 of"):
        model.predict(arrays[0].astype(np.float64))


def test_conversions_name_that_other_libraries_read_rgb(trained, tmp_path, capsys):
    assert cli.run(convert.main, [str(trained), str(tmp_path / "timm"), "--to", "timm"]) == 2
    assert cli.run(convert.main, [str(trained), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert "decodes 13 channels of uint16; other libraries read 1 or 3 of uint8" in capsys.readouterr().err
