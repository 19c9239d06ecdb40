"""Manifests: formats, classes, unknown labels, splits, and errors that name the line."""

import shutil

import manifests
import numpy as np
import pytest

import input_pipeline as ip
from dcvit.runs.identity import data_identity
from input_pipeline.check import check_data

COUNT = 12


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest") / "data"
    return folder, manifests.write_images(folder, COUNT)


@pytest.fixture
def folder(shared, tmp_path):
    """A copy of the images for tests that change them."""
    return shutil.copytree(shared[0], tmp_path / "data")


@pytest.fixture
def listed(shared, folder):
    return shared[1]


def opened(manifest, **options):
    return ip.open_source("manifest", manifest=str(manifest), **options)


def test_one_class_for_each_image(folder, listed):
    names = ["cat", "Ant", "dog"]
    rows = [(path, f" {names[i % 3]} ") for i, (path, _) in enumerate(listed)]
    source = opened(manifests.write_csv(folder / "labels.csv", ("path", "label"), rows))
    assert source.class_names == ("Ant", "cat", "dog")
    assert [int(source[i]["label"]) for i in range(3)] == [1, 0, 2]
    assert source[5]["image"] == (folder / listed[5][0]).read_bytes()
    assert source.describe(5) == str(folder / listed[5][0])
    np.testing.assert_array_equal(source.labels, [[1, 0, 2][i % 3] for i in range(COUNT)])


def expected(listed):
    return np.array([[name in names for name in manifests.COLORS] for _, names in listed], np.float32)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "parquet of numbers"])
@pytest.mark.parametrize("joined", [True, False])
def test_several_classes_are_names_with_a_separator_or_columns(folder, listed, suffix, joined):
    """The row of an unknown image has an empty cell, and None in a Parquet file."""
    hot = expected(listed)
    if joined:
        columns = {"label": ["|".join(names) or "|" for _, names in listed]}
        columns["label"][7] = ""
    else:
        columns = {color: [str(int(on)) for on in hot[:, c]] for c, color in enumerate(manifests.COLORS)}
        columns |= {"red": [*columns["red"][:7], "", *columns["red"][8:]]}
    columns = {"path": [path for path, _ in listed], **columns}
    file = folder / f"labels.{suffix.split()[0]}"
    if suffix.startswith("parquet"):
        pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        typed = {key: [cell or None for cell in cells] for key, cells in columns.items()}
        if suffix == "parquet of numbers" and not joined:
            typed |= {key: [cell and float(cell) for cell in typed[key]] for key in manifests.COLORS}
            typed["blue"] = [bool(cell) for cell in typed["blue"]]
        parquet.write_table(pa.table(typed), file)
    else:
        text = manifests.write_csv(file, columns, zip(*columns.values(), strict=True))
        if suffix == "tsv":
            file.write_text((folder / text).read_text().replace(",", "\t"))
    source = opened(file, **({"sep": "|"} if joined else {"labels": manifests.COLORS}))
    assert source.class_names == manifests.COLORS
    hot[7, slice(None) if joined else 2] = -1
    np.testing.assert_array_equal([source[i]["labels"] for i in range(COUNT)], hot)
    np.testing.assert_array_equal(source.labels, hot)
    assert "label" not in source[0]


def test_joined_names_without_a_separator_are_pointed_out(folder, listed, caplog):
    file = manifests.write_csv(folder / "labels.csv", ("path", "label"), [(p, "|".join(n)) for p, n in listed])
    assert "blue|green" in opened(file).class_names
    assert "'blue|green' is one class; several classes in a cell need sep='|'" in caplog.text
    caplog.clear()
    opened(file, sep="|")
    assert not caplog.text


def test_numbers_are_names_in_numeric_order_and_minus_one_is_unknown(folder, listed):
    cells = ["10.0", "2.0", "", "-1", "-1.0", *["2"] * (COUNT - 5)]
    rows = zip([path for path, _ in listed], cells, strict=True)
    source = opened(manifests.write_csv(folder / "labels.csv", ("path", "label"), rows))
    assert source.class_names == ("2", "10")
    np.testing.assert_array_equal(source.labels[:6], [1, 0, -1, -1, -1, 0])
    hot = next(ip.eval_batches(source, "onehot(2, ignore=-1)|keep('labels')", COUNT))["labels"]
    np.testing.assert_array_equal(hot[:4], [[0, 1], [1, 0], [-1, -1], [-1, -1]])
    with pytest.raises(ip.InputError, match="label=-1 is out of range; ignore=-1 ignores examples without a label"):
        list(ip.eval_batches(source, "onehot(2)|keep('labels')", COUNT))


def test_given_classes_number_the_labels(folder, listed):
    paths = [path for path, _ in listed]
    by_name = manifests.write_csv(folder / "a.csv", ("path", "label"), [(p, "cat") for p in paths])
    (folder / "classes.txt").write_text("\ufefffox\ncat\ndog\n")
    for classes in (["fox", "cat", "dog"], str(folder / "classes.txt")):
        source = opened(by_name, classes=classes)
        assert (source.class_names, source.labels[0]) == (("fox", "cat", "dog"), 1)
    by_number = manifests.write_csv(folder / "b.csv", ("path", "label"), [(p, "2") for p in paths])
    source = opened(by_number, classes=["fox", "cat", "dog"])
    assert (source.class_names, source.labels[0]) == (("fox", "cat", "dog"), 2)


