"""Sources: the same examples from every format, and what is wrong with data named before it is used."""

import functools
import itertools
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline import tfrecord
from input_pipeline.images import folder

PP = 'decode|resize_pillow(8)|flip_lr|value_range(-1, 1)|onehot(1000)|keep("image", "labels")'


class TestDigits:
    def test_they_are_scikit_learns_split_once_and_for_all(self):
        from sklearn.datasets import load_digits

        train, test = (ip.open_source("digits", split=s) for s in ("train", "test"))
        everything = np.concatenate([train.images, test.images])[..., 0]
        expected = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
        assert sorted(x.tobytes() for x in everything) == sorted(x.tobytes() for x in expected)
        assert np.bincount(test.labels).min() >= 20
        assert train.class_names == tuple("0123456789")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """imagenet2012 as TFRecord and as ArrayRecord, and the examples in it in order."""
    pytest.importorskip("tensorflow_datasets")
    roots = {form: tmp_path_factory.mktemp(form) for form in ("tfrecord", "array_record")}
    for form, root in roots.items():
        examples = datasets.imagenet2012(root, form, n_train=400, n_val=10)
    return roots, examples


@pytest.fixture(params=["tfrecord", "array_record"])
def copy(prepared, tmp_path, request):
    """A copy of the prepared data of one format, for harm."""
    shutil.copytree(prepared[0][request.param], tmp_path / "data")
    return tmp_path / "data"


def opened(root, split="train", **options):
    return ip.open_source("tfds", name="imagenet2012", split=split, data_dir=str(root), **options)


