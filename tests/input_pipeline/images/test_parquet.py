"""Parquet files of images: equal to pyarrow, read once in an epoch, and errors that name what is wrong."""

import json
import os
import shutil

import image_datasets
import numpy as np
import pytest
from markdown_pages import ROOT, blocks
from refusals import refused

import input_pipeline as ip
from input_pipeline import shuffle
from input_pipeline.images import parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NAMES = [f"class {i}" for i in range(1000)]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(images, labels, names=NAMES, struct=STRUCT):
    """Return the table of a shard, with the metadata of the library `datasets`."""
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    values = images if struct == pa.binary() else [{"bytes": image, "path": "a.jpg"} for image in images]
    columns = {"image": pa.array(values, struct), "label": pa.array(labels, pa.int64())}
    return pa.table(columns).replace_schema_metadata(metadata)


def write(folder, rows, shards=3, group=10, **options):
    """Write the rows of a table as the shards of the split train in folder/data; return the folder."""
    (folder / "data").mkdir(parents=True)
    ends = [i * len(rows) // shards for i in range(shards + 1)]
    for i in range(shards):
        part = rows.slice(ends[i], ends[i + 1] - ends[i])
        name = f"train-{i:05}-of-{shards:05}.parquet"
        pq.write_table(part, folder / "data" / name, row_group_size=group, **options)
    return folder


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory):
    """120 images in three shards with row groups of ten, as no test changes them."""
    rows = table([image_datasets.jpeg(i) for i in range(120)], [37 * i % 1000 for i in range(120)])
    return write(tmp_path_factory.mktemp("parquet") / "imagenet", rows)


@pytest.fixture
def root(shared_root, tmp_path):
    return shutil.copytree(shared_root, tmp_path / "imagenet")


@pytest.fixture
def reads(monkeypatch):
    """The row groups that are read, each as (path, number)."""
    found, read = [], parquet._read
    monkeypatch.setattr(parquet, "_read", lambda g, *names: found.append((g.path, g.number)) or read(g, *names))
    return found


def open_parquet(root, **options):
    return ip.open_source("parquet", data_dir=str(root), **options)


def test_labels_are_read_without_images_and_stratify_folds(tmp_path, reads):
    labels = [i % 3 for i in range(29)] + [None]
    root = write(tmp_path / "few", table([b"no image"] * 30, labels, names=["a", "b", "c"]), group=4)
    source = open_parquet(root)
    np.testing.assert_array_equal(source.labels, [*labels[:-1], -1])
    part = open_parquet(root, part="fold 1 of 5")
    assert sorted(np.bincount(part.labels + 1).tolist()) == [1, 1, 2, 2]  # of 1, 9, 10 and 10
    assert reads == []
    assert sum(part.blocks.sizes) == len(part) == 6


class TestExamples:
    @pytest.mark.parametrize(
        "options",
        [{"compression": "none", "use_dictionary": False}, {"compression": "zstd", "data_page_version": "2.0"}],
    )
    def test_examples_are_those_of_read_table(self, shared_root, tmp_path, options):
        rows = pa.concat_tables(map(pq.read_table, sorted((shared_root / "data").iterdir())))
        source = open_parquet(write(tmp_path / "copy", rows, shards=2, group=7, **options))
        assert len(source) == 120
        assert source.class_names == tuple(NAMES)
        expected = rows.to_pylist()
        for i in range(120):
            assert source[i] == {"image": expected[i]["image"]["bytes"], "label": expected[i]["label"]}

    def test_files_of_the_library_datasets_are_read(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
        images = [image_datasets.jpeg(i) for i in range(9)]
        rows = {"image": [{"bytes": image, "path": None} for image in images], "label": [i % 2 for i in range(9)]}
        path = tmp_path / "validation-00000-of-00001-0123456789abcdef.parquet"
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path, batch_size=4)
        source = open_parquet(tmp_path, split="validation")
        assert source.class_names == ("cat", "dog")
        assert [source[i] for i in range(9)] == [{"image": e, "label": i % 2} for i, e in enumerate(images)]


