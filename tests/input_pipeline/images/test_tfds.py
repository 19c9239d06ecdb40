"""Datasets of tensorflow-datasets: the stored examples of every split, and errors that name what is wrong."""

import os
from collections import Counter

import image_datasets
import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline import files, tfrecord


def open_imagenet(root, split="train", **options):
    return ip.open_source("tfds", name="imagenet2012", split=split, data_dir=str(root), **options)


def second_shard(root):
    (path,) = (root / "imagenet2012/5.1.0").glob("imagenet2012-train*-00001-of-00003")
    return path


class TestExamples:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("file_format", "split", "chosen"),
        [("tfrecord", "train", slice(None)), ("tfrecord", "train[:95%]", slice(114)),
         ("array_record", "train[95%:]", slice(114, None)), ("array_record", "train[35:85]", slice(35, 85))],
    )  # fmt: skip
    def test_split_contains_the_stored_examples(self, imagenet, file_format, split, chosen):
        roots, examples = imagenet
        source = open_imagenet(roots[file_format], split)
        expected = examples["train"][chosen]
        assert len(source) == len(expected)
        for i, example in enumerate(expected):
            found = source[i]
            assert (found["image"], found["label"]) == (example["image"], example["label"])
            assert found["file_name"].decode() == example["file_name"]

    def test_class_names_size_and_location_are_known(self, imagenet):
        for root in imagenet[0].values():
            source = open_imagenet(root)
            assert len(source.class_names) == 1000
            assert source.class_names[0] == "n01440764"
            stored = sum(len(example["image"]) for example in imagenet[1]["train"])
            assert stored < source.nbytes() < 2 * stored
            assert "imagenet2012-train." in source.describe(119)
            assert source.describe(119).endswith("-00002-of-00003, record 39")

    def test_multiple_labels_become_a_multi_hot_vector(self, tmp_path):
        pytest.importorskip("tensorflow_datasets")
        examples = image_datasets.imagenet2012_real(tmp_path, n=9)["validation"]
        source = ip.open_source("tfds", name="imagenet2012_real", split="validation", data_dir=str(tmp_path))
        pp = 'onehot(1000, key="real_label")|keep("labels")'
        (batch,) = ip.eval_batches(source, pp, 9)
        for hot, example in zip(batch["labels"], examples, strict=True):
            assert np.flatnonzero(hot).tolist() == sorted(example["real_label"])


class TestNames:
    def test_only_config_of_a_dataset_need_not_be_named(self, tmp_path):
        pytest.importorskip("tensorflow_datasets")
        image_datasets.derived(tmp_path, "imagenet_v2", n=4)
        for name in ("imagenet_v2", "imagenet_v2/matched-frequency", "imagenet_v2:3.0.0"):
            assert len(ip.open_source("tfds", name=name, split="test", data_dir=str(tmp_path))) == 4

    def test_error_about_a_missing_dataset_says_how_to_prepare_it(self, imagenet, tmp_path):
        with pytest.raises(ip.MissingDataError) as error:
            open_imagenet(tmp_path)
        assert "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unextracted" in str(error.value)
        assert f"in {tmp_path}/downloads/manual" in str(error.value)
        command = f"tfds.builder('imagenet2012', data_dir='{tmp_path}').download_and_prepare()"
        assert command in str(error.value)
        options = {"split": "train", "data_dir": str(imagenet[0]["tfrecord"])}
        with pytest.raises(ip.MissingDataError, match=r"'imagenet2012:9\.9\.9' .*existing versions: 5\.1\.0"):
            ip.open_source("tfds", name="imagenet2012:9.9.9", **options)

    def test_unknown_splits_and_invalid_names_are_refused(self, imagenet):
        with pytest.raises(ip.InputError, match=r"no split 'test'; known: train \(120\), validation \(10\)"):
            open_imagenet(imagenet[0]["tfrecord"], "test")
        with pytest.raises(ip.InputError, match="is not a dataset name"):
            ip.open_source("tfds", name="../x", split="train", data_dir=str(imagenet[0]["tfrecord"]))


