"""The exported PyTorch classes pass transformers' own tests of models."""

import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.exhaustive]
transformers = pytest.importorskip("transformers", reason="needs transformers; pip install -e .[interop]")
HERE = Path(__file__).parent
# Not in the source distribution, and imported by the tests that are.
ABSENT = {"generation/test_utils.py": "GenerationTesterMixin", "exporters/test_export.py": "ExportTesterMixin"}


def has_network():
    try:
        return bool(socket.getaddrinfo("pypi.org", 443))
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with transformers' tests of models and `transformers_suite.py` among them."""
    root = tmp_path_factory.mktemp("transformers")
    name = f"transformers-{transformers.__version__}"
    pip = [sys.executable, "-m", "pip"]
    source = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(root)]
    for arguments in (
        ["download", *source, name.replace("-", "==")],
        ["install", "--target", str(root / name / "libraries"), "parameterized"],  # the tests import it
    ):
        done = subprocess.run([*pip, *arguments, "--quiet"], capture_output=True, text=True)
        if done.returncode and not has_network():
            pytest.skip(f"no network to download the source of {name}, or parameterized")
        assert done.returncode == 0, done.stderr
    with tarfile.open(root / f"{name}.tar.gz") as archive:
        members = [m for m in archive if re.fullmatch(rf"{name}/tests/[a-z_]*\.py", m.name)]
        archive.extractall(root, members, filter="data")
    tests = root / name / "tests"
    for path, mixin in ABSENT.items():
        (tests / path).parent.mkdir()
        (tests / path).write_text(f"class {mixin}: ...\n")
    (tests / "test_dcvit.py").write_text((HERE / "transformers_suite.py").read_text())
    return tests.parent


def test_transformers_own_tests_of_models_pass(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "tests/test_dcvit.py"]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), str(folder / "libraries")])
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed > 150, done.stdout[-2000:]