class TestOrder:
    """Training shuffles within a window of row groups, as a function of seed and epoch."""

    @pytest.mark.parametrize("sizes", [[10] * 60, [1, 30, 7] * 15])
    def test_order_is_a_permutation_within_a_window(self, sizes):
        blocks = shuffle.Blocks(np.array(sizes, np.int64), 100)
        size = sum(sizes)
        orders = [shuffle.permutation(size, seed, epoch, blocks) for seed in (0, 1) for epoch in (0, 1)]
        assert len({tuple(order) for order in orders}) == 4
        block = np.repeat(np.arange(len(sizes)), sizes)
        for order in orders:
            assert sorted(order) == list(range(size))
            places = np.argsort(order)
            spans = [np.ptp(places[block == b]) for b in range(len(sizes))]
            assert max(spans) < 2 * 100
            assert np.corrcoef(places, np.arange(size))[0, 1] < 0.5

    @pytest.mark.interop
    def test_the_documented_code_writes_files_from_a_folder_of_images(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        image_datasets.image_folder(tmp_path / "pets")
        (tmp_path / "pets" / "val").rename(tmp_path / "pets" / "validation")
        (code,) = blocks(ROOT / "docs/data.md", "python", "<!-- run by tests/input_pipeline/images/test_parquet.py -->")
        exec(code, {})
        for split, folder in {"train": "train", "val": "validation"}.items():
            source = ip.open_source("folder", data_dir="pets_parquet", split=split)
            images = sorted(file.read_bytes() for file in (tmp_path / "pets" / folder).rglob("*.*"))
            assert sorted(source[i]["image"] for i in range(len(source))) == images
            assert source.class_names == ("cat", "dog", "fox")

    def test_a_folder_of_parquet_files_is_read_as_one_of_images(self, shared_root, tmp_path, caplog):
        caplog.set_level("INFO")
        shutil.copytree(shared_root, tmp_path / "own")
        shard = next((shared_root / "data").iterdir())
        shutil.copy(shard, tmp_path / "own" / "data" / "validation.parquet")
        for split, rows in {"train": 120, "val": pq.read_metadata(shard).num_rows}.items():
            source = ip.open_source("folder", data_dir=str(tmp_path / "own"), split=split, val_fraction=None)
            assert (len(source), source.class_names) == (rows, tuple(NAMES))
            assert f"own, {'validation' if split == 'val' else split}: {rows} images of 1,000 classes" in caplog.text
        with pytest.raises(ip.InputError, match=r"val_fraction selects no rows: set `part` .* split='train'"):
            ip.open_source("folder", data_dir=str(tmp_path / "own"), val_fraction=0.1)
        (tmp_path / "own" / "train" / "cat").mkdir(parents=True)
        (tmp_path / "own" / "train" / "cat" / "a.jpg").write_bytes(b"x")
        assert len(ip.open_source("folder", data_dir=str(tmp_path / "own"))) == 1

    def test_order_is_fixed_because_runs_are_resumed_from_it(self):
        blocks = [shuffle.Blocks(np.array([4, 2, 2]), window) for window in (3, 8)]
        assert [shuffle.permutation(8, 0, 0, b).tolist() for b in blocks] == [
            [5, 4, 0, 2, 1, 3, 6, 7],
            [0, 2, 1, 5, 4, 3, 6, 7],
        ]

    @pytest.mark.parametrize("hosts", [1, 2])
    def test_each_row_group_is_read_once_in_an_epoch(self, shared_root, reads, hosts):
        source = open_parquet(shared_root, window=40)
        rows = range(12 // hosts)
        stream = ip.train_batches(source, "keep('label')", 12, seed=0, rows=rows, threads=0)
        for _ in range(10):
            next(stream)
        assert len(set(reads)) == 12
        assert len(reads) <= 13  # the first example is read twice

    @pytest.mark.slow
    def test_a_fold_reads_each_row_group_once_in_an_epoch(self, tmp_path, reads):
        rows = table([i.to_bytes(2000, "big") for i in range(1500)], [i % 10 for i in range(1500)])
        source = open_parquet(write(tmp_path, rows, group=30), window=240, part="fold 1 of 5")
        stream = ip.train_batches(source, "keep('label')", 20, seed=0, threads=0)
        for _ in range(len(source) // 20):
            next(stream)
        assert len(set(reads)) > 40
        assert len(reads) <= len(set(reads)) + 3

    def test_memory_is_limited_to_the_window(self, shared_root, reads):
        source = open_parquet(shared_root, window=20)
        rng = np.random.default_rng(0)
        for index in rng.integers(120, size=100).tolist():  # an order that reads row groups repeatedly
            source[index]
            assert source.cached.nbytes <= source.cached.limit < source.nbytes()
        assert len(reads) > 12

    def test_files_sorted_by_class_are_reported_when_training_starts(self, tmp_path, caplog):
        source = open_parquet(write(tmp_path, table([b""] * 60, sorted([*range(6)] * 10))), window=20)
        assert not caplog.messages
        ip.batch_ids(source, 8, 0, 0)
        assert len(caplog.messages) == 1
        assert "are sorted by class" in caplog.messages[0]


IN_ANY_ORDER = [1] * 30 + [0] * 30
IN_EACH_FILE = [label for _ in range(3) for label in range(6) for _ in range(4)]


@pytest.mark.parametrize(("labels", "part"), [(IN_ANY_ORDER, (0, 0.5)), (IN_EACH_FILE, (0.9, 1.0))])
def test_a_part_without_some_classes_of_files_sorted_by_class_is_refused(tmp_path, labels, part):
    root = write(tmp_path / "sorted", table([b""] * len(labels), labels))
    with pytest.raises(ip.InputError, match="classes, because the examples are sorted by class; use a fold"):
        open_parquet(root, part=part)
    mixed = np.random.default_rng(0).permutation(labels).tolist()
    assert len(open_parquet(write(tmp_path / "mixed", table([b""] * len(labels), mixed)), part=part)) > 0


def shard(root, number=1):
    return root / "data" / f"train-{number:05}-of-00003.parquet"


def stored(rows):
    """Return a function that replaces the second shard by a table."""
    return lambda root: pq.write_table(rows, shard(root))


DAMAGED = "train-00001-of-00003.parquet cannot be read as Parquet: "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: os.truncate(shard(root), 5000), DAMAGED),
        (lambda root: shard(root, 2).unlink(), "the file train-00002-of-00003.parquet is missing"),
        (stored(pa.table({"image": [b"a"]})), "train-00001-of-00003.parquet has no column 'label'; known: image"),
        (
            stored(pa.table({"image": ["a"], "label": [0]})),
            "'image' should contain the bytes of image files, not string",
        ),
        (stored(table([b"a"], [0], names=["cat", "dog"])), "differ in the types or class names"),
        (shutil.rmtree, "no folder .*imagenet"),
    ],
)
def test_damaged_folders_are_named_in_one_line(root, damage, message):
    damage(root)
    with refused(ip.InputError, match=message):
        open_parquet(root)


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [(None, 0, "the image is null"), (b"a", 1000, "label=1000 is not one of the 1000 classes")],
)
def test_row_without_a_valid_value_is_named_and_can_be_skipped(tmp_path, image, label, message):
    good = image_datasets.jpeg(0)
    source = open_parquet(write(tmp_path, table([good, image, good, good], [0, label, 1, 2]), shards=1))
    with pytest.raises(ip.InputError, match=rf"train-00000-of-00001.parquet, row 1: {message}"):
        list(ip.eval_batches(source, "keep('label')", 4))
    (batch,) = ip.eval_batches(source, "keep('label')", 4, corrupt=ip.CorruptPolicy("skip"))
    assert batch["_mask"].tolist() == [1, 0, 1, 1]


