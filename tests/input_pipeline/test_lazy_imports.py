"""Imports: the package never imports JAX, and imports heavy libraries only for data that needs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import input_pipeline as ip

# What is imported next, and modules that are not imported by then.
STEPS = {
    "import dcvit.errors": ["numpy", "jax", "beartype", "input_pipeline.loader", "input_pipeline.source"],
    "import input_pipeline as ip; ip.open_source('stdlib', split='validation')": ["tokenizers", "zstandard", "jax"],
    "import {modules}": ["jax", "flax", "dcvit.dcmha", "tensorflow"],
}


@pytest.mark.slow
def test_no_module_imports_jax_or_tensorflow_and_embedded_text_needs_no_optional_library():
    root = Path(ip.__file__).parent
    modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("[!_]*.py")]
    code = "import json, sys\nfound = []\n"
    for step, names in STEPS.items():
        step = step.format(modules=", ".join(f"input_pipeline.{name}" for name in modules))
        code += f"{step}\nfound.append([name for name in {names} if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", f"{code}print(json.dumps(found))"], capture_output=True, check=True)
    assert json.loads(done.stdout) == [[] for _ in STEPS]


@pytest.mark.slow
def test_every_public_name_is_importable_and_others_are_attribute_errors():
    assert all(hasattr(ip, name) for name in ip.__all__)
    assert set(ip.MODULES) <= set(ip.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'open_sorce'"):
        _ = ip.open_sorce
