"""The embedded text: the source code of Python's standard library."""

import sysconfig

import corpora
import pytest
from batches import assert_same_batches

import input_pipeline as ip

NAMES = [f"package{i}" for i in range(100)]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The folders of a standard library with a module, and of installed packages with two, of each name."""
    paths = {"stdlib": tmp_path / "library", "purelib": tmp_path / "packages"}
    for name in NAMES:
        for file in ("a.py", "inside/b.py"):
            corpora.write(paths["purelib"] / name / file, f"{name}/{file}".encode())
        corpora.write(paths["stdlib"] / f"{name}.py", name.encode() * 50)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(paths[name]))
    return paths


@pytest.mark.slow
def test_splits_share_no_file_and_are_utf8():
    splits = {split: ip.open_source("stdlib", split=split) for split in ("train", "validation")}
    files = {split: set(source.files) for split, source in splits.items()}
    assert not files["train"] & files["validation"]
    assert "json/decoder.py" in files["train"] | files["validation"]
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in set.union(*files.values()))
    assert 0.02 < len(files["validation"]) / len(files["train"]) < 0.1
    for source in splits.values():
        assert source.vocab_size == source.tokens.max() + 1 == 257
        assert (source.tokens == 256).sum() == len(source.files)
        assert source.tokens[-1] == 256
        assert source.nbytes() == 2 * len(source.tokens)
        bytes.decode(bytes(source.tokens[source.tokens < 256].tolist()[:10_000]))


def test_rows_equal_those_of_the_same_files_read_as_text(library, tmp_path):
    source = ip.open_source("stdlib", split="validation", context=256)
    for i, name in enumerate(source.files):
        corpora.write(tmp_path / "text" / f"{i:05}.txt", (library["stdlib"] / name).read_bytes())
    same = ip.open_source("text", path=str(tmp_path / "text"), context=256)
    assert len(same) == len(source)
    assert_same_batches(*(ip.eval_batches(one, "", 256) for one in (same, source)))
    assert source.describe(0).endswith(f"row 0, {source.files[0]}")


def test_an_installed_package_is_in_one_split_as_a_whole(library):
    sources = {split: ip.open_source("stdlib", split=split, packages=True) for split in ("train", "validation")}
    held = {split: {file.split("/")[1] for file in source.files if "/" in file} for split, source in sources.items()}
    assert held["train"] | held["validation"] == {*NAMES}
    assert held["validation"]
    assert not held["train"] & held["validation"]
    for split, source in sources.items():
        alone = ip.open_source("stdlib", split=split)
        assert source.files[: len(alone.files)] == alone.files
        assert len(source.files) == len(alone.files) + 2 * len(held[split])
        text = bytes(source.tokens[source.tokens < 256].tolist()).decode()
        assert all(f"{name}/inside/b.py" in text for name in held[split])