def test_an_unknown_label_is_that_of_a_manifest(tmp_path):
    """Null and -1 are unknown; without `ignore`, they are an error."""
    source = open_parquet(write(tmp_path, table([b"a"] * 4, [0, None, -1, 2], names=["a", "b", "c"]), shards=1))
    assert [source[i]["label"] for i in range(4)] == source.labels.tolist() == [0, -1, -1, 2]
    (batch,) = ip.eval_batches(source, "onehot(3, ignore=-1)|keep('labels')", 4)
    assert batch["labels"].min(axis=1).tolist() == [0, -1, -1, 0]
    with pytest.raises(ip.InputError, match=r"row 1: onehot\(3\): label=-1 is out of range; ignore=-1 ignores"):
        list(ip.eval_batches(source, "onehot(3)|keep('labels')", 4))


def test_damaged_page_is_read_once_and_named_and_other_row_groups_are_read(root, reads):
    content = bytearray(shard(root).read_bytes())
    content[4:60] = b"\xff" * 56  # the header of the first page
    shard(root).write_bytes(content)
    source = open_parquet(root)
    for _ in range(2):
        with pytest.raises(ip.InputError, match="row group 0 cannot be read as Parquet: "):
            source[40]
    assert source[50]["image"][:2] == b"\xff\xd8"
    assert reads.count((str(shard(root)), 0)) == 1


def test_checksums_of_pages_are_verified(tmp_path):
    rows = table([image_datasets.jpeg(i) for i in range(4)], [0] * 4)
    path = write(tmp_path, rows, shards=1, write_page_checksum=True, compression="none") / "data"
    (path,) = path.iterdir()
    content = bytearray(path.read_bytes())
    content[content.index(b"\xff\xd9")] ^= 1
    path.write_bytes(content)
    with pytest.raises(ip.InputError, match=r"row group 0 cannot be read as Parquet: .*CRC"):
        open_parquet(tmp_path)[0]


def test_file_that_changed_or_vanished_after_opening_is_named(root):
    source = open_parquet(root)
    pq.write_table(table([b""] * 5, [0] * 5), shard(root))
    with pytest.raises(ip.InputError, match=r"train-00001-of-00003\.parquet was changed or replaced"):
        source[40]
    shard(root).unlink()
    with pytest.raises(ip.ReadingError, match="No such file"):
        source[50]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "validation"}, "imagenet has no split 'validation'; known: train"),
        ({"image": "images"}, "has no column 'images'; did you mean 'image'"),
    ],
)
def test_invalid_options_are_named(shared_root, options, message):
    with pytest.raises(ip.InputError, match=message):
        open_parquet(shared_root, **options)