def test_splits_share_their_classes(folder, listed):
    rows = [(path, "ab"[i % 2] if i < 10 else "c", "train" if i < 10 else "val") for i, (path, _) in enumerate(listed)]
    file = manifests.write_csv(folder / "labels.csv", ("path", "label", "split"), rows)
    train, val = (opened(file, split=split) for split in ("train", "val"))
    assert (len(train), len(val)) == (10, 2)
    assert train.class_names == val.class_names == ("a", "b", "c")
    assert set(val.labels.tolist()) == {2}


def test_paths_are_built_from_columns_and_below_a_data_dir(folder, listed, tmp_path):
    rows = [(f"{i:03}", "x") for i in range(COUNT)]
    file = manifests.write_csv(tmp_path / "labels.csv", ("id", "label"), rows)
    source = opened(file, path="images/{id}.png", data_dir=str(folder))
    assert source.describe(3) == str(folder / "images" / "003.png")
    assert len({source.name(i) for i in range(COUNT)}) == COUNT
    absolute = manifests.write_csv(tmp_path / "b.csv", ("path", "label"), [(source.describe(0), "x")])
    assert opened(absolute, data_dir=str(folder))[0]["image"] == source[0]["image"]
    with pytest.raises(ip.InputError, match=r"b\.csv:2: .* is outside of .*; set data_dir to a folder that contains"):
        opened(absolute, data_dir=str(tmp_path / "data" / "other"))


def test_the_identity_covers_the_manifest_and_is_the_same_for_a_copy(folder, listed, tmp_path):
    file = manifests.write_csv(
        folder / "labels.csv", ("path", "label"), [(p, "ab"[i % 2]) for i, (p, _) in enumerate(listed)]
    )
    before = data_identity(opened(file))
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert data_identity(opened(copy / "labels.csv")) == before
    text = (copy / "labels.csv").read_text()
    (copy / "labels.csv").write_text(text.replace("005.png,b", "005.png,a"))
    assert data_identity(opened(copy / "labels.csv"))["files"] != before["files"]


def test_check_data_lists_damaged_images(folder, listed):
    (folder / listed[4][0]).write_bytes(b"no image")
    file = manifests.write_csv(folder / "labels.csv", ("path", "label"), [(p, "a|b") for p, _ in listed])
    data = {"kind": "manifest", "manifest": file, "sep": "|"}
    report = check_data(data, "decode|resize_pillow(8)|value_range|keep('image', 'labels')", lambda *_: None)
    assert (report.checked, [damage.location for damage in report.damaged]) == (COUNT, [str(folder / listed[4][0])])


P = "images/000.png"
INVALID = [
    ("path,label\n", {}, "labels.csv has no rows"),
    (f"file,label\n{P},a\n", {}, "labels.csv has no column 'path'; known: file, label"),
    (f"path,label\n{P},cat\n", {"classes": ["cats", "dog"]}, "labels.csv:2: no class 'cat'; did you mean 'cats'"),
    (f"path,label\n{P},-2\n", {}, "labels.csv:2: '-2' is no class; an unknown label is -1 alone, or nothing"),
    (f"path,label\n{P},red|-1\n", {"sep": "|"}, "labels.csv:2: '-1' is no class"),
    (f"path,label\n{P},{'9' * 5000}\n", {"classes": ["cats", "dog"]}, "labels.csv:2: no class '999"),
    (f"path,a,b\n{P},1,2\n", {"labels": ["a", "b"]}, "labels.csv:2: 'b' is '2', expected 1, 0, or -1 or nothing"),
    (f"path,label,split\n{P},a,train\n", {"split": "trian"}, "no row has 'trian' in the column 'split'; did you mean"),
    ("path,label\n../secret.png,a\n", {}, "labels.csv:2: '../secret.png' is outside of"),
    (f"path,label\n{P},a\nimages/../{P},b\n", {}, "labels.csv:3: .* is also in line 2; expected a row for each image"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "options", "message"), INVALID)
def test_damage_is_an_error_that_names_the_line(folder, content, options, message):
    (folder / "labels.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ip.InputError, match=message):
        opened(folder / "labels.csv", **options)


def test_a_missing_manifest_or_all_missing_images_are_missing_data(folder):
    for path in ("none.csv", "gs://bucket/labels.csv"):
        with pytest.raises(ip.MissingDataError, match="no file"):
            opened(path)
    with pytest.raises(ip.MissingDataError, match="1 of 1 image files are missing"):
        opened(manifests.write_csv(folder / "labels.csv", ("path", "label"), [("x.png", "a")]))


def test_a_damaged_parquet_manifest_is_refused(folder, listed):
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    file = folder / "labels.parquet"
    parquet.write_table(pa.table({"path": [P], "label": [["a", "b"]]}), file)
    with pytest.raises(ip.InputError, match="'label' should have text, numbers or truth values, not list"):
        opened(file)
    parquet.write_table(pa.table({"path": [p for p, _ in listed], "label": ["a"] * COUNT}), file)
    assert len(opened(file)) == COUNT
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ip.InputError, match=r"labels\.parquet cannot be read as Parquet"):
        opened(file)
