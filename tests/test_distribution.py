"""The wheel and the source distribution: their files and version, and that both give the same wheel."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dcvit

ROOT = Path(__file__).resolve().parent.parent


def build(kind, source, out):
    """Build a wheel or sdist with the backend of pyproject.toml, without an isolated environment."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
    process = subprocess.run(words, cwd=source, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (found,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


def hashes(wheel):
    """The hash of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs hatchling; pip install -e .[dev]")
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_the_two_packages_only(wheel):
    names = [Path(name) for name in hashes(wheel)]
    assert {name.parts[0] for name in names} == {"dcvit", "input_pipeline", f"dcvit-{dcvit.__version__}.dist-info"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if tracked:
        expected = {f"dcvit/{name}" if name.startswith("configs/") else name for name in tracked}
        assert [str(name) for name in names if ".dist-info" not in name.parts[0] and str(name) not in expected] == []
    for needed in ("dcvit/py.typed", "dcvit/configs/vit_digits.py", "dcvit/pages/templates/explorer.html"):
        assert Path(needed) in names
    assert Path("dcvit/pretrained/digits/model.safetensors") in names


@pytest.mark.exhaustive
def test_the_source_distribution_gives_the_same_wheel(wheel, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (source / "tests" / "conftest.py").exists()
    assert (source / "scripts" / "test.sh").exists()
    assert hashes(build("wheel", source, tmp_path / "wheel")) == hashes(wheel)


def test_the_version_is_that_of_the_citation_and_the_changelog():
    assert f"\nversion: {dcvit.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = (ROOT / "CITATION.cff").read_text().partition("\ndate-released: ")[2].split()[0]
    assert f"\n## [{dcvit.__version__}] - {released}\n" in changelog
