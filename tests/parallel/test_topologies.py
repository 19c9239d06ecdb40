"""The table of accelerators, and the names of TPU slices."""

import math

import pytest

from dcvit.parallel.topologies import CHIPS, FLAT, LARGEST, SMALL, chip, jax_name, topology


@pytest.mark.parametrize("known", CHIPS, ids=lambda known: known.name)
def test_chip_is_found_by_device_kind(known):
    for kind in known.kinds:
        assert chip(kind) is chip(kind.upper()) is known


@pytest.mark.parametrize("kind", ["", "cpu", "TPU", "TPU v3", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_unknown_device_has_no_chip(kind):
    assert chip(kind) is None


SLICES = [f"{family}:{sides}" for family in ("v5e", "v6e") for sides in FLAT]
SLICES += [f"{family}:{sides}" for family in LARGEST for sides in (*SMALL, "4x4x4", "4x4x8", "8x8x8", "8x8x12")]


@pytest.mark.parametrize("name", [*SLICES, "v4:16x16x16", "v5p:16x16x24", "TPU7x:16x24x24"])
def test_name_of_a_slice_gives_chip_and_shape(name):
    family, sides = name.split(":")
    found, shape = topology(name)
    assert found.name == family
    assert "x".join(map(str, shape)) == sides
    assert topology(name.upper().replace("X", "x")) == (found, shape)


@pytest.mark.parametrize(
    ("cloud", "jax_form"),
    [
        ("v4-8", "v4:2x2x1"), ("v4-4096", "v4:8x16x16"), ("v5e-1", "v5e:1x1"), ("v5e-16", "v5e:4x4"),
        ("v5p-8", "v5p:2x2x1"), ("v5p-256", "v5p:4x4x8"), ("v5p-12288", "v5p:16x16x24"), ("v6e-8", "v6e:2x4"),
        ("tpu7x-2", "tpu7x:1x1x1"), ("TPU7x-8", "tpu7x:2x2x1"), ("tpu7x-1152", "tpu7x:4x12x12"),
        ("tpu7x-2048", "tpu7x:8x8x16"), ("tpu7x-18432", "tpu7x:16x24x24"),
    ],
)  # fmt: skip
def test_a_number_of_cores_names_the_slice_that_cloud_tpu_gives(cloud, jax_form):
    assert topology(cloud) == topology(jax_form)
    assert jax_name(*topology(cloud)) == jax_form


NO_SLICES = [
    "", "v5e", "v5e:4x4x4", "v5e:8x4", "v5e:0x4", "v5e:16x32", "v5e:04x4", "v5e:4x4\n", "v6e:４x４", "v4:4x4",
    "v4:8x16x64", "v5p:4x4x6", "v5p:4x4x", "v5p:16x24x24", "TPU7x:24x24x24", "v3:4x4", "A100 40GB:2x2", "v5e-12",
    "v5e-016", "v5p-4", "tpu7x-1", "v5e-" + 9 * "9" * 1000,
]  # fmt: skip


@pytest.mark.parametrize("name", NO_SLICES, ids=lambda name: repr(name[:20]))
def test_name_of_no_slice_is_refused_in_one_line_with_existing_names(name):
    with pytest.raises(ValueError, match="is not a TPU slice") as caught:
        topology(name)
    refused, nearest = str(caught.value).split(" is not a TPU slice; nearest: ")
    assert refused == repr(name)
    assert "\n" not in nearest
    assert len({topology(near) for near in nearest.split(", ")}) == 4


@pytest.mark.slow
def test_largest_slices_exist():
    shapes = [(4 * a, 4 * b, 4 * c) for a in range(1, 7) for b in range(a, 7) for c in range(b, 7)]
    for family, most in LARGEST.items():
        fits = [math.prod(shape) for shape in shapes if math.prod(shape) <= most]
        assert max(fits) == most
        assert math.prod(topology(f"{family}:4x4x4")[1]) == min(fits)
