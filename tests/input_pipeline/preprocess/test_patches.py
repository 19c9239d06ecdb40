"""Patches of images of any aspect ratio, and their places in packed rows."""

import math

import numpy as np
import pytest
from refusals import refused

from input_pipeline import InputError, Preprocess, ReadingError, defer_value_range, patch_sizes
from input_pipeline.preprocess.packing import Packing, place
from input_pipeline.preprocess.patches import grid_of

RNG = np.random.default_rng(0)


def test_patches_are_those_of_the_image_row_by_row():
    image = RNG.integers(0, 256, (6, 8, 3), np.uint8)
    found = Preprocess("patches(2, 15)")({"image": image}, RNG)
    assert found["image"].shape == (15, 4, 3)
    assert found["grid"].tolist() == [3, 4]
    assert found["image"].dtype == np.uint8
    for number in range(12):
        top, left = 2 * (number // 4), 2 * (number % 4)
        np.testing.assert_array_equal(found["image"][number].reshape(2, 2, 3), image[top : top + 2, left : left + 2])
    assert not found["image"][12:].any()


@pytest.mark.parametrize(
    ("size", "max_tokens"), [((1, 1), 1), ((3, 500), 7), ((480, 640), 256), ((641, 33), 7), ((224, 224), 256)]
)
def test_the_grid_is_the_largest_with_the_aspect_ratio_and_at_most_the_native_size(size, max_tokens):
    rows, columns = grid_of(size, 16, max_tokens)
    native = [math.ceil(side / 16) for side in size]
    assert 1 <= rows * columns <= max_tokens
    assert rows <= native[0]
    assert columns <= native[1]
    if math.prod(native) <= max_tokens:
        assert [rows, columns] == native
    else:  # a slightly larger scale has too many patches
        scale = min((rows + 1e-9) * 16 / size[0], (columns + 1e-9) * 16 / size[1]) + 1e-4
        assert math.prod(math.ceil(side * scale / 16) for side in size) > max_tokens


def test_value_range_of_patches_is_left_to_the_device():
    spec = "patches(2, 4)|value_range(-1, 1)|keep('image', 'grid')"
    host, deferred = defer_value_range(spec)
    assert host == "patches(2, 4)|keep('image', 'grid')"
    assert deferred.vmin == -1
    assert patch_sizes(spec) == (2, 4)
    assert patch_sizes("resize(8)") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("patches|flip_lr", "flip_lr cannot follow patches"),
        ("patches|keep('image', 'labels')", "drops 'grid', without which patches are no image"),
    ],
)
def test_strings_whose_patches_would_be_taken_for_an_image_are_refused(spec, message):
    with refused(InputError, message):
        Preprocess(spec)


def test_encoded_images_are_refused():
    with refused(ReadingError, "add decode before"):
        Preprocess("patches")({"image": b"encoded"}, RNG)


@pytest.mark.parametrize("packing", [Packing(16, 4, 24), Packing(8, 1, 9)])
def test_images_in_a_row_do_not_overlap_and_the_order_of_places_is_that_of_tokens(packing):
    sizes = RNG.integers(1, 9, 32).tolist()
    rows, starts, segments, kept = place(sizes, packing).T
    assert (kept <= sizes).all()
    assert (kept > 0).all()
    for first in range(0, 32, packing.images):
        members = range(first, first + packing.images)
        for row in range(packing.rows):
            inside = sorted((i for i in members if rows[i] == row), key=lambda i: starts[i])
            assert [segments[i] for i in inside] == list(range(len(inside)))
            assert len(inside) <= packing.most()
            ends = [int(starts[i] + kept[i]) for i in inside]
            assert all(starts[i] >= end for i, end in zip(inside[1:], ends, strict=False))
            assert max(ends, default=0) <= packing.tokens


def test_only_the_longest_images_lose_tokens_and_only_without_room():
    assert place([4, 3, 2, 3], Packing(4, 2, 6))[:, 3].tolist() == [4, 3, 2, 3]
    assert place([9, 2, 9, 1], Packing(4, 1, 11))[:, 3].tolist() == [4, 2, 4, 1]
    assert place([9, 9, 9, 9], Packing(4, 1, 4))[:, 3].tolist() == [1, 1, 1, 1]


def test_a_place_depends_on_the_images_of_its_group_only():
    sizes, packing = RNG.integers(1, 9, 24).tolist(), Packing(8, 3, 16)
    np.testing.assert_array_equal(place(sizes, packing)[8:16], place(sizes[8:16], packing))
