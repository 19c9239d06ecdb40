"""The table of accelerators, and the names of TPU slices."""

import pytest

from dcvit.parallel.topologies import CHIPS, chip, jax_name, topology


def test_chip_is_found_by_device_kind():
    for known in CHIPS:
        for kind in known.kinds:
            assert chip(kind) is chip(kind.upper()) is known
    assert chip("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:16x16x24", "TPU7x:16x24x24"])
def test_name_of_a_slice_gives_chip_and_shape(name):
    family, sides = name.split(":")
    found, shape = topology(name)
    assert found.name == family
    assert "x".join(map(str, shape)) == sides
    assert topology(name.upper().replace("X", "x")) == (found, shape)


@pytest.mark.parametrize(
    ("cloud", "jax_form"),
    [
        ("v4-4096", "v4:8x16x16"), ("v5e-16", "v5e:4x4"), ("v5p-12288", "v5p:16x16x24"), ("TPU7x-8", "tpu7x:2x2x1"),
    ],
)  # fmt: skip
def test_a_number_of_cores_names_the_slice_that_cloud_tpu_gives(cloud, jax_form):
    assert topology(cloud) == topology(jax_form)
    assert jax_name(*topology(cloud)) == jax_form


@pytest.mark.parametrize("name", ["v5e", "v4:8x16x64", "v3:4x4", "v5e-12"])
def test_name_of_no_slice_is_refused_in_one_line_with_existing_names(name):
    with pytest.raises(ValueError, match="is not a TPU slice") as caught:
        topology(name)
    refused, nearest = str(caught.value).split(" is not a TPU slice; nearest: ")
    assert refused == repr(name)
    assert "\n" not in nearest
    assert len({topology(near) for near in nearest.split(", ")}) == 4
