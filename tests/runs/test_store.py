"""Workdirs in an object store: a run at gs:// or s3:// equals one on a disk, also after kills. The stores are fakes."""

import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import chaos
import pytest
from trained_workdirs import TINY

from dcvit import cli, train
from dcvit.runs import files
from input_pipeline import stores

COMMAND = """
import sys, time
stall = int(sys.argv.pop(1))
from dcvit import __main__
from dcvit.training import loop
prefetch = loop.prefetch
def stalling(*args):
    for number, batch in enumerate(prefetch(*args), start=1):
        if number == stall:
            print("stalled", flush=True)
            time.sleep(600)
        yield batch
loop.prefetch = stalling
sys.exit(__main__.main())
"""


@pytest.fixture
def environment(object_store):
    """The environment of commands, which use the store."""
    return {**os.environ, "JAX_PLATFORMS": "cpu"}


def start(environment, *words, stall=0):
    """Start a command that uses the store; training may stall at a batch."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", COMMAND, str(stall), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def training(workdir, **overrides):
    options = {**TINY, "log_steps": 1, **overrides}
    words = [f"--config.{k}={v}" for k, v in options.items()]
    return "train", "--config", "vit_digits", "--workdir", str(workdir), *words


def finish(process, status=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, out + err
    assert "Traceback" not in err
    return out, err


def wait_for(process, text):
    if any(text in line for line in process.stdout):
        return
    process.wait()
    pytest.fail(process.stderr.read())


def damage(store, folder):
    """Change a bit of the largest object in a folder, and return its name in the folder."""
    name = max(store.names(folder), key=lambda name: len(store.read(f"{folder}/{name}")))
    content = bytearray(store.read(f"{folder}/{name}"))
    content[len(content) // 2] ^= 1
    store.write(f"{folder}/{name}", bytes(content))
    return name


@pytest.mark.weekly
def test_run_in_a_store_survives_kills_and_equals_one_on_a_disk_bitwise(tmp_path, object_store, environment):
    finish(start(environment, *training(tmp_path / "disk")))
    workdir = f"{object_store.bucket}/some/run"
    process = start(environment, *training(workdir), stall=5)
    wait_for(process, "stalled")
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 75)
    assert "step 4 is saved" in err
    process = start(environment, *training(workdir, ckpt_keep=9), stall=2)
    wait_for(process, "stalled")
    process.kill()
    process.communicate()
    finish(start(environment, *training(workdir)))
    copy(object_store, workdir, tmp_path / "copy")
    assert chaos.differences(tmp_path / "copy", tmp_path / "disk", 6) == []
    rows = [
        json.loads(finish(start(environment, "evaluate", "--workdir", str(place), "--format", "json"))[0])
        for place in (workdir, tmp_path / "disk")
    ]
    assert rows[0][0]["loss"] == rows[1][0]["loss"]
    damaged = damage(object_store, f"{workdir}/checkpoints/6/params")
    _, err = finish(start(environment, *training(workdir)), 2)
    assert f"checkpoint {workdir}/checkpoints/6 is damaged" in err
    assert damaged in err
    assert f"{workdir}/checkpoints/3 is intact: remove those after it" in err


def copy(store, url, folder):
    """Copy the objects under a URL to a folder."""
    for name in store.names(url):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(store.read(f"{url}/{name}"))


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["read only", "no answer"])
def test_unusable_store_is_one_line_before_anything_compiles(
    object_store, library_promotion, monkeypatch, capfd, problem
):
    workdir, message = f"{object_store.bucket}/run", "cannot read {}"
    monkeypatch.setattr(stores, "PROBE_SECONDS", 5 if problem == "read only" else 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if problem == "read only":
            if object_store.server is None:
                pytest.skip("moto does not refuse requests")
            object_store.server.read_only = True
            message = "cannot write {}"
        else:
            object_store.use(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert cli.run(train.main, training(workdir)[1:]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ")
    assert message.format(workdir) in err
    assert len(err.splitlines()) == 1
    assert "compil" not in out


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("s3", "s3")])
def test_missing_library_is_named(monkeypatch, scheme, extra):
    monkeypatch.setitem(sys.modules, stores.LIBRARIES[scheme], None)
    with pytest.raises(ValueError, match=rf"{scheme}://bucket/run: .*pip install \"dcvit\[{extra}\]\""):
        files.folder(f"{scheme}://bucket/run")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("az://container/run", "Azure is not supported, because TensorStore, which writes checkpoints, has no driver"),
        ("ftp://host/run", "expected a folder, or a URL that begins with gs:// or s3://"),
    ],
)
def test_other_stores_are_refused(url, message):
    with pytest.raises(ValueError, match=f"{url}: {message}"):
        files.folder(url)


@pytest.mark.parametrize(
    ("endpoint", "region", "expected"),
    [
        ("https://s3.eu-west-1.amazonaws.com", "eu-west-1", {}),  # TensorStore finds the region of the bucket
        ("http://localhost:9000", None, {"endpoint": "http://localhost:9000", "aws_region": "us-east-1"}),
    ],
)
def test_checkpoints_are_written_to_the_endpoint_of_s3fs(monkeypatch, endpoint, region, expected):
    meta = SimpleNamespace(endpoint_url=endpoint, region_name=region)
    monkeypatch.setattr(stores, "filesystem", lambda _: SimpleNamespace(s3=SimpleNamespace(meta=meta)))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert files.kvstore("s3://bucket/some/run") == {
        "driver": "s3",
        "bucket": "bucket",
        "path": "some/run/",
        **expected,
    }
