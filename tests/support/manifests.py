"""Images with the colors red, green and blue in all combinations, and manifests that list them."""

import csv

import numpy as np
from PIL import Image

COLORS = ("blue", "green", "red")  # sorted, as inferred classes are


def colored(number):
    """Return an image whose colors are the bits of its number, with noise, and the names of these colors."""
    names = [name for bit, name in enumerate(COLORS) if number >> bit & 1]
    pixels = np.random.default_rng(number).integers(0, 60, (16, 16, 3))
    for name in names:
        pixels[..., ("red", "green", "blue").index(name)] += 180
    return Image.fromarray(pixels.astype(np.uint8)), names


def write_images(folder, count):
    """Write images NUMBER.png below `folder`/images; return the relative path and the colors of each."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(count):
        image, names = colored(number)
        image.save(folder / "images" / f"{number:03}.png")
        rows.append((f"images/{number:03}.png", names))
    return rows


def write_csv(path, header, rows):
    """Write a CSV file, and return its path as a string."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def multilabel_manifest(folder, unknown=()):
    """Write images and labels.csv with the columns path, label (colors joined by "|") and split; return its path.

    Of 64 rows, 48 are for training. Rows with a number in `unknown` have an empty label.
    """
    rows = [
        (path, "" if i in unknown else "|".join(names) or "|", "train" if i < 48 else "val")
        for i, (path, names) in enumerate(write_images(folder, 64))
    ]
    return write_csv(folder / "labels.csv", ("path", "label", "split"), rows)
