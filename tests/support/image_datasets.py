"""Small images, image folders and datasets of tensorflow-datasets, written without network and equal in every run."""

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

FileFormat = Literal["tfrecord", "array_record"]
Example = dict[str, Any]

LABELS = (0, 1, 207, 388, 812, 999)  # the classes of ImageNet that the datasets below contain
SUFFIXES = (".jpg", ".png", ".webp")


def image_array(seed: int, height: int = 60, width: int = 80) -> np.ndarray:
    """Smooth noise with the 1/f spectrum of natural images: uint8 of shape (height, width, 3).

    The channels are similar but not equal, and a slight blur makes neighboring pixels similar.
    """
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf  # removes the constant; the mean is set below
    noise = rng.normal(size=(4, height, width))
    spectrum = np.exp(-((frequency / 0.2) ** 2)) / frequency
    gray, *colors = np.fft.irfft2(np.fft.rfft2(noise) * spectrum, s=(height, width))
    pixels = np.stack([gray + color / 3 for color in colors], axis=-1)
    return np.clip(128 + 50 * pixels / pixels.std(), 0, 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of an image file; `kind` and the options are arguments of Pillow's `save`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(
    seed: int, height: int = 60, width: int = 80, mode: str = "RGB", quality: int = 90, **save_options: Any
) -> bytes:
    """`image_array` as a JPEG file; `mode` is Pillow's mode RGB, L or CMYK."""
    image = Image.fromarray(image_array(seed, height, width)).convert(mode)
    return encoded(image, "JPEG", quality=quality, **save_options)


def make_tfds(
    root: Path,
    name: str,
    splits: Mapping[str, Sequence[Example]],
    *,
    file_format: FileFormat = "tfrecord",
    features: Any = None,
    version: str = "5.1.0",
    config: str | None = None,
) -> dict[str, list[Example]]:
    """Write a dataset with tensorflow-datasets to root/name[/config]/version; return its examples in their order.

    The order of a split follows from a hash of each example's key, which is its "file_name" or, without one, its index.
    Images that are given as bytes are stored unchanged. Every split has three shards, or as many as the smallest split
    has examples if that is less. `features` is a dict of features, by default those of imagenet2012.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import hashing

    class Writer(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
        """Writer of given examples."""

        code_path = None  # the default needs importlib_resources, which tfds 4.9.10 does not declare

    tfds.disable_progress_bar()
    keyed = {split: [(e.get("file_name", i), e) for i, e in enumerate(splits[split])] for split in splits}
    writer = Writer(
        name=name,
        version=version,
        config=config,
        data_dir=root,
        features=tfds.features.FeaturesDict(features or imagenet_features()),
        split_datasets=keyed,
        file_format=file_format,
    )
    writer.download_and_prepare(
        download_config=tfds.download.DownloadConfig(
            num_shards=min(3, *map(len, splits.values())),
            try_download_gcs=False,
        )
    )
    hashers = {split: hashing.Hasher(split) for split in splits}
    return {split: [e for _, e in sorted(keyed[split], key=lambda k: hashers[split].hash_key(k[0]))] for split in keyed}


def imagenet_features() -> dict[str, Any]:
    """The features of imagenet2012 and of most datasets derived from it."""
    import tensorflow_datasets as tfds

    label = tfds.features.ClassLabel(names_file=label_file())
    return {"image": tfds.features.Image(encoding_format="jpeg"), "label": label, "file_name": tfds.features.Text()}


def label_file() -> Path:
    """The file of ImageNet's WordNet ids, one per line, in tensorflow-datasets."""
    import tensorflow_datasets as tfds

    return Path(tfds.core.tfds_path("datasets/imagenet2012/labels.txt"))


def labeled(n: int, seed: int, file_name: str) -> list[Example]:
    """Examples with imagenet2012's features; `file_name` is formatted with `i`, `label` and `wnid`.

    Images have different sizes and shapes, and labels cycle through LABELS.
    """
    wnids = label_file().read_text().split()
    examples = []
    for i in range(n):
        height, width = np.random.default_rng((seed, i)).integers(40, 100, size=2).tolist()
        label = LABELS[i % len(LABELS)]
        name = file_name.format(i=i, label=label, wnid=wnids[label])
        examples.append({"image": jpeg(seed + i, height, width), "label": label, "file_name": name})
    return examples


def imagenet2012(
    root: Path, file_format: FileFormat = "tfrecord", n_train: int = 40, n_val: int = 10
) -> dict[str, list[Example]]:
    """Write imagenet2012/5.1.0 with the splits train and validation."""
    splits = {
        "train": labeled(n_train, 10_000, "{wnid}_{i}.JPEG"),
        "validation": labeled(n_val, 20_000, "ILSVRC2012_val_{i:08}.JPEG"),
    }
    return make_tfds(root, "imagenet2012", splits, file_format=file_format)


