"""Scenes of digits: labels follow from the content, pictures show the content, splits share no handwriting."""

import itertools

import numpy as np
import pytest

import input_pipeline as ip
from input_pipeline.images import scenes
from input_pipeline.images.scenes import DIGIT, PITCH, Source
from input_pipeline.shuffle import draws

QUESTIONS = list(itertools.product(scenes.RELATIONS, scenes.ATTRIBUTES))


def expected_label(relation, attribute, grid):
    """The answer to the question, from the 3×3 grid of digits with "marker" and None for empty places."""
    ((row, column),) = [(r, c) for r, line in enumerate(grid) for c, content in enumerate(line) if content == "marker"]
    digits = [content for line in grid for content in line if isinstance(content, int)]
    if relation == "pair":
        (found,) = {digit for digit in digits if digits.count(digit) == 2}
    elif relation == "count":
        found = digits.count(grid[row][column + 1])
    else:
        at = {"right": (row, column + 1), "left": (row, column - 1), "above": (row - 1, column)}
        r, c = at.get(relation, (row + 1, column))
        assert min(r, c) >= 0
        found = grid[r][c]
    return (found + {"same": 0, "next": 1}[attribute]) % 10


@pytest.mark.slow
@pytest.mark.parametrize(("relation", "attribute"), QUESTIONS)
def test_labels_follow_from_the_content(relation, attribute):
    seen = set()
    for index in range(150):
        scene = scenes.make_scene(relation, attribute, draws(3, 0, index, scenes.DRAWS))
        places = ["marker" if at == scene.marker else digit for at, digit in enumerate(scene.places)]
        assert scene.places[scene.marker] is None
        grid = [places[i : i + 3] for i in (0, 3, 6)]
        assert scene.label == expected_label(relation, attribute, grid)
        digits = [digit for digit in scene.places if digit is not None]
        repeated = {digit for digit in digits if digits.count(digit) > 1}
        assert len(repeated) <= (relation in ("pair", "count"))
        assert 2 <= len(digits) <= 8
        seen.add(scene.label)
    assert seen == ({1, 2, 3, 4} if relation == "count" and attribute == "same" else seen)
    assert len(seen) == (4 if relation == "count" else 10)


def test_pictures_show_the_marker_and_the_digits_in_their_places():
    """Every part of a picture is found again, up to one pixel off its place, in the digits of the split."""
    source = ip.open_source("scenes", split="validation")
    moved = set()
    for index in range(60):
        scene, _ = source._scene(index)
        image = source[index]["image"]
        assert (image.shape, image.dtype) == ((scenes.SIZE, scenes.SIZE, 1), np.uint8)
        rest = image[..., 0].copy()
        used = []
        for place, digit in enumerate(scene.places):
            drawings = [source.markers[scene.relation, scene.attribute]] if place == scene.marker else []
            drawings = drawings if digit is None else source.digits[digit]
            found = [
                (top, left, i)
                for i, drawing in enumerate(drawings)
                for top, left in itertools.product(
                    *(range(PITCH * at, PITCH * at + 2) for at in divmod(place, scenes.PLACES))
                )
                if np.array_equal(image[top : top + DIGIT, left : left + DIGIT, 0], drawing)
            ]
            assert len(found) == len(drawings[:1])
            for top, left, i in found:
                rest[top : top + DIGIT, left : left + DIGIT] = 0
                moved.add((top % PITCH, left % PITCH))
                used.append((digit, i))
        assert not rest.any()
        assert len({*used}) == len(used)  # a digit that occurs again is in another handwriting
    assert moved == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_splits_are_a_partition_of_scikit_learns_digits():
    from sklearn.datasets import load_digits

    found = [image for split in ("train", "validation", "test") for part in Source(split).digits for image in part]
    expected = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert sorted(image.tobytes() for image in found) == sorted(image.tobytes() for image in expected)
    sizes = [sum(map(len, Source(split).digits)) for split in ("train", "validation", "test")]
    assert sizes == [1197, 240, 360]
    assert min(len(part) for split in ("validation", "test") for part in Source(split).digits) >= 10


def test_scenes_are_a_function_of_seed_split_and_index():
    def images(**options):
        source = ip.open_source("scenes", **options)
        return [source[i]["image"].tobytes() for i in (5, 7, 5)]

    assert images()[0] == images()[2] != images()[1]
    assert images() == images(examples=8)
    assert len({*images(), *images(seed=1), *images(split="validation"), *images(split="test")}) == 8


def test_all_questions_are_asked_equally_often():
    source = Source()
    asked = [source.describe(i).split(", ")[-1] for i in range(1200)]
    counts = [asked.count("/".join(question)) for question in QUESTIONS]
    assert sum(counts) == 1200
    assert max(abs(count - 100) for count in counts) < 50  # five standard deviations
