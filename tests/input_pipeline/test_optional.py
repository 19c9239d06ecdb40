"""Missing libraries are named; TensorFlow's start-up messages are removed from stderr, and nothing else is."""

import concurrent.futures
import contextlib
import os
import sys
import time
import types
from unittest import mock

import image_datasets
import numpy as np
import pytest
from PIL import Image
from sources import ListSource

import input_pipeline as ip
from input_pipeline import huggingface, optional
from input_pipeline.images import digits, kernels, stored
from input_pipeline.optional import START_UP_MESSAGE, remove_lines


def train(pp, image):
    next(ip.train_batches(ListSource([{"image": image}] * 4), pp, 2, seed=0))


def open_text(folder, **options):
    (folder / "a.jsonl.zst").touch()
    (folder / "tokenizer.json").touch()
    ip.open_source("text", path=str(folder), context=4, **options)


def read_tiff(_):
    train("decode(2, dtype='uint16')", image_datasets.encoded(Image.new("L", (4, 4)), "TIFF"))


USES = {
    "tensorflow": ("data", lambda _: train("decode_jpeg_and_inception_crop", image_datasets.jpeg(0))),
    "simplejpeg": ("train", lambda _: train("decode", image_datasets.jpeg(0))),
    "tensorflow_datasets": ("data", lambda _: ip.open_source("tfds", name="imagenet2012", split="train")),
    "numba": ("train", lambda _: train("resize(3)", np.zeros((4, 4, 3), np.uint8))),
    "tifffile": ("tiff", read_tiff),
    "imagecodecs": ("tiff", read_tiff),
    "tokenizers": ("lm", lambda folder: open_text(folder, tokenizer=str(folder))),
    "zstandard": ("lm", open_text),
    "huggingface_hub": ("hub", lambda _: huggingface.pinned("hf:owner/name")),
    "sklearn": ("train", lambda _: ip.open_source("digits")),
}


@pytest.mark.parametrize("module", USES)
def test_a_missing_library_is_named_with_its_extra_and_without_an_example(monkeypatch, tmp_path, module):
    extra, use = USES[module]
    for cached in (optional._start_tensorflow, kernels._machine_code, stored._tifffile, digits.read_digits):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ip.MissingLibraryError, match=rf'^this needs {module}.* pip install "dcvit\[{extra}\]"$'):
        use(tmp_path)


NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795325675.727208    7350 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795325675.727587    7350 cudart_stub.cc:31] Could not find cuda drivers on your machine.
E0000 00:00:1795325685.311717    7350 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error
"""
ERRORS = """\
E0000 00:00:1795325685.311717    7350 file_system.cc:52] no space left on device
ImportError: libtensorflow_framework.so.2: cannot open shared object file
"""


@pytest.mark.parametrize("fails", [False, True])
def test_only_start_up_messages_are_removed_also_where_the_context_fails(capfd, fails):
    with contextlib.suppress(ImportError), remove_lines(START_UP_MESSAGE):
        os.write(2, (NOISE + ERRORS).encode())
        if fails:
            raise ImportError("broken")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == ERRORS + "after\n"


def test_tensorflow_starts_in_one_thread(monkeypatch):
    """Two threads that redirect standard error at the same time would leave it redirected."""
    optional._start_tensorflow.cache_clear()
    starts = []

    def slow_require(name):
        starts.append(name)
        time.sleep(0.1)
        module = types.ModuleType(name)
        module.config = mock.MagicMock()
        return module

    monkeypatch.setattr(optional, "require", slow_require)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: optional.tensorflow(), range(4)))
    optional._start_tensorflow.cache_clear()
    assert starts == ["tensorflow"]
