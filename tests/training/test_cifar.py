"""The CIFAR config: its arguments, and whole runs on small data sets in CIFAR's format."""

import image_datasets
import jax
import pytest
from PIL import Image
from trained_workdirs import load_params
from training_runs import interrupted_before, same

from dcvit import train
from dcvit.cli import run
from dcvit.config import load as configs
from dcvit.runs import metrics

CIFAR = "configs/vit_cifar.py"
CLASSES = {"cifar10": 10, "cifar100": 100}


def flat(config):
    """Return the values by their whole keys."""
    leaves = jax.tree_util.tree_leaves_with_path(config.to_dict(), is_leaf=lambda x: x is None)
    return {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in leaves}


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ("attention=mha", {"model.compose"}),
        ("epochs=100", {"total_epochs"}),
        ("dataset=cifar100", {"num_classes", "input.pp", "input.data.name", "evals.test.pp", "evals.test.data.name"}),
    ],
)
def test_argument_changes_its_keys_and_nothing_else(arguments, changed):
    usual, other = (flat(configs.load(spec)) for spec in (CIFAR, f"{CIFAR}:{arguments}"))
    assert {key for key in usual if usual[key] != other[key]} == changed
    assert usual.keys() == other.keys()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Both data sets with 70 training and 20 test images; return their folder."""
    tfds = pytest.importorskip("tensorflow_datasets")
    root = tmp_path_factory.mktemp("data")
    for name, classes in CLASSES.items():
        features = {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(num_classes=classes),
        }

        def examples(split, n, classes=classes):
            images = (Image.fromarray(image_datasets.image_array(i, 32, 32)) for i in range(n))
            return [
                {"id": f"{split}_{i}", "image": image_datasets.encoded(image, "PNG"), "label": i % classes}
                for i, image in enumerate(images)
            ]

        splits = {"train": examples("train", 70), "test": examples("test", 20)}
        image_datasets.make_tfds(root, name, splits, features=features, version="3.0.2")
    return root


@pytest.fixture
def trained(tmp_path, monkeypatch, data_dir, library_promotion):
    """Return a function that trains the config in small: (exit status, workdir)."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))

    def train_it(name, arguments):
        spec = f"{CIFAR}:runlocal=true,{arguments}"
        argv = ["--config", spec, "--workdir", str(tmp_path / name), "--config.tensorboard=false"]
        return run(train.main, argv), tmp_path / name

    return train_it


@pytest.mark.slow
def test_config_trains_and_resumes_to_the_same_bits(trained, monkeypatch):
    status, complete = trained("complete", "dataset=cifar100")
    assert status == 0
    rows = metrics.read(complete / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8, 10, 12]
    assert rows[-1]["test/n"] == 20
    with interrupted_before(monkeypatch, 8):
        assert trained("stopped", "dataset=cifar100")[0] == 130
    status, stopped = trained("stopped", "dataset=cifar100")
    assert status == 0
    assert (stopped / "metrics.jsonl").read_bytes() == (complete / "metrics.jsonl").read_bytes()
    assert same(load_params(stopped), load_params(complete))
