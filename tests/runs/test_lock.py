"""The lock of a workdir on a disk and in an object store."""

import fcntl
import functools
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_gcs
import pytest
from etils import epath

from dcvit.errors import ConfigError
from dcvit.parallel import multihost
from dcvit.runs import lock
from dcvit.runs.lock import WorkdirLock

HOLD = """
import sys
from pathlib import Path
from dcvit.runs.lock import WorkdirLock
with WorkdirLock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_refused_by_name_until_the_first_is_killed(tmp_path):
    call = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"workdir {tmp_path} is in use by process {process.pid} on "):
            WorkdirLock(tmp_path)
        process.kill()
    assert (tmp_path / lock.LOCK).read_text().startswith(f"process {process.pid} on ")
    with WorkdirLock(tmp_path):
        assert (tmp_path / lock.LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_lock_excludes_other_programs_that_use_flock(tmp_path):
    with WorkdirLock(tmp_path), (tmp_path / lock.LOCK).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with WorkdirLock(tmp_path), pytest.raises(ConfigError, match="is in use by process"):
        WorkdirLock(tmp_path)


def test_folder_that_cannot_be_locked_is_one_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=f"workdir {tmp_path} cannot be locked: No locks available"):
        WorkdirLock(tmp_path)


def test_full_disk_does_not_prevent_the_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with WorkdirLock(tmp_path), pytest.raises(ConfigError, match=f"workdir {tmp_path} is in use by another run"):
        WorkdirLock(tmp_path)


@pytest.fixture(params=["gs", "s3"])
def store(request, monkeypatch):
    """A fake store, which fsspec in this process uses, with the address of a workdir and its lock."""
    scheme = request.param
    if scheme == "gs":
        core = pytest.importorskip("gcsfs.core", reason="gs:// needs the gcs extra")
        # Not gcsfs's default class, which queries the type of the bucket by gRPC with TLS.
        fake, make, options = fake_gcs, core.GCSFileSystem, {"token": "anon"}
    else:
        make = pytest.importorskip("s3fs", reason="s3:// needs the s3 extra").S3FileSystem
        fake, options = importlib.import_module("fake_s3"), {"key": "testing", "secret": "testing"}
    with fake.serve() as (url, objects):
        options |= {"endpoint_url": url, "use_listings_cache": False, "skip_instance_cache": True}
        monkeypatch.setattr("fsspec.filesystem", functools.cache(lambda _, **more: make(**options, **more)))
        objects.workdir = f"{scheme}://bucket/run"
        objects.lock_object = f"{objects.workdir}/{lock.LOCK}"
        yield objects


def object_lock(store, name, seconds=0.1):
    return lock._ObjectLock(store.workdir, name, seconds)


def wait_for_renewal(store):
    """Return once the owner of the lock has renewed it."""
    renewal = f"{store.workdir}/{lock.RENEWAL}"
    before, started = store.objects.get(renewal), time.monotonic()
    while store.objects.get(renewal) == before:
        assert time.monotonic() < started + 60, "the lock is not renewed"
        time.sleep(0.01)


def test_object_lock_is_renewed_and_released(store):
    held = object_lock(store, "first")
    assert store.objects[store.lock_object] == b"first\n"
    for _ in range(3):
        wait_for_renewal(store)
    assert lock.is_locked(epath.Path(store.workdir))
    held.release()
    assert not lock.is_locked(epath.Path(store.workdir))
    assert not store.objects


def test_object_lock_of_a_living_run_is_respected(store, monkeypatch, caplog):
    held = object_lock(store, "first")
    monkeypatch.setattr(lock, "sleep", lambda _: wait_for_renewal(store))
    with pytest.raises(ConfigError, match=f"workdir {store.workdir} is in use by first"):
        object_lock(store, "second", seconds=10)
    assert f"{store.lock_object} is locked by first: waiting 20 s for a renewal of this lock" in caplog.text
    held.release()


LIVE = """
import sys
from dcvit.runs import lock
sign = lock.SignOfLife(sys.argv[1])
sign.hold()
print("locked", flush=True)
sys.stdin.read()
"""


def test_object_lock_of_a_process_of_this_machine_is_free_once_it_was_killed(store, monkeypatch, tmp_path):
    renewal, waited = f"{store.workdir}/{lock.RENEWAL}", []
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(lock, "sleep", lambda _: (waited.append(True), store.put(renewal, {}, b"8")))
    store.objects[store.lock_object], store.objects[renewal] = b"first\n", b"7"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", LIVE, "first"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match="is in use by first"):
            object_lock(store, "second")
        process.kill()
    object_lock(store, "third").release()
    assert waited == [True]  # while the process lived
    assert not store.objects
    assert [path.name for path in tmp_path.iterdir()] == []


def test_sign_of_life_that_cannot_be_locked_or_created_is_none(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", fail)
        lock.SignOfLife("first").hold()
    assert list(tmp_path.iterdir()) == []
    assert not lock.SignOfLife("first").has_ended()
    monkeypatch.setattr(lock.tempfile, "gettempdir", fail)
    sign = lock.SignOfLife("first")
    sign.hold()
    sign.remove()
    assert not lock.SignOfLife("first").has_ended()


@pytest.mark.parametrize("stale", [False, True])
def test_exactly_one_of_several_runs_gets_an_object_lock(store, monkeypatch, caplog, stale):
    """All start together, at a free lock or at that of a killed run, which nobody renews."""
    caplog.set_level(logging.ERROR)
    start, waited = threading.Barrier(6), threading.Barrier(6)
    monkeypatch.setattr(lock, "sleep", lambda _: waited.wait() if stale else wait_for_renewal(store))
    if stale:
        store.objects[store.lock_object], store.objects[f"{store.workdir}/{lock.RENEWAL}"] = b"killed\n", b"killed\n7\n"

    def attempt(number):
        start.wait()
        try:
            return object_lock(store, f"run {number}")
        except ConfigError as e:
            return str(e)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, range(6)))
    (owner,) = [result for result in results if not isinstance(result, str)]
    assert store.objects[store.lock_object].decode() == f"{owner.owner}\n"
    assert [result for result in results if isinstance(result, str)] == [
        f"workdir {store.workdir} is in use by {owner.owner}"
    ] * 5
    owner.release()


@pytest.mark.slow
def test_creation_whose_answer_was_lost_is_recognized(store, monkeypatch):
    """A client repeats a request that the store has carried out; the store then answers that the object exists."""
    answers = []

    def lose_the_first_answer(command, path):
        if (command == "PUT" or "ifGenerationMatch=0" in path) and not answers:
            answers.append(503)
            store.put(store.lock_object, {}, b"first\n")
            return 503
        return None

    store.refuse = lose_the_first_answer
    object_lock(store, "first").release()
    assert answers == [503]
    assert not store.objects


@pytest.mark.parametrize("header", ["HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"])
def test_store_that_ignores_conditions_is_refused(store, monkeypatch, header):
    """Two runs could else lock one workdir."""
    if store.workdir.startswith("gs://"):
        pytest.skip("Google Cloud Storage has conditional writes")
    answer = store.app
    monkeypatch.setattr(store, "app", lambda environ, start: answer({**environ, header: ""}, start))
    with pytest.raises(ConfigError, match="the store has no conditional writes, by which a run locks its workdir"):
        object_lock(store, "first")
    assert not store.objects


@pytest.mark.parametrize("taken", [True, False], ids=["taken over", "deleted"])
def test_run_that_lost_its_object_lock_ends(store, monkeypatch, capsys, taken):
    """As after the network was away for so long that another run took the lock."""
    ended, status = threading.Event(), []

    def fail(message, number):
        status.append(number)
        ended.set()
        held.ended.set()

    monkeypatch.setattr(multihost, "fail", fail)
    held = object_lock(store, "first")
    if taken:
        store.put(store.lock_object, {}, b"second\n")
    else:
        del store.objects[store.lock_object]
    assert ended.wait(60)
    held.release()
    assert status == [2]
    assert (
        f"the lock {store.lock_object} of this run was {'taken over by second' if taken else 'deleted'}"
        in capsys.readouterr().err
    )
    assert store.objects.get(store.lock_object) == (b"second\n" if taken else None)
