"""configs/vit_folder.py and configs/transfer.py: training on a folder of images, and fine-tuning."""

import shutil
from pathlib import Path

import image_datasets
import jax
import numpy as np
import pytest
from trained_workdirs import load_params

import input_pipeline
from dcvit import evaluate, train
from dcvit.cli import run
from dcvit.config import load as configs
from dcvit.runs import metrics
from dcvit.runs.steps import saved_steps
from input_pipeline import shuffle
from input_pipeline.images import decode

pytestmark = [pytest.mark.usefixtures("library_promotion"), pytest.mark.slow]
SMALL = ["model.num_heads=4", "tensorboard=false", "log_steps=1"]
FLAT = ["model.depth=0"]  # compiles fastest


def command(config, workdir, *overrides):
    words = [f"--config.{o}" for o in (*SMALL, *overrides)]
    return run(train.main, ["--config", config, "--workdir", str(workdir), *words])


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """Three classes of images: 24 to train, 12 to evaluate."""
    root = tmp_path_factory.mktemp("pets")
    image_datasets.image_folder(root)
    return root


@pytest.fixture(scope="module")
def trained(pets, tmp_path_factory):
    """Train a small model with learned position embeddings on the folder; return the workdir."""
    tmp_path = tmp_path_factory.mktemp("trained")
    spec = f"configs/vit_folder.py:data_dir={pets},variant=ViT-mu/16,res=32,epochs=2,batch_size=8"
    with jax.numpy_dtype_promotion("standard"):
        assert command(spec, tmp_path / "run", "model.posemb=learn") == 0
    return tmp_path / "run"


def test_the_augmentations_of_vit_folder_are_ops_of_its_preprocessing_without_tensorflow(pets, monkeypatch):
    """Images of three_augment and of randaug have the size of the config; `flip` has no mixup."""
    monkeypatch.delattr(decode, "tensorflow")
    for augment, words in (("strong", "|randaug(2, 10)|"), ("three", "|three_augment|color_jitter(0.3, 0.3, 0.3)|")):
        config = configs.load(f"vit_folder:data_dir={pets},augment={augment},res=32")
        assert words in config.input.pp
        assert config.mixup == 0.2
        source = input_pipeline.open_source(**config.input.data.to_dict())
        for pp in (config.input.pp.format(num_classes=3), config.pp_predict):
            example = input_pipeline.Preprocess(pp)(source[0], np.random.default_rng(0))
            assert example["image"].shape == (32, 32, 3)
    assert configs.load(f"vit_folder:data_dir={pets},augment=flip").mixup == 0


@pytest.fixture(scope="module")
def two_classes(pets, tmp_path_factory):
    """The same images without the foxes."""
    root = shutil.copytree(pets, tmp_path_factory.mktemp("two") / "pets")
    for split in ("train", "val"):
        shutil.rmtree(root / split / "fox")
    return root


@pytest.fixture(scope="module")
def damaged(pets, tmp_path_factory):
    """A copy of the images, in which an image of the third step, which is returned, and one of `val` are truncated."""
    root = shutil.copytree(pets, tmp_path_factory.mktemp("damaged") / "pets")
    source = input_pipeline.open_source("folder", data_dir=str(root))
    third = Path(source.describe(shuffle.example_at(2 * 8, len(source), 0)[1]))
    for image in (third, next((root / "val" / "cat").iterdir())):
        image.write_bytes(image.read_bytes()[:300])
    return root, third


