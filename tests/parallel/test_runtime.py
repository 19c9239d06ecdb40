"""The settings of JAX that every command makes."""

import jax
import pytest
from jax._src import xla_bridge

from dcvit.parallel import runtime


@pytest.fixture
def registered(monkeypatch):
    """The arguments of each registration of a backend, in a process that has initialized none."""
    found = []
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(xla_bridge, "register_backend_factory", lambda *args, **options: found.append(args))
    jax.config.update("jax_platforms", None)
    yield found
    jax.config.update("jax_platforms", "cpu")


def test_absent_tpu_backend_is_replaced_by_one_that_is_unavailable(registered, monkeypatch):
    monkeypatch.setattr(runtime, "has_tpu", lambda: False)
    runtime.skip_absent_tpu()
    ((name, factory),) = registered
    assert name == "tpu"
    with pytest.raises(RuntimeError, match="no TPU"):
        factory()


@pytest.mark.parametrize(("tpu", "platforms"), [(True, None), (False, "tpu")])
def test_tpu_backend_is_kept_where_a_tpu_is_present_or_requested(registered, monkeypatch, tpu, platforms):
    monkeypatch.setattr(runtime, "has_tpu", lambda: tpu)
    jax.config.update("jax_platforms", platforms)
    runtime.skip_absent_tpu()
    assert registered == []


@pytest.mark.parametrize("variable", [*runtime.TPU_VARIABLES, None])
def test_tpu_is_recognized_by_the_environment_of_its_machine(monkeypatch, variable):
    for name in runtime.TPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runtime.Path, "glob", lambda self, pattern: iter(()))
    if variable:
        monkeypatch.setenv(variable, "0")
    assert runtime.has_tpu() == (variable is not None)


@pytest.mark.slow
def test_compiled_programs_are_kept_by_default_and_in_the_folder_of_jaxs_settings(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        runtime.keep_compiled()
        assert jax.config.jax_compilation_cache_dir == before
        jax.config.update("jax_compilation_cache_dir", None)
        runtime.keep_compiled()
        assert jax.config.jax_compilation_cache_dir.startswith(f"{tmp_path}/dcvit/")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_compilation_cache_max_size", -1)