class TestTfds:
    @pytest.mark.parametrize("form", ["tfrecord", "array_record"])
    @pytest.mark.parametrize(
        ("split", "chosen"),
        [("train", slice(None)), ("train[:99%]", slice(396)), ("train[99%:]", slice(396, None)),
         ("train[150:270]", slice(150, 270)), ("train[:2%]", slice(8))],
    )  # fmt: skip
    def test_a_split_holds_its_examples_as_they_were_stored(self, prepared, form, split, chosen):
        roots, examples = prepared
        source = opened(roots[form], split)
        expected = examples["train"][chosen]
        assert len(source) == len(expected)
        for i, example in enumerate(expected):
            found = source[i]
            assert (found["image"], found["label"]) == (example["image"], example["label"])
            assert found["file_name"].decode() == example["file_name"]

    def test_the_class_names_and_the_size_are_known(self, prepared):
        for root in prepared[0].values():
            source = opened(root)
            assert len(source.class_names) == 1000
            assert source.class_names[0] == "n01440764"
            stored = sum(len(example["image"]) for example in prepared[1]["train"])
            assert stored < source.nbytes() < 2 * stored
            assert "imagenet2012-train." in source.describe(399)
            assert source.describe(399).endswith("-00002-of-00003, record 132")

    def test_batches_are_the_same_from_both_formats_and_resumed_anywhere(self, prepared):
        streams = [
            list(itertools.islice(ip.train_batches(opened(root, "train[:99%]"), PP, 99, seed=7), 8))
            for root in prepared[0].values()
        ]
        for one, other in zip(*streams, strict=True):
            for key in one:
                np.testing.assert_array_equal(one[key], other[key])
        source = opened(prepared[0]["array_record"], "train[:99%]")
        for step, expected in enumerate(streams[0]):
            got = next(ip.train_batches(source, PP, 99, seed=7, start_step=step))
            for key in got:
                np.testing.assert_array_equal(got[key], expected[key])

    def test_kept_in_memory_or_not_the_batches_are_the_same(self, prepared, caplog):
        caplog.set_level("INFO")
        root = prepared[0]["tfrecord"]
        source = opened(root, cache=True)
        assert "keeping 0.0 GB of stored examples in memory" in caplog.text
        for one, other in itertools.islice(
            zip(ip.train_batches(source, PP, 200, 0), ip.train_batches(opened(root), PP, 200, 0), strict=True), 4
        ):
            for key in one:
                np.testing.assert_array_equal(one[key], other[key])
        assert len(source.examples) == 400

    def test_more_than_the_memory_left_is_refused(self, prepared, monkeypatch):
        from input_pipeline import source

        monkeypatch.setattr(source.memory, "available", lambda: 10_000)
        with pytest.raises(ip.InputError, match=r"cache=True would keep .* GB of stored examples in memory"):
            opened(prepared[0]["tfrecord"], cache=True)

    def test_the_environment_names_the_folder(self, prepared, monkeypatch):
        monkeypatch.setenv("TFDS_DATA_DIR", str(prepared[0]["tfrecord"]))
        assert len(ip.open_source("tfds", name="imagenet2012:5.1.0", split="validation")) == 10

    def test_a_dataset_with_one_config_needs_no_config_named(self, tmp_path):
        pytest.importorskip("tensorflow_datasets")
        datasets.imagenet_v2(tmp_path, n=4)
        for name in ("imagenet_v2", "imagenet_v2/matched-frequency", "imagenet_v2:3.0.0"):
            assert len(ip.open_source("tfds", name=name, split="test", data_dir=str(tmp_path))) == 4

    def test_several_labels_come_as_they_are(self, tmp_path):
        pytest.importorskip("tensorflow_datasets")
        examples = datasets.imagenet2012_real(tmp_path, n=6)["validation"]
        source = ip.open_source("tfds", name="imagenet2012_real", split="validation", data_dir=str(tmp_path))
        (batch,) = ip.eval_batches(source, "onehot(1000, key='real_label')|keep('labels')", 6)
        for hot, example in zip(batch["labels"], examples, strict=True):
            assert np.flatnonzero(hot).tolist() == sorted(example["real_label"])

    def test_what_is_missing_says_how_to_prepare_it(self, prepared, tmp_path):
        with pytest.raises(ip.MissingDataError) as error:
            opened(tmp_path)
        assert "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unextracted" in str(error.value)
        assert f"in {tmp_path}/downloads/manual" in str(error.value)
        assert f"tfds build imagenet2012 --data_dir {tmp_path}" in str(error.value)
        there = {"split": "train", "data_dir": str(prepared[0]["tfrecord"])}
        with pytest.raises(ip.MissingDataError, match=r"'imagenet2012:9\.9\.9' .*there: 5\.1\.0"):
            ip.open_source("tfds", name="imagenet2012:9.9.9", **there)

    def test_a_split_that_is_not_there_lists_those_that_are(self, prepared):
        with pytest.raises(ip.InputError, match=r"no split 'test'; known: train \(400\), validation \(10\)"):
            opened(prepared[0]["tfrecord"], "test")

    @pytest.mark.parametrize("split", ["train[:0]", "train[5:3]", "train[60%:40%]"])
    def test_an_empty_split_is_refused(self, prepared, split):
        with pytest.raises(ip.InputError, match="holds no examples"):
            opened(prepared[0]["tfrecord"], split)

    def test_a_changed_byte_is_refused_wherever_it_is(self, copy):
        """As TensorFlow's own reader does: both formats have checksums of every record."""
        (path,) = (copy / "imagenet2012/5.1.0").glob("imagenet2012-train*-00001-of-00003")
        whole, rng = path.read_bytes(), np.random.default_rng(0)
        expected = [opened(copy)[i] for i in range(len(opened(copy)))]
        used = len(whole.rstrip(b"\0")) if "array" in path.name else len(whole)
        for at in rng.integers(used, size=25):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.integers(8)]) + whole[at + 1 :])
            refused = 0
            try:
                source = opened(copy)
            except ip.InputError:
                continue
            for i, example in enumerate(expected):
                try:
                    assert source[i] == example
                except ip.InputError as e:
                    refused += "damaged" in str(e) or "cannot read" in str(e)
            assert refused or "array" in path.name  # ArrayRecord has padding that holds nothing

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("dataset_info.json", "{broken"),
            ("dataset_info.json", "{}"),
            ("features.json", "{"),
            ("features.json", None),
        ],
    )
    def test_a_damaged_description_is_named(self, copy, file, content):
        path = copy / "imagenet2012/5.1.0" / file
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ip.InputError, match=r"imagenet2012/5\.1\.0 is damaged, prepare it again: "):
            opened(copy)

    @pytest.mark.parametrize("name", ["", "/etc", "../x", "imagenet2012/../x", "a b"])
    def test_what_is_no_name_is_refused(self, prepared, name):
        with pytest.raises(ip.InputError, match="is no name of a dataset"):
            ip.open_source("tfds", name=name, split="train", data_dir=str(prepared[0]["tfrecord"]))

    @pytest.mark.parametrize("module", ["tensorflow_datasets", "etils.epath"])
    def test_what_is_not_installed_is_named(self, prepared, monkeypatch, module):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ip.InputError, match="which is not installed: pip install"):
            opened(prepared[0]["tfrecord"])

    def test_a_file_cut_inside_a_record_is_named(self, copy):
        (path,) = (copy / "imagenet2012/5.1.0").glob("imagenet2012-train*-00001-of-00003")
        os.truncate(path, path.stat().st_size * 2 // 3)
        with pytest.raises(ip.InputError, match=r"imagenet2012-train.*-00001-of-00003 is damaged or cut off"):
            opened(copy)

    def test_a_missing_file_is_named(self, copy):
        (path,) = (copy / "imagenet2012/5.1.0").glob("imagenet2012-train*-00001-of-00003")
        path.unlink()
        with pytest.raises(ip.InputError, match=r"cannot read .*-00001-of-00003: No such file"):
            opened(copy)


class TestTFRecordIndex:
    """Offsets are kept, trusted while the file is as it was, and found anew when it changed."""

    @pytest.fixture
    def path(self, prepared, tmp_path):
        (original,) = (prepared[0]["tfrecord"] / "imagenet2012/5.1.0").glob("imagenet2012-train*-00000-of-00003")
        return shutil.copy(original, tmp_path / "train.tfrecord-0")

    def test_it_agrees_with_tensorflows_own_reader(self, path):
        import tensorflow as tf

        records_there = [r.numpy() for r in tf.data.TFRecordDataset(str(path))]
        file = tfrecord.open_records(str(path))
        assert [file.read(i) for i in range(len(file))] == records_there

    def test_many_threads_read_more_files_than_are_kept_open(self, path, tmp_path, monkeypatch):
        monkeypatch.setattr(tfrecord, "_kept_open", functools.lru_cache(maxsize=2)(tfrecord._LocalFile))
        files = [tfrecord.TFRecordFile(str(shutil.copy(path, tmp_path / f"{i}.tfrecord"))) for i in range(8)]
        expected = [files[0].read(i) for i in range(len(files[0]))]
        with ThreadPoolExecutor(8) as threads:
            jobs = [(file, number) for _ in range(40) for number in range(len(expected)) for file in files]
            for (_, number), data in zip(jobs, threads.map(lambda job: job[0].read(job[1]), jobs), strict=True):
                assert data == expected[number]

    def test_it_is_kept_beside_the_file_and_used(self, path, monkeypatch):
        first = tfrecord.TFRecordFile(str(path)).offsets
        assert path.with_name(path.name + ".offsets").is_file()
        monkeypatch.setattr(tfrecord, "_find_records", None)
        np.testing.assert_array_equal(tfrecord.TFRecordFile(str(path)).offsets, first)

    def test_a_read_only_folder_has_its_index_in_the_cache(self, path, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path.with_name(path.name + ".offsets").mkdir()  # cannot be written, not even by root
        first = tfrecord.TFRecordFile(str(path)).offsets
        assert len(list((tmp_path / "cache/dcvit").glob("*.offsets"))) == 1
        assert not list(path.parent.glob("*.offsets.*"))
        monkeypatch.setattr(tfrecord, "_find_records", None)
        np.testing.assert_array_equal(tfrecord.TFRecordFile(str(path)).offsets, first)

    @pytest.mark.parametrize("harm", ["shorter", "touched", "damaged index", "empty index"])
    def test_a_change_of_the_file_or_the_index_makes_it_anew(self, path, harm):
        before = tfrecord.TFRecordFile(str(path)).offsets
        index = path.with_name(path.name + ".offsets")
        if harm == "shorter":
            os.truncate(path, int(before[-2]))
        elif harm == "touched":
            os.utime(path, ns=(1, 1))
        else:
            index.write_bytes(index.read_bytes()[:24] + bytes(8) if harm == "damaged index" else b"")
        after = tfrecord.TFRecordFile(str(path)).offsets
        np.testing.assert_array_equal(after, before[:-1] if harm == "shorter" else before)

    def test_a_file_cut_between_records_holds_fewer_than_dataset_info_says(self, prepared, tmp_path):
        root = shutil.copytree(prepared[0]["tfrecord"], tmp_path / "data")
        (path,) = (root / "imagenet2012/5.1.0").glob("imagenet2012-train*-00001-of-00003")
        whole = tfrecord.TFRecordFile(str(path))
        os.truncate(path, int(whole.offsets[-3]))
        message = f"-00001-of-00003 holds {len(whole) - 2} records, its dataset_info.json says {len(whole)}"
        with pytest.raises(ip.InputError, match=message):
            opened(root)


class TestFolder:
    @pytest.fixture
    def root(self, tmp_path):
        datasets.image_folder(tmp_path / "pets")
        return tmp_path / "pets"

    def test_each_folder_is_a_class_in_the_order_of_names(self, root):
        for split, n in (("train", 8), ("val", 4)):
            source = ip.open_source("folder", data_dir=str(root), split=split)
            assert source.class_names == ("cat", "dog", "fox")
            files = sorted((root / split).rglob("*.*"))
            assert [source.describe(i) for i in range(len(source))] == list(map(str, files))
            assert [source[i]["label"] for i in range(3 * n)] == [0] * n + [1] * n + [2] * n
            assert all(source[i]["image"] == file.read_bytes() for i, file in enumerate(files))
            assert source.nbytes() == sum(file.stat().st_size for file in files)

    @pytest.mark.parametrize(
        ("options", "listed"),
        [({}, ["train"]), ({"split": "val"}, ["train", "val"]), ({"split": "val", "val_fraction": 0.5}, ["train"])],
    )
    def test_no_folder_of_classes_is_listed_twice(self, root, monkeypatch, options, listed):
        seen, folders = [], folder._folders
        monkeypatch.setattr(folder, "_folders", lambda path: seen.append(path.name) or folders(path))
        ip.open_source("folder", data_dir=str(root / "train" if "val_fraction" in options else root), **options)
        assert seen == listed

    def test_one_folder_is_split_by_a_fraction_of_each_class(self, root):
        splits = {
            split: ip.open_source("folder", data_dir=str(root / "train"), split=split, val_fraction=0.25)
            for split in ("train", "val")
        }
        files = [{s.describe(i) for i in range(len(s))} for s in splits.values()]
        assert not files[0] & files[1]
        assert files[0] | files[1] == {str(f) for f in (root / "train").rglob("*.*")}
        assert np.bincount(splits["val"].labels).tolist() == [2, 2, 2]
        assert np.bincount(splits["train"].labels).tolist() == [6, 6, 6]

    def test_a_subset_of_the_classes_keeps_their_numbers(self, root, tmp_path):
        shutil.copytree(root / "val", tmp_path / "a" / "test")
        shutil.rmtree(tmp_path / "a" / "test" / "cat")
        options = {"data_dir": str(tmp_path / "a"), "split": "test", "classes_from": str(root / "train")}
        source = ip.open_source("folder", **options)
        assert sorted(set(source.labels.tolist())) == [1, 2]
        assert source.class_names == ("cat", "dog", "fox")

    def test_what_is_held_out_stays_so_when_files_are_added(self, root):
        def held_out():
            source = ip.open_source("folder", data_dir=str(root / "train"), split="val", val_fraction=0.5)
            return {source.describe(i) for i in range(len(source))}

        before = held_out()
        for name in ("000a.jpg", "zzz.jpg"):
            shutil.copy(root / "val" / "cat" / "000.jpg", root / "train" / "cat" / name)
        assert len(before - held_out()) <= 1

    def test_other_and_hidden_files_are_passed_over(self, root):
        before = len(ip.open_source("folder", data_dir=str(root)))
        (root / "train" / "cat" / ".checkpoints").mkdir()
        shutil.copy(root / "val" / "cat" / "000.jpg", root / "train" / "cat" / ".checkpoints" / "000.jpg")
        os.mkfifo(root / "train" / "cat" / "pipe.jpg")
        (root / "train" / "cat" / "gone.jpg").symlink_to("/nowhere")
        (root / "train" / "cat" / "folder.jpg").mkdir()
        (root / "train" / "cat" / "notes.txt").write_text("x")
        (root / "train" / "cat" / "._a.jpg").write_text("x")
        (root / "train" / ".cache").mkdir()
        assert len(ip.open_source("folder", data_dir=str(root))) == before

    @pytest.mark.parametrize(
        ("harm", "options", "error", "message"),
        [
            ("new class in val", {"split": "val"}, ip.InputError, "class 'emu' of .*val is not among the 3 of .*train"),
            ("empty class", {}, ip.InputError, "class folder .*cat holds no images"),
            ("no classes", {}, ip.InputError, "train holds no class folders"),
            ("", {"split": "test"}, ip.MissingDataError, r"no folder .*test \(beside it: train, val\)"),
            ("", {"classes_from": "/nowhere"}, ip.MissingDataError, "no folder /nowhere"),
            ("", {"val_fraction": 0.25}, ip.InputError, "holds the folders train, val: take away val_fraction"),
            ("", {"data_dir": "/nowhere"}, ip.MissingDataError, "no folder /nowhere"),
            ("", {"val_fraction": 1.5}, ip.InputError, "between 0 and 1"),
            ("", {"val_fraction": 0.1, "split": "test"}, ip.InputError, "no split 'test'"),
            ("", {"data": "x"}, ip.InputError, "did you mean 'data_dir'"),
        ],
    )
    def test_what_is_wrong_is_named(self, root, harm, options, error, message):
        if harm == "new class in val":
            (root / "val" / "cat").rename(root / "val" / "emu")
        elif harm == "empty class":
            for file in (root / "train" / "cat").iterdir():
                file.unlink()
        elif harm == "no classes":
            shutil.rmtree(root / "train")
            (root / "train").mkdir()
        with pytest.raises(error, match=message):
            ip.open_source("folder", **{"data_dir": str(root), **options})

    def test_a_class_too_small_to_share_is_named(self, root):
        for file in sorted((root / "train" / "dog").iterdir())[1:]:
            file.unlink()
        with pytest.raises(ip.InputError, match=r"dog has 1 image\(s\), too few"):
            ip.open_source("folder", data_dir=str(root / "train"), val_fraction=0.5)

    def test_a_file_that_went_away_is_named(self, root):
        source = ip.open_source("folder", data_dir=str(root))
        gone = source.describe(2)
        Path(gone).unlink()
        with pytest.raises(ip.InputError, match=f"{gone}: No such file"):
            list(ip.eval_batches(source, PP, 24))


@pytest.mark.parametrize("kind", ["digits", "folder"])
def test_a_limit_takes_the_first_examples(kind, tmp_path):
    if kind == "folder":
        datasets.image_folder(tmp_path / "pets")
    options = {"data_dir": str(tmp_path / "pets")} if kind == "folder" else {}
    whole, first = ip.open_source(kind, **options), ip.open_source(kind, limit=5, **options)
    assert len(first) == 5
    assert first.class_names == whole.class_names
    assert 0 < first.nbytes() < whole.nbytes()
    for i in range(5):
        assert first.describe(i) == whole.describe(i)
        np.testing.assert_array_equal(first[i]["image"], whole[i]["image"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "digts"}, "did you mean 'digits'"),
        ({"kind": "digits", "split": "tset"}, "did you mean 'test'"),
        ({"kind": "digits", "spilt": "test"}, "did you mean 'split'"),
        ({"kind": "digits", "split": 3}, "split=3 should be of type str"),
        ({"kind": "digits", "limit": 0}, "limit=0 should be 1 or more"),
        ({"kind": "tfds", "name": "imagenet2012"}, "missing a required argument: 'split'"),
    ],
)
def test_a_bad_source_is_named(options, message):
    with pytest.raises(ip.InputError, match=message):
        ip.open_source(**options)
