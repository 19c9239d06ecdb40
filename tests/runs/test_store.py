"""Workdirs in an object store: a run at gs://… equals one on a disk, also after kills. The store is a fake."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gcs import environment, serve
from trained_workdirs import TINY

from dcvit.runs import files, steps

pytest.importorskip("gcsfs", reason="gs:// needs the gcs extra")


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
workdir = files.folder("gs://bucket/run")
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


def start(url, *words, stall=0):
    """Start a command that uses the fake store and renews its lock every second; training may stall at a batch."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", COMMAND, str(stall), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment(url), "JAX_PLATFORMS": "cpu"},
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
def test_checkpoints_in_a_store_are_complete_when_committed_and_set_aside_when_damaged():
    with serve() as (url, store):
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", CHECKPOINTS], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **environment(url), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        saved = process.stdout.readline()
        assert saved == f"[2, 3] 3 {{'step': 3, 'row': {{'loss': 3}}}} {[3] * 9}\n", process.communicate()
        folder = "gs://bucket/run/checkpoints"
        for name in store.names(f"{folder}/2"):  # a checkpoint that a killed run left incomplete
            if name != steps.COMMITTED:
                store.objects[f"{folder}/4/{name}"] = store.objects[f"{folder}/2/{name}"]
        damaged = max(
            store.names(f"{folder}/3/params"), key=lambda name: len(store.objects[f"{folder}/3/params/{name}"])
        )
        store.objects[f"{folder}/3/params/{damaged}"] += b"x"
        out, err = process.communicate("\n", timeout=300)
        assert out == f"[2, 3] 2 [2]\n[2, 3] 3 {[4] * 9}\n", err
        assert f"checkpoint {folder}/3 is damaged: params/{damaged} differs from what was saved; set aside" in err
        assert not store.names(f"{folder}/4")


@pytest.mark.weekly
def test_run_in_a_store_survives_kills_and_equals_one_on_a_disk_bitwise(tmp_path):
    disk = tmp_path / "run"
    with serve() as (url, store):
        finish(start(url, *training(disk)))
        workdir = "gs://bucket/some/run"
        process = start(url, *training(workdir), stall=5)
        wait_for(process, "stalled")
        process.send_signal(signal.SIGTERM)
        _, err = finish(process, 75)
        assert "step 4 is saved" in err
        process = start(url, *training(workdir, ckpt_keep=9), stall=2)
        wait_for(process, "stalled")
        process.kill()
        process.communicate()
        _, err = finish(start(url, *training(workdir)))
        assert "waiting 2 s for a renewal of this lock" in err
        for name in ("config.json", "data.json"):
            assert json.loads(store.objects[f"{workdir}/{name}"]) == json.loads((disk / name).read_text())
        assert store.objects[f"{workdir}/metrics.jsonl"] == (disk / "metrics.jsonl").read_bytes()
        assert f"{workdir}/.lock" not in store.objects
        out, _ = finish(start(url, "evaluate", "--workdir", workdir, "--format", "json"))
        there, _ = finish(start(url, "evaluate", "--workdir", str(disk), "--format", "json"))
        speeds = "images_per_second"
        assert [{**row, speeds: 0} for row in json.loads(out)] == [{**row, speeds: 0} for row in json.loads(there)]
        damaged = max((n for n in store.objects if "/checkpoints/6/params/" in n), key=lambda n: len(store.objects[n]))
        content = bytearray(store.objects[damaged])
        content[len(content) // 2] ^= 1
        store.objects[damaged] = bytes(content)
        for command in (training(workdir), ("evaluate", "--workdir", workdir)):
            _, err = finish(start(url, *command), 2)
            assert "checkpoint gs://bucket/some/run/checkpoints/6 is damaged" in err
            assert Path(damaged).name in err
        _, err = finish(start(url, *training(workdir, on_corrupt="previous")))
        assert "is damaged" in err
        assert store.objects[f"{workdir}/metrics.jsonl"] == (disk / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"dcvit\[gcs\]\""):
        files.folder("gs://bucket/run")
