"""The settings of JAX that every command makes."""

import jax
import pytest
from jax.extend import backend

from dcvit import cli
from dcvit.__main__ import dispatch
from dcvit.parallel import runtime


@pytest.fixture
def registered(monkeypatch):
    """The arguments of each registration of a backend."""
    found = []
    monkeypatch.setattr(backend, "register_backend_factory", lambda *args, **options: found.append(args))
    jax.config.update("jax_platforms", None)
    yield found
    jax.config.update("jax_platforms", "cpu")


@pytest.mark.parametrize("is_present", [False, True])
def test_only_an_absent_tpu_backend_is_replaced_by_one_that_is_unavailable(is_present, registered, monkeypatch):
    monkeypatch.setattr(runtime, "has_tpu", lambda: is_present)
    runtime.skip_absent_tpu()
    assert [name for name, _ in registered] == ([] if is_present else ["tpu"])
    for _, factory in registered:
        with pytest.raises(RuntimeError, match="no TPU"):
            factory()


def test_requested_device_that_is_absent_is_one_line_in_every_command(registered, monkeypatch, tmp_path, capsys):
    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu': x. (set JAX_PLATFORMS='' to automatically")

    monkeypatch.setattr(jax, "devices", fail)
    jax.config.update("jax_platforms", "tpu")
    for words in (
        ("train", "--config", "vit_digits", "--workdir", str(tmp_path / "run")),
        ("evaluate", "--config", "vit_digits", "--checkpoint", "digits"),
    ):
        assert cli.run(dispatch, words) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: JAX_PLATFORMS=tpu: this machine has no such device")
        assert "'tpu': x)" in err
        assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    jax.config.update("jax_platforms", None)
    with pytest.raises(RuntimeError):
        runtime.check_devices()


@pytest.mark.parametrize("variable", [runtime.TPU_VARIABLES[0], None])
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
