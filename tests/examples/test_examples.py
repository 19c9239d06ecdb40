"""The examples run, and their output has the stated properties."""

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest
from markdown_pages import ROOT

import dcvit
from dcvit.inference.texts import TextOptions


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["linen_block", "nnx_block"])
def test_a_block_trains(name):
    losses = load(name).main(steps=20)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_plain_jax_has_a_gradient_for_every_parameter():
    out, gradient = load("plain_jax").main()
    assert out.shape == (2, 16, 32)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


@contextlib.contextmanager
def server(folder, **variables):
    """Run examples/serve.py on a free port; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "serve:app", "--app-dir", ROOT / "examples", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while "Uvicorn running" not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.interop
def test_the_server_sends_the_classes_and_text_of_its_models(digits_workdir, lm_workdir, library_promotion, tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("python_multipart")
    image = (ROOT / "tests/data/seven.png").read_bytes()
    with server(tmp_path, IMAGES=str(digits_workdir), TEXT=str(lm_workdir)) as address:

        def ask(path, body=None, kind="application/x-www-form-urlencoded"):
            request = urllib.request.Request(f"{address}/{path}", body, {"Content-Type": kind})
            return urllib.request.urlopen(request, timeout=120)

        classes = json.load(ask("predict?topk=3", image))
        (expected,) = dcvit.load(digits_workdir).predict(ROOT / "tests/data/seven.png", 3)
        assert classes == {one.label: pytest.approx(one.probability, abs=1e-5) for one in expected}
        form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n%s\r\n--x--\r\n'
        assert json.load(ask("predict?topk=3", form % image, "multipart/form-data; boundary=x")) == classes
        with ask("generate?prompt=&tokens=3") as answer:
            assert (answer.status, type(answer.read())) == (200, bytes)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # requests at the same time have the same answers
            texts = list(pool.map(lambda _: ask("generate?prompt=def%20&tokens=8&seed=1").read().decode(), range(4)))
        model = dcvit.load(lm_workdir)
        assert set(texts) == {model.continue_texts(["def "], TextOptions(8, seed=1)).texts[0].text}
        for path, body, why in (
            ("predict", b"no image", "not an image"),
            ("generate?prompt=a&tokens=100000", None, "exceed the model's context"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(path, body)
            assert refused.value.code == 422
            assert why in refused.value.read().decode()
