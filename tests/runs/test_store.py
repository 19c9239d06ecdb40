"""Workdirs in an object store: a run at gs:// or s3:// equals one on a disk, also after kills. The stores are fakes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chaos
import pytest
import tensorstore as ts
from trained_workdirs import TINY

from dcvit import cli, train
from dcvit.runs import files, steps
from input_pipeline import stores

COMMAND = """
import sys, time
stall = int(sys.argv.pop(1))
from dcvit import __main__
from dcvit.runs import lock
from dcvit.training import trainer
lock.RENEW_SECONDS = 1
prefetch = trainer.prefetch
def stalling(*args):
    for number, batch in enumerate(prefetch(*args), start=1):
        if number == stall:
            print("stalled", flush=True)
            time.sleep(600)
        yield batch
trainer.prefetch = stalling
sys.exit(__main__.main())
"""
CHECKPOINTS = """
import sys
import jax.numpy as jnp
from dcvit.runs import files, steps
from dcvit.runs.checkpointer import Checkpointer
from dcvit.runs.restoring import latest, open_params
from dcvit.runs.steps import about, saved_steps
workdir = files.folder(sys.argv[1])
checkpointer = Checkpointer(workdir, keep=2)
for step in (1, 2, 3):
    checkpointer.save(step, {"params": {"w": jnp.full(9, step)}}, {"row": {"loss": step}})
checkpointer.wait()
def load():
    return open_params(workdir)["w"].read().result().tolist()
