"""Files of data that are changed or replaced while a run reads them, or before it is resumed."""

import json
import os
import shutil

import corpora
import image_datasets
import manifests
import pytest

import input_pipeline as ip
from dcvit.errors import ConfigError
from dcvit.runs import identity
from input_pipeline import files

TEXTS = [f"text number {i} of several" for i in range(60)]
LINES = [{"inputs": f"{i} + 1", "targets": f"{i + 1}", "texts": f"a\nis [ {i} ]", "task_id": "t"} for i in range(60)]


def folder(root):
    image_datasets.image_folder(root)
    return {"data_dir": str(root)}, root / "train/dog/002.webp"


def parquet(root):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir()
    for shard in range(3):
        images = [image_datasets.jpeg(10 * shard + i) for i in range(6)]
        name = f"train-{shard:05}-of-00003.parquet"
        pq.write_table(pa.table({"image": images, "label": [0, 1] * 3}), root / name, row_group_size=2)
    return {"data_dir": str(root)}, root / "train-00001-of-00003.parquet"


def manifest(root):
    rows = [(path, "|".join(names)) for path, names in manifests.write_images(root, 12)]
    return {"manifest": manifests.write_csv(root / "labels.csv", ("path", "label"), rows), "sep": "|"}, root / rows[7][
        0
    ]


def tfds(root, file_format="tfrecord"):
    pytest.importorskip("tensorflow_datasets")
    image_datasets.imagenet2012(root, file_format, n_train=12, n_val=3)
    (file,) = (root / "imagenet2012/5.1.0").glob("imagenet2012-train*-00001-of-00003")
    return {"name": "imagenet2012", "split": "train", "data_dir": str(root)}, file


def input_ids(root):
    pytest.importorskip("tensorflow")
    records = [corpora.example({"input_ids": [i] * 9}) for i in range(20)]
    return {"path": str(root), "context": 8, "vocab_size": 99}, corpora.write_input_ids(root / "a.tfrecord", records)


def megatron(root):
    root.mkdir()
    prefix = corpora.write_megatron(root / "pile", [[i] * 9 for i in range(20)])
    return {"path": str(root), "context": 8, "vocab_size": 99}, prefix.with_suffix(".bin")


def text(root):
    corpora.write(root / "a.txt", b"one")
    return {"path": str(root), "context": 8}, corpora.write_jsonl(root / "b.jsonl", TEXTS)


def lines(root):
    path = corpora.write(root / "a.jsonl", "".join(f"{json.dumps(line)}\n" for line in LINES).encode())
    return {"path": str(root), "context": 32}, path


KINDS = {
    "folder": folder, "manifest": manifest, "parquet": parquet, "tfds": tfds,
    "array_record": lambda root: tfds(root, "array_record"),
    "input_ids": input_ids, "megatron": megatron, "text": text, "spans": lines, "answers": lines,
}  # fmt: skip
READ_ONCE = {"text", "spans", "answers"}  # when they are opened


def opened(kind, options):
    return ip.open_source({"array_record": "tfds"}.get(kind, kind), **options)


def replace(file, change):
    """Replace a file, or change it in place, to other content of the same size."""
    content, status = bytearray(file.read_bytes()), file.stat()
    if file.suffix == ".jsonl":
        content = content.replace(b"1", b"2")
    else:
        content[len(content) // 3] ^= 1
    if change == "replaced":
        (file.parent / "new").write_bytes(content)
        (file.parent / "new").replace(file)
    else:
        file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "changed")))


@pytest.mark.parametrize(
    ("kind", "change"), [("folder", "replaced"), *((kind, "changed") for kind in sorted(KINDS.keys() - READ_ONCE))]
)
def test_file_that_is_changed_or_replaced_ends_the_run(tmp_path, kind, change):
    options, file = KINDS[kind](tmp_path / "data")
    source = opened(kind, options)
    replace(file, change)
    for read in (lambda: [source[i] for i in range(len(source))], source.opened.digests):
        with pytest.raises(ip.ReadingError, match=f"{file} was changed or replaced after it was opened") as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_run_is_resumed_on_a_copy_of_its_files_but_not_on_others(tmp_path, kind):
    options, file = KINDS[kind](tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    copied = {
        k: v.replace(f"{tmp_path}/data", f"{tmp_path}/copy") if isinstance(v, str) else v for k, v in options.items()
    }
    saved, copy = (json.loads(json.dumps(identity.data_identity(opened(kind, o)))) for o in (options, copied))
    older = {key: value for key, value in saved.items() if key != "files"}
    for record in (saved, older):
        assert identity.check_same_run(tmp_path, {"data": record}, {}, copy) == []
    replace(file, "replaced")
    found = identity.data_identity(opened(kind, options))
    with pytest.raises(ConfigError, match=rf"on other data: .*data\.files \(.*{file.name}.* changed\)") as error:
        identity.check_same_run(tmp_path, {"data": saved}, {}, found)
    assert "\n" not in str(error.value)
    assert identity.check_same_run(tmp_path, {"data": saved}, {}, found, ["data"])


def test_content_of_large_files_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECES", 8)
    monkeypatch.setattr(files, "PIECE_BYTES", 4)
    paths = [str(corpora.write(tmp_path / f"{i:03}", bytes(100))) for i in range(70)]

    def changed(numbers, at):
        before = files.OpenedFiles(paths, tmp_path).digests()
        for number in numbers:
            corpora.write(tmp_path / f"{number:03}", bytes(at) + b"x" + bytes(99 - at))
        after = files.OpenedFiles(paths, tmp_path).digests()
        assert before.keys() == after.keys()
        assert len(before) == files.ENTRIES
        return [name for name in before if before[name] != after[name]]

    assert changed([0], 99) == ["000"]
    assert changed([1], 99) == []  # every ninth file is read
    assert changed([9], 99) == ["009"]