def imagenet2012_real(root: Path, n: int = 10) -> dict[str, list[Example]]:
    """Write imagenet2012_real/1.0.0: imagenet2012's validation images with, in turn, no, one and three real labels.

    A single label is the original label. Three labels include the original label in every second case.
    """
    import tensorflow_datasets as tfds

    examples = labeled(n, 20_000, "ILSVRC2012_val_{i:08}.JPEG")
    for i, example in enumerate(examples):
        label = example["original_label"] = example.pop("label")
        several = [(label + k) % 1000 for k in ((0, 5, 500) if i % 2 else (3, 5, 500))]
        example["real_label"] = ([], [label], several)[i % 3]
    features = imagenet_features()
    features["original_label"] = features.pop("label")
    features["real_label"] = tfds.features.Sequence(imagenet_features()["label"])
    splits = {"validation": examples}
    return make_tfds(root, "imagenet2012_real", splits, features=features, version="1.0.0")


DERIVED = {  # version, configuration, first seed and names of the files of datasets with the split "test"
    "imagenet_v2": ("3.0.0", "matched-frequency", 30_000, "{label}/{i:040x}.jpeg"),
    "imagenet_a": ("0.1.0", None, 40_000, "0.00{i}_wasp _ bee_0.9.jpg"),
    "imagenet_r": ("0.2.0", None, 50_000, "{wnid}/art_{i}.jpg"),
    "imagenet_sketch": ("1.0.0", None, 60_000, "{wnid}/sketch_{i}.JPEG"),
}


def derived(root: Path, name: str, n: int = 10) -> dict[str, list[Example]]:
    """Write a dataset of `DERIVED`; the images of ImageNet-Sketch are JPEGs, but their feature does not say so."""
    import tensorflow_datasets as tfds

    version, config, seed, file_name = DERIVED[name]
    features = imagenet_features()
    if name == "imagenet_sketch":
        features["image"] = tfds.features.Image()
    return make_tfds(
        root, name, {"test": labeled(n, seed, file_name)}, features=features, version=version, config=config
    )


def image_folder(root: Path, train: int = 8, val: int = 4) -> None:
    """Write root/train/CLASS/* and root/val/CLASS/* with `train` and `val` images per class, suffixes in turn."""
    for seed, (split, n) in enumerate({"train": train, "val": val}.items()):
        for c, name in enumerate(("cat", "dog", "fox")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                path = folder / f"{i:03}{SUFFIXES[i % 3]}"
                Image.fromarray(image_array(10_000 * seed + 100 * c + i)).save(path)


def solar_cell_package(root: Path, count: int) -> dict[str, float]:
    """Write generated photographs in the layout of the package elpv-dataset; return the probability of each file."""
    data = root / "elpv_dataset" / "data"
    (data / "images").mkdir(parents=True)
    (root / "elpv_dataset" / "__init__.py").touch()
    found = {f"cell{i:04}.png": (0.0, 1 / 3, 2 / 3, 1.0)[i % 4] for i in range(1, count + 1)}
    for seed, name in enumerate(found):
        Image.fromarray(image_array(seed, 300, 300)[..., 0]).save(data / "images" / name)
    lines = [f"images/{name}  {probability!r:<18}  mono\n" for name, probability in found.items()]
    (data / "labels.csv").write_text("".join(lines))
    return found


def odd_images() -> dict[str, bytes]:
    """Unusual image files by name: rare modes, several frames and damaged files.

    "exif6.jpg" is stored 80 pixels wide and 60 high, and its EXIF orientation is a quarter turn.
    """
    pixels = image_array(0)
    rgb = Image.fromarray(pixels)
    alpha = np.broadcast_to(np.linspace(0, 255, 80).astype(np.uint8), (60, 80))
    frames = [Image.fromarray(image_array(seed)) for seed in range(3)]
    animation = {"save_all": True, "append_images": frames[1:], "duration": 100, "loop": 0}
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn clockwise
    plain = jpeg(0)
    return {
        "cmyk.jpg": jpeg(0, mode="CMYK"),
        "gray.jpg": jpeg(0, mode="L"),
        "rgba.png": encoded(Image.fromarray(np.dstack([pixels, alpha])), "PNG"),
        "palette.png": encoded(rgb.quantize(64), "PNG"),
        "gray16.png": encoded(Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "PNG"),
        "animated.gif": encoded(frames[0], "GIF", **animation),
        "animated.webp": encoded(frames[0], "WEBP", **animation),
        "exif6.jpg": jpeg(0, exif=exif),
        "webp.webp": encoded(rgb, "WEBP"),
        "empty.jpg": b"",
        "truncated.jpg": plain[: len(plain) // 2],
        "text.jpg": b"hello",
    }


def bomb_png(width: int, height: int) -> bytes:
    """A PNG whose valid header announces RGB pixels, with data for one pixel."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, not interlaced
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(4))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
