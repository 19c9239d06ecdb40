"""The names that `import dcvit` offers."""

import subprocess
import sys

import pytest

import dcvit
from dcvit.errors import CheckpointError, ConfigError
from dcvit.models import lm, vit
from dcvit.parallel import runtime
from dcvit.training import train


def fresh(code):
    """Return what a new Python prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_needs_no_library_and_offers_its_names_only():
    modules = fresh("import dcvit, sys; print(*sys.modules)").split()
    assert not {"jax", "flax", "numpy", "dcvit.dcmha"} & {*modules}
    assert sorted(dir(dcvit)) == sorted(dcvit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Path'"):
        _ = dcvit.Path


@pytest.mark.slow
def test_attention_is_an_attribute_after_the_import():
    code = "import dcvit; print(dcvit.dcmha.attention.__module__, dcvit.DCMHA(8).num_heads)"
    assert fresh(code) == "dcvit.dcmha 8"


@pytest.mark.slow
def test_listed_models_can_be_loaded():
    assert "digits" in dcvit.list_models()
    for name in dcvit.list_models():
        assert dcvit.load(name).opened is not None


def test_listed_presets_can_be_built():
    names = dcvit.list_presets()
    assert len(names) == len(set(names)) > 40
    for name in names:
        if "ViT-" in name:
            assert vit.Model(10, variant=f"{name}/16").compose == ("both" if name.startswith("DC") else None)
        else:
            assert lm.Model(10, preset=name).depth > 0


def test_quiet_skips_the_tpu_that_is_absent(monkeypatch):
    replaced = []
    monkeypatch.setattr(runtime, "has_tpu", lambda: False)
    monkeypatch.setattr(runtime, "replace_backend", lambda name, *_, **__: replaced.append(name))
    dcvit.quiet()
    with pytest.raises(CheckpointError):
        dcvit.load("absent/model")
    with pytest.raises(ConfigError):
        train("absent/config", "absent")
    assert replaced == 3 * ["tpu"]
