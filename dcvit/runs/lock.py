"""Lock of a workdir: at most one run at a time writes to it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from time import sleep

import filelock

from dcvit.errors import ConfigError, first_line
from dcvit.parallel import multihost
from dcvit.runs.files import Folder, file_identity
from input_pipeline import stores

LOCK = ".lock"
RENEWAL = ".lock-renewal"  # in a store: an object that the owner of the lock rewrites regularly
RENEW_SECONDS = 10
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")  # S3's answers to a conditional write
LOCK_SECONDS = 0.2  # how long a run tries: `is_locked` in another process holds the lock for an instant

logger = logging.getLogger(__name__)


class WorkdirLock:
    """Context manager that holds the lock of a workdir until it exits or its process ends.

    The file `.lock` names the process that holds the lock. A killed process loses its lock at once on a disk. In an
    object store, it loses it at once to a run on the same machine, and after `2 * RENEW_SECONDS` to others.
    """

    def __init__(self, workdir: Folder):
        """Acquire the lock.

        Raises:
          ConfigError: another process, which the message names, holds the lock, or the workdir cannot be written.
        """
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"
        self.path = workdir / LOCK
        self.lock: filelock.BaseFileLock | _ObjectLock
        if isinstance(self.path, Path) and isinstance(workdir, Path):
            self.lock = _lock_file(workdir, owner)
            self.identity = file_identity(self.path)
        else:
            self.lock = _ObjectLock(str(workdir), f"{owner}, {uuid.uuid4()}", RENEW_SECONDS)

    def check(self) -> None:
        """Raise ConfigError if the file `.lock` was removed or replaced, so that another run could lock the workdir.

        An object store needs no check: the run ends as soon as it cannot renew its lock.
        """
        if isinstance(self.path, Path) and file_identity(self.path) != self.identity:
            raise ConfigError(f"{self.path} was removed or replaced during the run: another run may use the workdir")

    def __enter__(self) -> WorkdirLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def is_locked(workdir: Folder) -> bool:
    """Return True if a run holds the lock of a workdir. In an object store, this is a lock that was renewed lately."""
    path = workdir / LOCK
    if isinstance(path, Path):
        try:
            number = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(number)  # also unlocks it
        return False
    with contextlib.suppress(Exception):  # there is no lock, or another error of a library for stores
        age = datetime.datetime.now(datetime.UTC) - stores.filesystem(str(path)).modified(str(workdir / RENEWAL))
        return age.total_seconds() < 3 * RENEW_SECONDS
    return False


def _lock_file(workdir: Path, owner: str) -> filelock.BaseFileLock:
    """Lock the file `.lock` with flock(2), which the system releases when the process ends, and return the lock."""
    path = workdir / LOCK
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link, which a run does not write to; remove it")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as e:
        raise ConfigError(f"cannot write to workdir {workdir}: {e.strerror or e}") from None
    # A soft lock, filelock's replacement where flock is not implemented, outlives a killed process.
    lock = filelock.FileLock(path, timeout=LOCK_SECONDS, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=LOCK_SECONDS / 10)
    except filelock.Timeout:
        raise ConfigError(_in_use(str(workdir), path.read_text())) from None
    except OSError as e:
        raise ConfigError(f"workdir {workdir} cannot be locked: {e.strerror or e}") from None
    with contextlib.suppress(OSError):  # on a full disk the file stays empty and the lock holds all the same
        path.write_text(f"{owner}\n")
    return lock


class _ObjectLock:
    """Lock in an object store: the object `.lock`, which is only ever created where it does not exist.

    The store checks this condition itself, so of several runs that start together one gets the lock. A store does not
    notice that an owner was killed. The owner therefore rewrites `.lock-renewal` regularly, and keeps a local file
    locked. A run that finds this file unlocked, or both objects unchanged for two intervals, makes this version of
    `.lock`, and no later one, free for a new competition.
    """

    def __init__(self, workdir: str, owner: str, renew_seconds: float):
        self.workdir, self.owner, self.renew_seconds = workdir, owner, renew_seconds
        self.path, self.renewal = f"{workdir}/{LOCK}", f"{workdir}/{RENEWAL}"
        self.object = (_S3Object if workdir.startswith("s3://") else _GCSObject)(self.path, f"{owner}\n".encode())
        self.store = self.object.store
        self.sign = SignOfLife(owner)
        if multihost.is_single_process():  # others of several may still write to the workdir
            self.sign.hold()
        try:
            self.version = self._acquire()
        except Exception as e:  # libraries for stores also raise exceptions of aiohttp and google-auth
            self.sign.remove()
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"cannot write to workdir {workdir}: {first_line(e)}") from None
        self.count, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self._renew, name="lock", daemon=True)
        self.thread.start()

    def release(self) -> None:
        self.ended.set()
        self.thread.join()
        with contextlib.suppress(Exception):  # the next run then finds a lock that is not renewed
            self.store.rm_file(self.renewal)
        with contextlib.suppress(Exception):
            self.object.remove(self.version)
        self.sign.remove()

    def _acquire(self) -> str:
        """Create the lock and return its version. Raise ConfigError while another run renews it."""
        for attempt in range(2):
            self.object.create()
            version, owner = self._read()
            if owner == self.owner:  # also where the store's first answer was lost and the request was sent again
                self.object.check()
                return version
            if attempt:
                break
            if version and (SignOfLife(owner).has_ended() or self._is_stale(owner)):
                self.object.take(version)
        raise ConfigError(_in_use(self.workdir, owner))

    def _is_stale(self, owner: str) -> bool:
        """Return True if the lock of `owner` is not renewed within two intervals; wait for this time."""
        seconds = 2 * self.renew_seconds
        logger.warning("%s is locked by %s: waiting %g s for a renewal of this lock", self.path, owner, seconds)
        before = self._read_renewal()
        sleep(seconds)
        return self._read_renewal() == before

    def _read(self) -> tuple[str, str]:
        """Return the current version and owner of the lock; both are empty if there is no lock."""
        try:
            version, content = self.object.read()
        except FileNotFoundError:
            return "", ""
        return version, content.decode().strip()

    def _read_renewal(self) -> bytes | None:
        try:
            return self.store.cat_file(self.renewal)
        except FileNotFoundError:
            return None

    def _renew(self) -> None:
        """Rewrite the renewal object at regular times; end the process if another run deleted or took the lock."""
        while not self.ended.wait(self.renew_seconds):
            with contextlib.suppress(Exception):  # the store may be unavailable for some time
                version, owner = self._read()
                if version != self.version:
                    taken = f"taken over by {owner}" if version else "deleted"
                    message = f"the lock {self.path} of this run was {taken}"
                    print(f"error: {message}", file=sys.stderr, flush=True)
                    multihost.fail(message, 2)
                self.count += 1
                self.store.pipe_file(self.renewal, f"{self.owner}\n{self.count}\n".encode())


class SignOfLife:
    """A local file that the owner of an object store's lock keeps locked until its process ends.

    The name of the file depends on the machine and its last start: folders for temporary files may be shared, and their
    locks may count on one machine only. Where the file cannot be locked there is none; other runs wait for a renewal.
    """

    def __init__(self, owner: str):
        self.path: Path | None = None
        self.number = -1
        with contextlib.suppress(OSError):  # no folder for temporary files
            start = Path("/proc/sys/kernel/random/boot_id").read_text()
            name = hashlib.sha256(f"{start}{owner}".encode()).hexdigest()[:32]
            self.path = Path(tempfile.gettempdir(), f"dcvit-{name}.lock")

    def hold(self) -> None:
        """Create the file and lock it."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # an unlocked file would say that the owner has ended
                self.remove()

    def remove(self) -> None:
        """Remove the file, if this object holds it."""
        if self.path and self.number >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self.number)
            self.number = -1

    def has_ended(self) -> bool:
        """Return True if the owner was a process of this machine and has ended, and remove its file."""
        if self.path is None:
            return False
        try:
            number = os.open(self.path, os.O_RDWR)  # does not exist on another machine or in another container
        except OSError:
            return False
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file_identity(number) != file_identity(self.path):  # removed meanwhile
                return False
            self.path.unlink()
            return True
        except OSError:
            return False
        finally:
            os.close(number)


