"""Damaged and unsafe .npz archives: the result is arrays or a one-line error."""

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
    with pytest.raises(CheckpointError, match=r"a\.npz: member 'small' is not an array, or is damaged"):
        opened["small"].read()


def test_headers_of_version_2_are_read(tmp_path):
    archive(tmp_path / "a.npz", [("a.npy", header((2,), version=2) + bytes(8))])
    np.testing.assert_array_equal(npz.read(tmp_path / "a.npz")["a"], np.zeros(2, np.float32))


class Bomb:
    """Calls a function when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path / "a.npz", "is not an .npz archive, or is damaged: ")


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", head=np.array([Bomb()], object))
    refused(tmp_path / "a.npz", "member 'head' is not an array, or is damaged: Object arrays")
    fields = header((1,), [("a", "<f4"), ("b", "|O")])
    archive(tmp_path / "c.npz", [("head.npy", fields + pickle.dumps([Bomb()]))])
    refused(tmp_path / "c.npz", "Object arrays")


@pytest.mark.parametrize(
    "start", [header((3,)), header((1,)), header((2,), "<q9"), MAGIC + b"\1\0" + struct.pack("<H", 20) + b"exit()"]
)
def test_header_that_contradicts_the_archive_is_refused(tmp_path, start):
    refused(archive(tmp_path / "a.npz", [("a.npy", start + bytes(8))]), "member 'a' is not an array, or is damaged")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_changed_byte_of_an_array_is_refused(tmp_path, method):
    path, array = tmp_path / "a.npz", np.random.default_rng(0).random(500)
    archive(path, [("a.npy", header((500,), "<f8") + array.tobytes())], method)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") - 200] ^= 1
    path.write_bytes(data)
    refused(path, "member 'a'")


def test_truncated_file_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", **ARRAYS)
    whole = (tmp_path / "whole.npz").read_bytes()
    for end in range(0, len(whole) - 1, 97):
        (tmp_path / "a.npz").write_bytes(whole[:end])
        refused(tmp_path / "a.npz", "is not an .npz archive, or is damaged")
