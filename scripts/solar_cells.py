"""Class folders of the photographs in the PyPI package elpv-dataset, for configs/vit_folder.py.

    pip install elpv-dataset
    python scripts/solar_cells.py runs/solar_cells [--size 96]

The package has 2,624 electroluminescence images of solar cells, 300×300 pixels, with the probability of a defect that
experts have assigned (Deitsch et al., 2019). A cell is in the class `defective` if it is above 1/2, else `functional`.
A quarter of the images is the split `val`, by a hash of their names. They are written as SIZE×SIZE pixels to
OUT/{train,val}/{defective,functional}. Their license is CC BY-NC-SA 4.0.
"""

import argparse
import hashlib
import importlib.util
import sys
from pathlib import Path

from PIL import Image

PACKAGE = "elpv_dataset"


def labels(data: Path) -> list[tuple[Path, float]]:
    """Return the file and the probability of a defect of each cell, from lines such as "images/a.png 0.3333 mono"."""
    rows = [line.split() for line in (data / "labels.csv").read_text().splitlines()]
    return [(data / row[0], float(row[1])) for row in rows]


def place(name: str, probability: float) -> str:
    """Return SPLIT/CLASS of an image."""
    split = "train" if hashlib.sha256(name.encode()).digest()[0] % 4 else "val"
    return f"{split}/{'defective' if probability > 0.5 else 'functional'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--size", type=int, default=96, help="width and height in pixels (default 96)")
    args = parser.parse_args()
    if not 1 <= args.size <= 300:
        parser.error(f"--size {args.size}: expected 1 to 300")
    if args.out.exists():
        sys.exit(f"error: {args.out} exists; give a new folder")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("error: the photographs are not installed: pip install elpv-dataset")
    counts: dict[str, int] = {}
    for path, probability in labels(Path(spec.origin).parent / "data"):
        folder = place(path.name, probability)
        counts[folder] = counts.get(folder, 0) + 1
        (args.out / folder).mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            small = image.convert("L").resize((args.size, args.size), Image.Resampling.LANCZOS)
        small.save(args.out / folder / path.name)
    for folder, count in sorted(counts.items()):
        print(f"{args.out / folder}: {count}")
    val = [count for folder, count in counts.items() if folder.startswith("val/")]
    print(f"the larger class of val: {100 * max(val) / sum(val):.1f} %")


if __name__ == "__main__":
    main()
