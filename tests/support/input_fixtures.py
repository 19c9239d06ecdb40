"""Fixtures of the input pipeline's tests: a prepared dataset and a trained tokenizer."""

import shutil

import corpora
import image_datasets
import pytest


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory):
    """imagenet2012 with 120 training examples as (folder of each file format, examples of each split)."""
    pytest.importorskip("tensorflow_datasets")
    roots = {file_format: tmp_path_factory.mktemp(file_format) for file_format in ("tfrecord", "array_record")}
    for file_format, root in roots.items():
        examples = image_datasets.imagenet2012(root, file_format, n_train=120, n_val=10)
    return roots, examples


@pytest.fixture(params=["tfrecord", "array_record"])
def imagenet_copy(imagenet, tmp_path, request):
    """A copy of the dataset in one file format, for tests that damage it."""
    return shutil.copytree(imagenet[0][request.param], tmp_path / "data")


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """A trained tokenizer.json whose tokens are in GPT-2's byte alphabet."""
    pytest.importorskip("tokenizers")
    return corpora.train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(params=["bytes", "trained"])
def tokenizer_path(request):
    """The tokenizer of a source: None for bytes, or the path of a tokenizer.json."""
    return None if request.param == "bytes" else request.getfixturevalue("tokenizer_json")