loaded = load()
print(saved_steps(workdir), latest(workdir), about(workdir / "checkpoints" / "3"), loaded, flush=True)
sys.stdin.readline()
checkpointer = Checkpointer(workdir, keep=2)
print(saved_steps(workdir), latest(workdir, "previous"), saved_steps(workdir), flush=True)
checkpointer.save(3, {"params": {"w": jnp.full(9, 4)}}, {})
checkpointer.close()
print(saved_steps(workdir), latest(workdir), load(), flush=True)
"""


@pytest.fixture
def served(store_fake):
    """The environment in which commands use the fake store, and its objects."""
    with store_fake.serve() as (url, store):
        yield {**os.environ, **store_fake.environment(url), "JAX_PLATFORMS": "cpu"}, store


def start(environment, *words, stall=0):
    """Start a command that uses the fake store and renews its lock every second; training may stall at a batch."""
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


@pytest.mark.weekly
def test_checkpoints_in_a_store_are_complete_when_committed_and_set_aside_when_damaged(store_fake, served):
    environment, store = served
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", CHECKPOINTS, f"{store_fake.bucket}/run"], text=True, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    saved = process.stdout.readline()
    assert saved == f"[2, 3] 3 {{'step': 3, 'row': {{'loss': 3}}}} {[3] * 9}\n", process.communicate()
    folder = f"{store_fake.bucket}/run/checkpoints"
    for name in store.names(f"{folder}/2"):  # a checkpoint that a killed run left incomplete
        if name != steps.COMMITTED:
            store.objects[f"{folder}/4/{name}"] = store.objects[f"{folder}/2/{name}"]
    damaged = max(store.names(f"{folder}/3/params"), key=lambda name: len(store.objects[f"{folder}/3/params/{name}"]))
    store.objects[f"{folder}/3/params/{damaged}"] += b"x"
    out, err = process.communicate("\n", timeout=300)
    assert out == f"[2, 3] 2 [2]\n[2, 3] 3 {[4] * 9}\n", err
    assert f"checkpoint {folder}/3 is damaged: params/{damaged} differs from what was saved; set aside" in err
    assert not store.names(f"{folder}/4")


@pytest.mark.weekly
def test_run_in_a_store_survives_kills_and_equals_one_on_a_disk_bitwise(tmp_path, store_fake, served):
    disk, (environment, store) = tmp_path / "run", served
    finish(start(environment, *training(disk)))
    workdir = f"{store_fake.bucket}/some/run"
    process = start(environment, *training(workdir), stall=5)
    wait_for(process, "stalled")
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 75)
    assert "step 4 is saved" in err
    process = start(environment, *training(workdir, ckpt_keep=9), stall=2)
    wait_for(process, "stalled")
    process.kill()
    process.communicate()
    elsewhere = {**environment, "TMPDIR": str(tmp_path)}  # as on another machine
    _, err = finish(start(elsewhere, *training(workdir)))
    assert "waiting 2 s for a renewal of this lock" in err
    for name in ("config.json", "data.json"):
        assert json.loads(store.objects[f"{workdir}/{name}"]) == json.loads((disk / name).read_text())
    assert store.objects[f"{workdir}/metrics.jsonl"] == (disk / "metrics.jsonl").read_bytes()
    assert f"{workdir}/.lock" not in store.objects
    out, _ = finish(start(environment, "evaluate", "--workdir", workdir, "--format", "json"))
    there, _ = finish(start(environment, "evaluate", "--workdir", str(disk), "--format", "json"))
    speeds = "images_per_second"
    assert [{**row, speeds: 0} for row in json.loads(out)] == [{**row, speeds: 0} for row in json.loads(there)]
    damaged = max((n for n in store.objects if "/checkpoints/6/params/" in n), key=lambda n: len(store.objects[n]))
    content = bytearray(store.objects[damaged])
    content[len(content) // 2] ^= 1
    store.objects[damaged] = bytes(content)
    for command in (training(workdir), ("evaluate", "--workdir", workdir)):
        _, err = finish(start(environment, *command), 2)
        assert f"checkpoint {workdir}/checkpoints/6 is damaged" in err
        assert Path(damaged).name in err
    _, err = finish(start(environment, *training(workdir, on_corrupt="previous")))
    assert "is damaged" in err
    assert store.objects[f"{workdir}/metrics.jsonl"] == (disk / "metrics.jsonl").read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("store_fake", ["s3"], indirect=True)  # TensorStore reads the address of a fake gs:// once
def test_run_that_resumes_in_a_store_equals_one_on_a_disk_bitwise(store_fake, store_here, tmp_path, library_promotion):
    store, _ = store_here
    workdir = f"{store_fake.bucket}/run"
    options = {**TINY, "log_steps": 1}

    def stop(step, _):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train("vit_digits", workdir, on_row=stop, **options)
    assert train.train("vit_digits", workdir, **options).checkpoints == [3, 6]
    train.train("vit_digits", tmp_path / "disk", **options)
    for name in store.names(workdir):
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(store.objects[f"{workdir}/{name}"])
    assert chaos.differences(tmp_path / "copy", tmp_path / "disk", 6) == []


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["read only", "wrong credentials", "no bucket", "no server", "no answer"])
def test_unusable_store_is_one_line_before_anything_compiles(
    store_fake, store_here, library_promotion, monkeypatch, capfd, problem
):
    store, use = store_here
    workdir, message = f"{store_fake.bucket}/run", "cannot read {}: "
    monkeypatch.setattr(stores, "PROBE_SECONDS", 5 if problem == "read only" else 1)
    silent = socket.create_server(("127.0.0.1", 0))
    if problem == "read only":
        store.refuse = lambda method, _: 403 if method in ("PUT", "POST") else None
        message = "cannot write to workdir {}: "
    elif problem == "wrong credentials":
        store.refuse = lambda *_: 401
    elif problem == "no bucket":
        workdir = workdir.replace("bucket", "other")
    elif problem == "no server":
        use("http://127.0.0.1:9")
    else:
        use(f"http://127.0.0.1:{silent.getsockname()[1]}")
        message = "cannot read {}: no answer within 1 s"
    assert cli.run(train.main, training(workdir)[1:]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ")
    assert message.format(workdir) in err
    assert len(err.splitlines()) == 1
    assert "compil" not in out
    assert not store.objects
    silent.close()


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
        ("s3:///run", "expected the name of a bucket after s3://"),
        ("ftp://host/run", "expected a folder, or a URL that begins with gs:// or s3://"),
    ],
)
def test_other_stores_are_refused(url, message):
    with pytest.raises(ValueError, match=f"{url}: {message}"):
        files.folder(url)


@pytest.mark.parametrize(
    ("endpoint", "region", "expected"),
    [
        ("https://s3.amazonaws.com", "aws-global", {}),  # TensorStore finds the region of the bucket
        ("https://s3.eu-west-1.amazonaws.com", "eu-west-1", {}),
        ("https://s3.cn-north-1.amazonaws.com.cn", "cn-north-1", {"aws_region": "cn-north-1"}),
        ("https://vpce-1.s3.us-west-2.vpce.amazonaws.com", "us-west-2", {"aws_region": "us-west-2"}),
        ("http://localhost:9000", None, {"aws_region": "us-east-1"}),
    ],
)
def test_checkpoints_are_written_to_the_endpoint_of_s3fs(monkeypatch, endpoint, region, expected):
    meta = SimpleNamespace(endpoint_url=endpoint, region_name=region)
    monkeypatch.setattr(stores, "filesystem", lambda _: SimpleNamespace(s3=SimpleNamespace(meta=meta)))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    spec = files.kvstore("s3://bucket/some/run")
    expected |= {"endpoint": endpoint} if expected else {}
    assert spec == {"driver": "s3", "bucket": "bucket", "path": "some/run/", **expected}
    assert ts.KvStore.Spec(spec).to_json()["bucket"] == "bucket"