class _GCSObject:
    """The lock object in Google Cloud Storage, whose generations are its versions."""

    def __init__(self, path: str, content: bytes):
        self.path, self.content = path, content
        self.store = stores.filesystem(path, version_aware=True)

    def create(self) -> None:
        """Write the object if it does not exist."""
        with contextlib.suppress(FileExistsError):
            self.store.pipe_file(self.path, self.content, mode="create")  # ifGenerationMatch=0

    def read(self) -> tuple[str, bytes]:
        """Return version and content of the object, or raise FileNotFoundError."""
        version = str(self.store.info(self.path)["generation"])
        return version, self.store.cat_file(f"{self.path}#{version}")

    def check(self) -> None:
        """Do nothing: the service has conditional writes."""

    def take(self, version: str) -> None:
        """Delete a version of the object, so that it can be created, unless it was changed."""
        with contextlib.suppress(FileNotFoundError):  # released, or deleted by another run that waited
            self.remove(version)

    def remove(self, version: str) -> None:
        """Delete a version of the object."""
        self.store.rm_file(f"{self.path}#{version}")


class _S3Object:
    """The lock object at s3://, whose ETags are its versions, because the owner's name is part of the content."""

    def __init__(self, path: str, content: bytes):
        self.path, self.content = path, content
        self.store = stores.filesystem(path)

    def create(self) -> None:
        """Write the object if it does not exist."""
        self._put(IfNoneMatch="*")

    def read(self) -> tuple[str, bytes]:
        """Return version and content of the object, or raise FileNotFoundError."""
        version = str(self.store.info(self.path)["ETag"])  # first: an old version of a new owner's object harms nobody
        return version, self.store.cat_file(self.path)

    def check(self) -> None:
        """Raise ConfigError if the store ignores the conditions, by writes that change nothing."""
        if self._put(IfNoneMatch="*") or self._put(IfMatch='"0"'):
            self.store.rm_file(self.path)
            raise ConfigError(f"{self.path}: the store has no conditional writes, by which a run locks its workdir")

    def take(self, version: str) -> None:
        """Replace a version of the object, unless it was changed."""
        self._put(IfMatch=version)

    def remove(self, version: str) -> None:
        """Delete the object if it has this version, which nobody replaces while it is renewed."""
        if self.read()[0] == version:
            self.store.rm_file(self.path)

    def _put(self, **condition: str) -> bool:
        """Write the object if a condition holds; return False if it does not, or if another write was faster."""
        bucket, key, _ = self.store.split_path(self.path)
        try:
            self.store.call_s3("put_object", Bucket=bucket, Key=key, Body=self.content, **condition)
        except OSError as e:
            code = getattr(e.__cause__, "response", {}).get("Error", {}).get("Code")
            if code not in REFUSED:
                raise
            return False
        return True


def _in_use(workdir: str, owner: str) -> str:
    return f"workdir {workdir} is in use by {owner.strip() or 'another run'}"
