"""Damaged and unsafe .npz archives: the result is arrays or a one-line error."""

import io
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import refusals

from dcvit.errors import CheckpointError
from dcvit.weights import npz

MAGIC = b"\x93NUMPY"
ARRAYS = {
    "params/head/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/columns": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "params/scale": np.float64(3.5),
    "opt/flags": np.array([True, False]),
    "opt/none": np.zeros((0, 5), np.uint8),
    "name": np.array("ViT"),
    "half": np.arange(4, dtype=np.float16),
    "big": np.arange(3, dtype=">i4"),
}


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(shape, descr="<f4", columns_first=False, version=1):
    """The header of a .npy file; its fields may be invalid."""
    text = repr({"descr": descr, "fortran_order": columns_first, "shape": shape}).encode() + b"\n"
    return MAGIC + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text


def archive(path, members, method=zipfile.ZIP_STORED):
    """Write a zip of (name, content) pairs; names may occur twice."""
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name), content, method)
    return path


def directory(path):
    """Return the bytes of a zip and the offset of its directory."""
    data = bytearray(path.read_bytes())
    return data, data.index(b"PK\x01\x02")


def refused(path, match):
    """Assert that reading raises a one-line error that names the file, without allocating the announced size."""
    with refusals.refused(CheckpointError, str(path), match=match, most_bytes=32 << 20):
        npz.read(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_equal_those_of_numpy_load(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    got = npz.read(str(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as expected:
        assert list(got) == expected.files
        for name, array in got.items():
            assert array.dtype == expected[name].dtype
            assert array.flags.f_contiguous == expected[name].flags.f_contiguous
            np.testing.assert_array_equal(array, expected[name])


def test_opening_reads_no_array(tmp_path):
    """So that a program that only recognizes a file does not need the memory of its arrays."""
    np.savez(tmp_path / "a.npz", large=np.zeros((64, 1 << 16), np.float32), small=np.ones(3, np.float32))
    tracemalloc.start()
    opened = npz.open_arrays(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {name: array.shape for name, array in opened.items()} == {"large": (64, 1 << 16), "small": (3,)}
    assert peak < 1 << 20
    np.testing.assert_array_equal(opened["small"].read(), np.ones(3))
    (tmp_path / "a.npz").write_bytes(b"changed")
    with pytest.raises(CheckpointError, match=r"a\.npz is not an \.npz archive"):
        opened["small"].read()


def test_large_arrays_and_headers_of_version_2_are_read(tmp_path):
    values = np.random.default_rng(0).integers(256, size=1_000_007, dtype=np.uint8)
    archive(tmp_path / "a.npz", [("a.npy", npy(values)), ("b.npy", header((2,), version=2) + bytes(8))])
    got = npz.read(tmp_path / "a.npz")
    np.testing.assert_array_equal(got["a"], values)
    np.testing.assert_array_equal(got["b"], np.zeros(2, np.float32))


class Bomb:
    """Calls a function when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path / "a.npz", "is not an .npz archive, or is damaged: ")


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", head=np.array([Bomb()], object))
    refused(tmp_path / "a.npz", "member 'head': an array of Python objects")
    fields = header((1,), [("a", "<f4"), ("b", "|O")])
    archive(tmp_path / "c.npz", [("head.npy", fields + pickle.dumps([Bomb()]))])
    refused(tmp_path / "c.npz", "Python objects")


@pytest.mark.parametrize("name", ["/etc/passwd.npy", "a/../b.npy"])
def test_name_that_is_no_path_in_a_tree_is_refused(tmp_path, name):
    refused(archive(tmp_path / "a.npz", [(name, npy(np.ones(1)))]), "is not a valid name of an array")


def test_names_that_form_no_tree_are_refused(tmp_path):
    members = [("a/b/c/d.npy", npy(np.ones(1))), ("a/b.npy", npy(np.ones(1)))]
    refused(archive(tmp_path / "a.npz", members), "member 'a/b' is both an array and the folder of 'a/b/c/d'")


@pytest.mark.parametrize(
    ("start", "match"),
    [
        (header((3,)), "the header announces float32 of"),
        (header((2,), "<q9"), "its header is damaged"),
        (MAGIC + b"\1\0" + struct.pack("<H", 20) + b"__import__('os').a()", "its header is damaged"),
    ],
)
def test_header_that_contradicts_the_archive_is_refused(tmp_path, start, match):
    refused(archive(tmp_path / "a.npz", [("a.npy", start + bytes(8))]), match)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_changed_byte_of_an_array_is_refused(tmp_path, method):
    path = archive(tmp_path / "a.npz", [("a.npy", npy(np.random.default_rng(0).random(500)))], method)
    data, at = directory(path)
    data[at - 200] ^= 1
    path.write_bytes(data)
    refused(path, "member 'a'")


def test_truncated_file_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", **ARRAYS)
    whole = (tmp_path / "whole.npz").read_bytes()
    for end in range(0, len(whole) - 1, 37):
        (tmp_path / "a.npz").write_bytes(whole[:end])
        refused(tmp_path / "a.npz", "is not an .npz archive, or is damaged")
