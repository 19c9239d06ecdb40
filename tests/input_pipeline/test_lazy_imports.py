"""Imports: the package never imports JAX, and imports heavy libraries only for data that needs them."""

import subprocess
import sys
from pathlib import Path

import pytest

import input_pipeline as ip


def imported_by(code, *names):
    """Run `code` in a new process and return those of the modules `names` that it imports."""
    code = f"{code}\nimport sys; print(*[name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_no_module_imports_jax_or_tensorflow():
    root = Path(ip.__file__).parent
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("[!_]*.py")]
    code = "import " + ", ".join(f"input_pipeline.{name}" for name in names)
    assert imported_by(code, "jax", "flax", "dcvit", "tensorflow") == []


@pytest.mark.slow
def test_embedded_text_needs_no_optional_library():
    code = "import input_pipeline as ip; ip.open_source('stdlib', split='validation')"
    assert imported_by(code, "tokenizers", "zstandard", "tensorflow", "jax") == []


def test_errors_are_imported_without_numpy_beartype_or_the_pipeline():
    code = "import dcvit.errors"
    assert imported_by(code, "numpy", "jax", "beartype", "input_pipeline.loader", "input_pipeline.source") == []


@pytest.mark.slow
def test_every_public_name_is_importable_and_others_are_attribute_errors():
    assert all(hasattr(ip, name) for name in ip.__all__)
    assert set(ip.MODULES) <= set(ip.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'open_sorce'"):
        _ = ip.open_sorce
