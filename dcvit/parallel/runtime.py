"""Process-wide settings of JAX that every command makes before it uses a device."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
from jax.experimental.compilation_cache import compilation_cache

from dcvit.dcmha.plan import default_policy
from dcvit.errors import ConfigError, first_line
from dcvit.versions import on_cloud_tpu, replace_backend

CACHE_BYTES = 10**10  # limit of the compilation cache
CACHE_SECONDS = 0.1  # the shortest compilation that is kept; JAX's own value, 1 s, skips most programs of a CPU
TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_NAME")  # set on Cloud TPU VMs and in their containers


def configure() -> None:
    """Check the policy of kernels, keep compiled programs on disk, and do not load libtpu on a machine without TPU.

    Raises:
      ConfigError: the environment variable DCVIT_KERNELS is invalid.
    """
    try:
        default_policy()
    except ValueError as e:
        raise ConfigError(str(e)) from None
    keep_compiled()
    skip_absent_tpu()


def keep_compiled() -> None:
    """Keep compiled programs in JAX's persistent cache, up to `CACHE_BYTES`, unless JAX's settings name a folder.

    The folder is `~/.cache/dcvit` (or $XDG_CACHE_HOME/dcvit), with one subfolder for each kind of processor, because
    different machines can share a home folder.
    """
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - never raises
        info = Path("/proc/cpuinfo")
        flags = re.search(r"^flags.*$", info.read_text(), re.MULTILINE) if info.is_file() else None
        kind = hashlib.sha256((flags[0] if flags else platform.processor()).encode()).hexdigest()[:8]
        folder = str(base / "dcvit" / f"{platform.machine()}-{kind}")
        with contextlib.suppress(UnicodeEncodeError):  # JAX fails with a path that is not valid UTF-8
            folder.encode()
            jax.config.update("jax_compilation_cache_dir", folder)
            jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_SECONDS)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Context manager: JAX does not use its persistent cache, so that compilations take their whole time."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX remembers the setting
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def check_devices() -> None:
    """Raise ConfigError if JAX has no device of the platforms that JAX_PLATFORMS or its settings name.

    This initializes JAX's backends, so a run of several processes must have connected them before.
    """
    try:
        jax.devices()
    except Exception as e:  # plugins raise errors of any type, also without text
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        if not chosen:
            raise
        reason = first_line(e).partition(" (set JAX_PLATFORMS")[0].removesuffix(".")
        raise ConfigError(
            f"JAX_PLATFORMS={chosen}: this machine has no such device, or JAX has no plugin for it ({reason});"
            " unset it to use the devices that JAX finds"
        ) from None


def has_tpu() -> bool:
    """Return True if this machine shows any sign of a TPU; initializes no backend."""
    if on_cloud_tpu() or any(name in os.environ for name in TPU_VARIABLES):
        return True
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def skip_absent_tpu() -> None:
    """Make JAX treat the TPU backend as unavailable on a machine without TPU, without loading libtpu.

    An installed libtpu prints errors where it finds no TPU. JAX then uses the next backend, as without this function.
    Compilation for a TPU topology still works.
    """
    if not has_tpu():
        replace_backend("tpu", _no_tpu, priority=300)


def _no_tpu() -> NoReturn:
    raise RuntimeError("this machine has no TPU")
