"""Workdirs in a store: a run at gs://… is the run on a disk, through kills too. The store is a fake one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY
from fake_gcs import environment, serve

from dcvit import cli
from dcvit.checkpoint import files

pytest.importorskip("gcsfs", reason="gs:// needs the gcs extra")


def start(url, *words):
    code = "import sys; from dcvit import __main__; from dcvit.runs import lock; lock.RENEW_SECONDS = 1; sys.exit(__main__.main())"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment(url), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def training(workdir, **overrides):
    options = {**TINY, "log_steps": 1, **overrides}
    words = [f"--config.{k}={v}" for k, v in options.items()]
    return "train", "--config", "vit_digits", "--workdir", str(workdir), *words


def finish(process, status=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, out + err
    assert "Traceback" not in err
    return out, err


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(process.stderr.read())


@pytest.mark.slow
def test_a_run_in_a_store_survives_kills_and_is_bitwise_that_on_a_disk(tmp_path):
    disk = tmp_path / "run"
    with serve() as (url, store):
        finish(start(url, *training(disk)))
        workdir = "gs://bucket/some/run"
        process = start(url, *training(workdir))
        wait_for(process, "step 4/6")
        process.send_signal(signal.SIGTERM)
        _, err = finish(process, 75)
        assert "is saved" in err
        process = start(url, *training(workdir, ckpt_keep=9))
        wait_for(process, "compiling")
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
def test_a_living_run_in_a_store_keeps_others_away_and_an_unsealed_checkpoint_is_none(tmp_path):
    with serve() as (url, store):
        workdir = "gs://bucket/run"
        store_folder = f"{workdir}/checkpoints/3"
        first = start(url, *training(workdir, total_steps=10**6, ckpt_steps=10**6, **{"evals.test.log_steps": 10**6}))
        wait_for(first, "step 2/")
        _, err = finish(start(url, *training(workdir, total_steps=10**6)), 2)
        assert "error: workdir gs://bucket/run is in use by process" in err
        first.kill()
        first.communicate()
        finish(start(url, *training("gs://bucket/other")))
        for name in [n for n in store.objects if n.startswith("gs://bucket/other/checkpoints/3/")]:
            if not name.endswith("/checkpoints/3/commit_success.txt"):
                store.objects[name.replace("/other/", "/third/")] = store.objects[name]
        _, err = finish(start(url, "evaluate", "--workdir", "gs://bucket/third"), 2)
        assert "config.json" in err
        out, _ = finish(start(url, *training("gs://bucket/third")))
        assert "going on" not in out
        assert not [n for n in store.objects if n.startswith(store_folder)]


@pytest.mark.parametrize("url", ["s3://bucket/run", "zzz://a", "file:///tmp/x", "http://host/x"])
def test_other_stores_are_refused(capsys, url):
    from dcvit import train

    assert cli.run(train.main, ["--config", "vit_digits", "--workdir", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"dcvit\[gcs\]\""):
        files.folder("gs://bucket/run")
