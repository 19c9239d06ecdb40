"""`dcvit check-data` lists every damaged example of a config's data, and only those."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_datasets import encoded
from PIL import Image

from dcvit import cli
from dcvit.__main__ import dispatch
from dcvit.config import load as configs
from dcvit.training import picture
from dcvit.training.setup import make_setup
from input_pipeline.preprocess.builder import checking, decoding

TEXT = "lm_text:data_dir={},context=16"


@pytest.fixture
def pets(tmp_path):
    """Twelve images to train and eight to evaluate, of which two and one are damaged."""
    for split, count in (("train", 6), ("val", 4)):
        for label in ("cat", "dog"):
            folder = tmp_path / "pets" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                Image.effect_noise((32, 32), 90).save(folder / f"{i}.png")
    for name in ("train/cat/3.png", "train/dog/0.png", "val/dog/2.png"):
        file = tmp_path / "pets" / name
        file.write_bytes(file.read_bytes()[:-300])  # the header is intact
    return tmp_path / "pets"


def check(capsys, *words):
    status = cli.run(dispatch, ["check-data", *words])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_damaged_images_are_listed_with_file_and_reason(pets, capsys):
    status, lines, _ = check(capsys, "--config", f"vit_folder:data_dir={pets},res=32")
    damaged, counts = lines[:-2], lines[-2:]
    assert status == 1
    files = [line.split(": ")[0] for line in damaged]
    assert files == [str(pets / name) for name in ("train/cat/3.png", "train/dog/0.png", "val/dog/2.png")]
    assert all(len(line.split(": ", 1)[1]) > 5 for line in damaged)
    assert counts == ["config.input.data: 12 read, 2 damaged", "config.evals.val.data: 8 read, 1 damaged"]
    for file in files:
        (pets / file).unlink()
    status, lines, _ = check(capsys, "--config", f"vit_folder:data_dir={pets},res=32")
    assert (status, [line.split(", ")[-1] for line in lines]) == (0, ["0 damaged"] * 2)


def test_the_first_damaged_line_of_a_text_is_named(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words " * 90)
    assert check(capsys, "--config", TEXT.format(tmp_path / "texts"))[0] == 0
    (tmp_path / "texts" / "b.txt").write_bytes(b"good\nbad \xff\xfe\n")
    status, _, printed = check(capsys, "--config", TEXT.format(tmp_path / "texts") + ",tokenizer=train")
    assert (status, "b.txt:2: not UTF-8" in printed.splitlines()[-1]) == (2, True)


def test_labels_at_which_training_stops_are_listed(tmp_path, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = encoded(Image.new("RGB", (8, 8)), "PNG")
    for i, (labels, kind) in enumerate([([0, -1, 9, 10], pa.int64()), ([0, 2**64 - 1], pa.uint64())]):
        rows = pa.table({"image": [image] * len(labels), "label": pa.array(labels, kind)})
        (tmp_path / f"{i}").mkdir()
        path = tmp_path / f"{i}" / "train.parquet"
        pq.write_table(rows, path)
        words = ["--config", "vit_digits", "--config.evals={}", "--config.input.data.kind=parquet"]
        words += [f"--config.input.data.data_dir={path.parent}", "--config.input.pp=decode|onehot(10)"]
        status, lines, _ = check(capsys, *words)
        assert status == 1
        damaged = [int(line.split(", row ")[1].split(":")[0]) for line in lines[:-1]]
        assert damaged == [row for row, label in enumerate(labels) if not 0 <= label < 10]


def test_statistics_are_those_of_the_training_images_that_are_not_damaged(pets, capsys):
    words = ["--config", f"vit_folder:data_dir={pets},res=32", "--statistics", "--config.input.pp=decode(1)"]
    status, lines, _ = check(capsys, *words)
    damaged = (pets / "train/cat/3.png", pets / "train/dog/0.png")
    files = [file for file in (pets / "train").rglob("*.png") if file not in damaged]
    pixels = np.stack([np.asarray(Image.open(file)) for file in files]).astype(np.float64)
    expected = [pixels.mean(), pixels.std(), pixels.min(), pixels.max()]
    assert (status, lines[-3].split()) == (1, ["channel", "mean", "std", "min", "max"])
    np.testing.assert_allclose([float(word) for word in lines[-2].split()], [0, *expected], rtol=1e-6)
    assert lines[-1] == f"vgg_value_range(({pixels.mean():.7g},), ({pixels.std():.7g},))"


@pytest.mark.parametrize(
    ("reduced", "pp", "expected"),
    [
        (decoding, "decode_jpeg_and_inception_crop(32, exif=True)|flip_lr", "decode(exif=True)"),
        (checking, 'decode|resize(8)|onehot(3)|keep("image", "labels")', "decode|onehot(3)"),
        (checking, 'decode|resize(8, outkey="small")|copy("small", "a")', "decode"),
    ],
)
def test_images_are_decoded_completely_and_labels_checked_without_the_ops_of_pixels(reduced, pp, expected):
    """A training crop would not see damage outside of it."""
    assert reduced(pp) == expected


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_a_picture_has_the_images_of_the_first_step_after_all_augmentations(tmp_path, capsys, mixup):
    words = ["--config", "vit_digits", "--config.seed=3", f"--config.mixup={mixup}", "--config.model.depth=0"]
    status, (line,), _ = check(capsys, *words, "--picture", str(tmp_path / "inputs.png"))
    assert (status, line.split(": ")[1]) == (0, "16 of 64 images of the first step; black is -1, white 1")
    sheet = np.asarray(Image.open(tmp_path / "inputs.png"))
    setup = make_setup(configs.load("vit_digits", ["seed=3", f"mixup={mixup}", "model.depth=0"]), evaluate=False)
    key = jax.random.split(jax.random.fold_in(jax.random.key(3), 0))[0]
    batch = jax.tree.map(jnp.asarray, next(setup.data.batches(0)))
    images = setup.task.prepare(batch, key)["image"][:16, ..., 0]
    shown = sheet.reshape(4, 200, 4, 168, 3)[:, :160:20, :, :160:20].transpose(0, 2, 1, 3, 4).reshape(16, 8, 8, 3)
    assert all(np.abs(shown[..., c] - 255 * (np.asarray(images) + 1) / 2).max() <= 0.51 for c in range(3))


def test_labels_of_a_picture_are_the_two_largest():
    names = ("cat", "dog", "fox")
    rows = ([0, 1, 0], [0.3, 0, 0.7], [-1, -1, -1], [0, 0, 0])
    expected = ["dog", "0.70 fox\n0.30 cat", "unknown", "no class"]
    assert [picture._caption(np.array(row, np.float32), names, 0) for row in rows] == expected
    assert picture._caption(np.array([0.05, 0.9, 0.05], np.float32), names, 0.15 / 3) == "0.90 dog"  # smoothed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vit_digits", "--picture", "inputs.jpg"], "expected a name ending in .png"),
        (["lm_stdlib", "--picture", "inputs.png"], "--picture is for images; config.model_name='lm'"),
        (["vit_digits", "--picture", "inputs.png", "--statistics"], "not allowed with argument"),
    ],
)
def test_pictures_of_other_data_or_formats_are_refused(capsys, words, message):
    status, _, err = check(capsys, "--config", *words)
    assert (status, message in err) == (2, True)
