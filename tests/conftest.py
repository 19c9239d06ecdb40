"""Settings and fixtures of all tests: executed shape annotations, strict dtype and rank promotion, eight CPU devices.

Compilation takes most of the time of a small training run. Therefore XLA compiles without LLVM's optimizations and
without its slower code generator, and the workers and subprocesses of a session share one compilation cache.
"""

import atexit
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import jaxlib.version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",  # many small modules take a quarter longer
        # Removed in jaxlib 0.11, and XLA ends the process at a flag that it does not know.
        *(["--xla_cpu_use_fusion_emitters=false"] if jaxlib.version.__version_info__ < (0, 11) else []),
    ]
)
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # gcsfs would query the type of a bucket by gRPC with TLS
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers and subprocesses inherit the variables
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="dcvit-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import libraries
import pytest
from jaxtyping import install_import_hook
from trained_workdirs import DIGITS, TEXT, train_once

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(["dcvit", "input_pipeline"], "typechecker.check")
pytest_plugins = ["input_fixtures"]
MEMORY = {"limit": 1_500_000_000}  # bytes


def pytest_configure(config):
    """Start JAX's backend while output is not captured: XLA ends the process at an unknown flag, after a message."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        jax.devices()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark weekly tests as exhaustive too, and tests that train as slow."""
    for item in items:
        if item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.exhaustive)
        if {"digits_run", "digits_workdir", "lm_workdir"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that fails because a library of an extra is not installed."""
    report = yield
    libraries.skip_if_missing(report)
    return report


@pytest.fixture(autouse=True, scope="module")
def _clear_caches():
    """Bound the memory of a worker: release the compiled programs after a module if it exceeds a limit.

    The allocator keeps what is released for the next modules, so that only growth beyond it is a reason to release.
    """
    yield
    if resident_memory() > MEMORY["limit"]:
        jax.clear_caches()
        gc.collect()
        MEMORY["limit"] = max(MEMORY["limit"], resident_memory() + 200_000_000)


def resident_memory():
    """Return the bytes of memory of this process, or the most so far where the system does not say it as Linux does."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture(autouse=True)
def _trust_kernels():
    """Select kernels without verdicts: programs for chips are lowered here, and not run."""
    from dcvit.dcmha.plan import Selection, selecting

    with selecting(Selection("trust")):
        yield


@pytest.fixture
def x64():
    """Double precision for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def library_promotion():
    """JAX's standard promotion, for tests that run optax's Adam, which mixes dtypes inside."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def hangup():
    """The default reaction to SIGHUP, also in child processes, although the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def no_compilation_cache():
    """Programs compiled for a slice cannot be read back from JAX's cache."""
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def digits_run(tmp_path):
    """Run a tiny digits training with overrides, as the command does; return (exit status, workdir)."""
    from training_runs import digits_command

    def run(name="run", **overrides):
        return digits_command(tmp_path / name, **overrides), tmp_path / name

    return run


@pytest.fixture(scope="session")
def digits_workdir(tmp_path_factory):
    """The workdir of one trained digits classifier, shared by all tests: a test that writes to it copies it first."""
    return train_once(tmp_path_factory, "vit_digits", DIGITS)


@pytest.fixture(scope="session")
def lm_workdir(tmp_path_factory):
    """The workdir of one trained language model of bytes, shared by all tests: a test that writes copies it first."""
    return train_once(tmp_path_factory, "lm_stdlib", TEXT)


@pytest.fixture(params=["gs", "s3"])
def object_store(request, monkeypatch):
    """An object store of each kind, see tests/support/object_stores.py."""
    from object_stores import serve, stores

    pytest.importorskip(stores.LIBRARIES[request.param])
    with serve(request.param, monkeypatch.setenv) as store:
        yield store


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium."""
    from browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
