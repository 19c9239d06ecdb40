"""Models of images at another resolution than that of training: preprocessing, position embeddings and commands."""

import json
from pathlib import Path

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from refusals import refused

import dcvit
from dcvit import cli, evaluate, predict
from dcvit.errors import CheckpointError, ConfigError
from dcvit.models import vit
from dcvit.weights import preprocessing
from input_pipeline import Preprocess

SEVEN = Path(__file__).parents[1] / "data" / "seven.png"


@pytest.mark.parametrize(
    ("pp", "size", "expected"),
    [
        (
            "resize_small(40)|central_crop(32)",
            (48, 48),
            "resize_small(smaller_size=60, method='area', antialias=False)|central_crop(crop_size=48)",
        ),
        ("resize(8)|pad(2)", (24, 24), "resize(size=16, method='bilinear', antialias=False)|pad(border=4, value=0)"),
        (
            "value_range(-1, 1)|onehot(10)|keep('image')",
            (16, 8),
            "resize_pillow(size=[16, 8])|value_range(-1, 1)|onehot(10)",
        ),
    ],
)
def test_preprocessing_keeps_its_steps_and_yields_the_size(pp, size, expected):
    found = preprocessing.at_size(pp, size)
    assert expected in found
    assert preprocessing.size_of(found) == size
    assert preprocessing.at_size(found, size) == found
    Preprocess(found)


def test_preprocessing_that_cannot_yield_the_size_is_refused():
    with refused(CheckpointError, "cannot yield images of 24x12"):
        preprocessing.at_size("resize(8)|pad(2)", (24, 12))


def test_position_embeddings_are_interpolated_on_each_axis():
    """A plane stays one, and corners keep their values."""
    y, x = np.mgrid[:3, :5]
    plane = np.stack([2.0 * y + 1, 3.0 * x - y, np.ones_like(x)], axis=-1).reshape(1, 15, 3)
    found = np.asarray(vit.resample_grid(jnp.asarray(plane, jnp.float32), (3, 5), (7, 4))).reshape(7, 4, 3)
    y, x = np.meshgrid(np.linspace(0, 2, 7), np.linspace(0, 4, 4), indexing="ij")
    np.testing.assert_allclose(found, np.stack([2 * y + 1, 3 * x - y, np.ones_like(x)], axis=-1), atol=1e-6)


@pytest.fixture(scope="module")
def models(digits_workdir):
    return {size: dcvit.load(digits_workdir, image_size=size) for size in (None, (8, 8), 16, (12, 20))}


def flat(model):
    return {k: np.asarray(v) for k, v in flax.traverse_util.flatten_dict(model.params, sep="/").items()}


@pytest.mark.slow
def test_only_the_position_embeddings_change(models):
    original = flat(models[None])
    p_h, p_w = models[None].module.patch_size
    for size, model in models.items():
        found = flat(model)
        height, width = (size, size) if isinstance(size, int) else size or (8, 8)
        assert found.pop("pos_embedding").shape[1] == (height // p_h) * (width // p_w)
        assert all((found[name] == original[name]).all() for name in found)
        assert found.keys() == original.keys() - {"pos_embedding"}
    same = models[8, 8]
    np.testing.assert_array_equal(flat(same)["pos_embedding"], original["pos_embedding"])
    assert same.predict(SEVEN) == models[None].predict(SEVEN)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, (12, 20)])
def test_files_and_arrays_have_features_at_the_size(models, size):
    model = models[size]
    height, width = (size, size) if isinstance(size, int) else size
    from_file = model.features(SEVEN, "stem")
    assert from_file.shape[1:3] == (height // model.module.patch_size[0], width // model.module.patch_size[1])
    pixels = np.asarray(Image.open(SEVEN).convert("L").resize((width, height), Image.Resampling.BILINEAR))
    array = np.float32(pixels)[None, :, :, None] / 127.5 - 1
    np.testing.assert_allclose(model.features(array), model.features(SEVEN), atol=2e-2)
    with pytest.raises(CheckpointError, match="pos_embedding"):
        model.features(np.zeros((1, 8, 8, 1), np.float32))


def test_commands_take_one_option(digits_workdir, capsys):
    assert cli.run(evaluate.main, ["--workdir", str(digits_workdir), "--image-size", "12x16", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["image_size"] == "12x16"
    words = ["--workdir", str(digits_workdir), str(SEVEN), "--image-size", "16", "--format", "csv"]
    assert cli.run(predict.main, words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_a_bad_size_is_one_line(digits_workdir, lm_workdir, capsys):
    for main, more in ((evaluate.main, []), (predict.main, [str(SEVEN)])):
        assert cli.run(main, ["--workdir", str(digits_workdir), *more, "--image-size", "13"]) != 0
        (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
        assert "image_size=13x13: patches of 4x4 do not divide it" in line
    with pytest.raises(ConfigError, match="image_size=16x16 is for models of images"):
        dcvit.load(lm_workdir, image_size=16)