@pytest.mark.exhaustive
def test_fine_tuning_at_another_resolution_on_other_classes_keeps_all_but_the_head(trained, two_classes, tmp_path):
    """Learned position embeddings are resampled."""
    spec = f"configs/transfer.py:init={trained},data_dir={two_classes},res=64"
    assert command(spec, tmp_path / "tuned", "total_steps=1", "input.batch_size=8", "lr=0") == 0
    before, after = load_params(trained), load_params(tmp_path / "tuned")
    assert after["head"]["kernel"].shape == (32, 2)
    assert not np.any(after["head"]["kernel"])  # from zero, and not moved at a learning rate of 0
    old, new = (tree.pop("pos_embedding") for tree in (before, after))
    assert (old.shape[1], new.shape[1]) == (4, 16)
    corners = np.asarray(new).reshape(4, 4, -1)[::3, ::3]  # resampling keeps the corners
    np.testing.assert_allclose(corners, np.asarray(old).reshape(2, 2, -1), rtol=1e-5, atol=1e-7)
    for tree in (before, after):
        tree.pop("head")
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_fine_tuning_has_the_model_and_the_preprocessing_of_the_run(tmp_path):
    """Without further arguments; `res` selects the recipe's crops, still with the run's `exif`."""
    run = configs.load("vit_folder:data_dir=x,variant=ViT-mu/16,res=32", ["model.static=None", "num_classes=3"])
    workdir = tmp_path / "run"
    (workdir / "checkpoints" / "6").mkdir(parents=True)
    (workdir / "config.json").write_text(run.to_json().replace("{num_classes}", "3"))
    for init in (workdir, workdir / "checkpoints" / "6"):
        tuned = configs.load(f"transfer:init={init},data_dir=y")
        assert tuned.model.to_dict() == run.model.to_dict()
        assert (tuned.input.pp, tuned.evals.val.pp) == (run.input.pp, run.evals.val.pp)
        assert tuned.pp_predict == run.pp_predict
        assert tuned.num_classes is None  # those of the new data
    other = configs.load(f"transfer:init={workdir},data_dir=y,res=48", ["model.rep_size=True"])
    assert other.input.pp.startswith("decode(exif=True)|inception_crop(48)|flip_lr|value_range(-1, 1)|onehot(")
    assert (other.model.rep_size, other.model.variant) == (True, "ViT-mu/16")
    file = configs.load("transfer:init=vit.npz,data_dir=y")
    assert (file.model.variant, file.pp_predict.partition("|")[0]) == ("DCViT-S/16", "decode")


def test_damaged_image_stops_the_run_at_its_step_and_not_before(damaged, tmp_path, capsys):
    """Although batches are prepared ahead."""
    root, image = damaged
    spec = f"configs/vit_folder.py:data_dir={root},variant=ViT-mu/16,res=32,batch_size=8"
    assert command(spec, tmp_path / "three", *FLAT, "total_steps=3", "ckpt_steps=1", "evals={}") == 2
    assert f"error: {image}: broken image" in capsys.readouterr().err
    assert [row["step"] for row in metrics.read(tmp_path / "three" / "metrics.jsonl")] == [0, 1, 2]
    assert saved_steps(tmp_path / "three") == [1, 2]


def test_one_key_skips_damaged_images_of_training_and_evaluation_and_they_are_counted(damaged, tmp_path, capsys):
    root, image = damaged
    spec = f"configs/vit_folder.py:data_dir={root},variant=ViT-mu/16,res=32,epochs=2,batch_size=8"
    assert command(spec, tmp_path / "skips", *FLAT, "input.corrupt=skip", "input.corrupt_max=3") == 0
    assert capsys.readouterr().err.count(f"skipped {image}: broken image") == 1
    rows = metrics.read(tmp_path / "skips" / "metrics.jsonl")
    assert rows[-1]["skipped"] == 2  # once an epoch
    assert rows[-1]["val/n"] == 11
    assert [row["skipped"] for row in rows[1:]] == sorted(row["skipped"] for row in rows[1:])


@pytest.mark.exhaustive
def test_number_of_classes_of_another_config_comes_from_the_run_or_an_option(trained, pets, tmp_path, capsys):
    spec = f"configs/vit_folder.py:data_dir={pets},variant=ViT-mu/16,res=32"
    words = ["--config", spec, "--config.model.num_heads=4", "--config.model.posemb=learn", "--format", "json"]
    assert run(evaluate.main, [*words, "--workdir", str(trained)]) == 0
    assert run(evaluate.main, [*words, "--checkpoint", str(trained)]) == 0
    moved = str(shutil.copytree(trained / "checkpoints" / "6", tmp_path / "6"))  # without the config of its run
    assert run(evaluate.main, [*words, "--checkpoint", moved, "--config.num_classes=3"]) == 0
    capsys.readouterr()
    assert run(evaluate.main, [*words, "--checkpoint", moved]) == 2
    assert "config.num_classes is not known: set it" in capsys.readouterr().err


def test_evaluation_data_of_other_classes_is_one_line_and_nothing_is_written(pets, tmp_path, capsys):
    shutil.copytree(pets, tmp_path / "wolves")
    for split in ("train", "val"):
        (tmp_path / "wolves" / split / "cat").rename(tmp_path / "wolves" / split / "wolf")
    spec = f"configs/vit_folder.py:data_dir={pets},variant=ViT-mu/16,res=32,batch_size=8"
    assert command(spec, tmp_path / "run", f"evals.val.data.data_dir={tmp_path / 'wolves'}") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert "has other classes than the training data: cat, wolf" in line
    assert not (tmp_path / "run").exists()