class TestStores:
    @pytest.fixture
    def url(self, imagenet, object_store, tmp_path, monkeypatch):
        """The URL of the TFRecord dataset in a store."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        root, url = imagenet[0]["tfrecord"], f"{object_store.bucket}/data"
        for path in root.rglob("*"):
            if path.is_file() and path.suffix != ".offsets":
                object_store.write(f"{url}/{path.relative_to(root)}", path.read_bytes())
        return url

    @pytest.mark.slow
    def test_examples_in_a_store_are_those_on_the_disk(self, imagenet, url, monkeypatch):
        """The state of a remote file takes a request: one when it is opened, and few while its records are read."""
        asked, state = Counter(), files.file_state
        for module in (files, tfrecord):
            monkeypatch.setattr(module, "file_state", lambda path: asked.update([path]) or state(path))
        local, source = open_imagenet(imagenet[0]["tfrecord"], "train[35:85]"), open_imagenet(url, "train[35:85]")
        assert {asked[path] for path in asked if "://" in path} == {1}
        assert [source[i] for i in range(50)] == [local[i] for i in range(50)]
        assert max(asked[path] for path in asked if "://" in path) < 10
        assert source.class_names == local.class_names
        assert source.describe(0).startswith(f"{url}/imagenet2012/5.1.0/imagenet2012-train.tfrecord-0000")

    @pytest.mark.slow
    def test_changed_object_and_missing_dataset_are_refused(self, url, object_store):
        source = open_imagenet(url)
        name = source.describe(0).partition(",")[0]
        content = bytearray(object_store.read(name))
        content[20] ^= 1
        object_store.write(name, bytes(content))
        with pytest.raises(ip.InputError, match=f"{name} was changed or replaced after it was opened"):
            source[0]
        with pytest.raises(ip.InputError, match="record 0 is damaged: its checksum is wrong"):
            open_imagenet(url)[0]
        with pytest.raises(ip.MissingDataError, match=f"no prepared dataset 'none' in {url}"):
            ip.open_source("tfds", name="none", split="train", data_dir=url)
        with pytest.raises(ip.InputError, match=r"cannot read .*none/data: .*bucket"):
            open_imagenet(url.replace("bucket", "none"))


class TestDamage:
    @pytest.mark.slow
    def test_changed_byte_never_changes_an_example(self, imagenet_copy):
        """Both formats have a checksum of every record."""
        path = second_shard(imagenet_copy)
        content, rng = path.read_bytes(), np.random.default_rng(0)
        source = open_imagenet(imagenet_copy)
        expected = [source[i] for i in range(len(source))]
        used = len(content.rstrip(b"\0")) if "array" in path.name else len(content)
        for at in rng.integers(used, size=12):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.integers(8)]) + content[at + 1 :])
            refused = 0
            try:
                source = open_imagenet(imagenet_copy)
            except ip.InputError:
                continue
            for i, example in enumerate(expected):
                try:
                    assert source[i] == example
                except ip.InputError as e:
                    refused += "damaged" in str(e) or "cannot read" in str(e)
            assert refused or "array" in path.name  # ArrayRecord files contain unused padding

    def test_dataset_with_a_damaged_description_is_named(self, imagenet_copy):
        (imagenet_copy / "imagenet2012/5.1.0" / "dataset_info.json").write_text("{broken")
        with pytest.raises(ip.InputError, match=r"imagenet2012/5\.1\.0 is damaged, prepare it again: "):
            open_imagenet(imagenet_copy)

    def test_file_cut_off_inside_a_record_is_named(self, imagenet_copy):
        path = second_shard(imagenet_copy)
        os.truncate(path, path.stat().st_size * 2 // 3)
        with pytest.raises(ip.InputError, match=r"imagenet2012-train.*-00001-of-00003 is damaged or cut off"):
            open_imagenet(imagenet_copy)

    @pytest.mark.parametrize("imagenet_copy", ["tfrecord"], indirect=True)
    def test_file_cut_off_between_records_contradicts_dataset_info(self, imagenet_copy):
        path = second_shard(imagenet_copy)
        complete = tfrecord.TFRecordFile(str(path))
        os.truncate(path, int(complete.offsets[-3]))
        message = f"-00001-of-00003 has {len(complete) - 2} records, but its dataset_info.json says {len(complete)}"
        with pytest.raises(ip.InputError, match=message):
            open_imagenet(imagenet_copy)
