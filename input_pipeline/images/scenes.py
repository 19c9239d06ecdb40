"""Scenes of handwritten digits with a marker that asks a question about them, made when they are read.

The digits are scikit-learn's, see `input_pipeline.images.digits`. A scene is a grid of 3×3 places. A marker stands in
one of them and digits stand in some of the others, each moved by up to one pixel. The shape of the marker selects a
relation, and its fill an attribute of the digit that the relation finds:

    relation   shape       finds
    right      bar         the digit right of the marker
    left       post        the digit left of it
    above      triangle    the digit above it
    below      disc        the digit below it
    pair       cross       the digit that occurs twice, in two handwritings
    count      hourglass   the number of digits that are the same as the one right of the marker, itself included

    attribute  fill        label
    same       solid       the digit or number itself
    next       outline     the next one, 0 after 9
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from input_pipeline import source as base
from input_pipeline.errors import InputError, check_split
from input_pipeline.images import digits
from input_pipeline.shuffle import Draw, draws, take

SPLITS = ("train", "validation", "test")
VALIDATION_DIGITS = 240  # of the 1,437 training digits
PLACES, PITCH, SIZE = 3, 9, 27  # places in a row; pixels from one to the next; pixels of a row of the image
DIGIT = 8  # pixels of a row of a digit or marker
CLASSES = 10
RELATIONS = ("right", "left", "above", "below", "pair", "count")
ATTRIBUTES = ("same", "next")
STEPS = {"right": (0, 1), "left": (0, -1), "above": (-1, 0), "below": (1, 0), "count": (0, 1)}  # (rows, columns)
MOST_DISTRACTORS = 4
MOST_COPIES = 3  # of the digit that is counted, besides the one next to the marker
DRAWS = 64  # an example draws at most this many random numbers


class Scene(NamedTuple):
    """The content of a scene: its question and label, and the digit in each place (None: empty, or the marker's)."""

    relation: str
    attribute: str
    marker: int  # its place, 0 … 8 in reading order
    places: tuple[int | None, ...]
    label: int


class Source(base.Source):
    """Scenes of up to eight digits: `image` (uint8, 27×27×1) and `label` (int32, 0 … 9).

    The splits have different handwritten digits: 1,197, 240 and 360. Example i is a function of (seed, split, i) only.
    """

    class_names = tuple("0123456789")

    def __init__(self, split: str = "train", seed: int = 0, examples: int = 1_000_000):
        """
        Args:
          split: "train", "validation" or "test".
          seed: seed of all random choices.
          examples: number of scenes.

        Raises:
          InputError: the split is unknown, or a number is out of range.
        """
        check_split("scenes", split, SPLITS)
        if examples < 1 or seed < 0:
            raise InputError(f"scenes: examples={examples}, seed={seed}: expected 1 or more, and 0 or more")
        self.split, self.seed, self.examples = split, seed, examples
        source = digits.Source("test" if split == "test" else "train")
        part = {"train": slice(VALIDATION_DIGITS, None), "validation": slice(VALIDATION_DIGITS), "test": slice(None)}
        images, labels = source.images[part[split], ..., 0], source.labels[part[split]]
        self.digits = tuple(images[labels == digit] for digit in range(CLASSES))
        self.markers = {(relation, fill): marker(relation, fill) for relation in RELATIONS for fill in ATTRIBUTES}

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> base.Example:
        if not 0 <= index < self.examples:
            raise IndexError(index)
        scene, draw = self._scene(index)
        image = np.zeros((SIZE, SIZE), np.uint8)
        used: dict[int, list[int]] = {}  # the handwritings of a digit that are in the scene
        for place, digit in enumerate(scene.places):
            if place == scene.marker:
                drawn = self.markers[scene.relation, scene.attribute]
            elif digit is None:
                continue
            else:
                free = [i for i in range(len(self.digits[digit])) if i not in used.setdefault(digit, [])]
                used[digit].append(free[draw(len(free))])
                drawn = self.digits[digit][used[digit][-1]]
            top, left = (PITCH * at + draw(2) for at in divmod(place, PLACES))
            image[top : top + DIGIT, left : left + DIGIT] = drawn
        return {"image": image[..., None], "label": np.int32(scene.label)}

    def describe(self, index: int) -> str:
        """Return the split, the number of a scene and its question."""
        scene, _ = self._scene(index)
        return f"scenes, split {self.split}, example {index}, {scene.relation}/{scene.attribute}"

    def nbytes(self) -> int:
        """Return the size of all images in bytes."""
        return self.examples * SIZE * SIZE

    def _scene(self, index: int) -> tuple[Scene, Draw]:
        """Return the content of scene `index`, and the function that draws the random numbers for its pixels."""
        draw = draws(self.seed, SPLITS.index(self.split), index, DRAWS)
        relation = RELATIONS[draw(len(RELATIONS))]
        attribute = ATTRIBUTES[draw(len(ATTRIBUTES))]
        return make_scene(relation, attribute, draw), draw


def make_scene(relation: str, attribute: str, draw: Draw) -> Scene:
    """Return a random scene for a question, with one to four digits that the question is not about."""
    step = STEPS.get(relation, (0, 0))
    fitting = [place for place in range(PLACES**2) if _neighbor(place, step) is not None]
    marker_at = fitting[draw(len(fitting))]
    free = [place for place in range(PLACES**2) if place != marker_at]
    kinds = take(range(CLASSES), CLASSES, draw)
    found = kinds.pop()
    if relation == "pair":
        answer, targets = found, [free.pop(draw(len(free))) for _ in range(2)]
    else:
        neighbor = _neighbor(marker_at, step)
        assert neighbor is not None
        free.remove(neighbor)
        copies = draw(MOST_COPIES + 1) if relation == "count" else 0
        answer = copies + 1 if relation == "count" else found
        targets = [neighbor, *(free.pop(draw(len(free))) for _ in range(copies))]
    places: list[int | None] = [None] * PLACES**2
    for place in targets:
        places[place] = found
    for _ in range(1 + draw(MOST_DISTRACTORS)):
        places[free.pop(draw(len(free)))] = kinds.pop()
    return Scene(relation, attribute, marker_at, tuple(places), (answer + (attribute == "next")) % CLASSES)


def marker(relation: str, attribute: str) -> UInt8[np.ndarray, "8 8"]:
    """Return the picture of the marker that asks for a relation and an attribute: pixels of value 0 or 255."""
    row, column = np.abs(np.indices((DIGIT, DIGIT)) * 2 - (DIGIT - 1))  # 1, 3, 5 and 7 from the middle
    from_top = np.indices((DIGIT, DIGIT))[0]
    shape: Bool[np.ndarray, "8 8"] = {
        "right": row <= 3,
        "left": column <= 3,
        "above": column <= from_top,
        "below": row**2 + column**2 <= 50,
        "pair": (row <= 3) | (column <= 3),
        "count": column <= row,
    }[relation]
    if attribute == "next":
        padded = np.pad(shape, 1)
        inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
        shape = shape & ~inside
    return np.where(shape, 255, 0).astype(np.uint8)


def _neighbor(place: int, step: tuple[int, int]) -> int | None:
    """Return the place that is a `step` of (rows, columns) from `place`, or None if it is outside of the grid."""
    row, column = (at + by for at, by in zip(divmod(place, PLACES), step, strict=True))
    return row * PLACES + column if 0 <= row < PLACES and 0 <= column < PLACES else None
