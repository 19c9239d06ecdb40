"""Accelerators: memory and peak speed of each chip, and the TPU slices that exist.

Figures are per JAX device, which is a chip, except for TPU7x, whose chips are two devices each. Memory is the
manufacturer's figure. Programs cannot use a few per cent of it: libtpu 0.0.51 compiles for up to 30.75 GiB of v4, 15.75
of v5e, 95.73 of v5p, 31.24 of v6e and 94.74 of a TPU7x device.
"""

from __future__ import annotations

import difflib
import functools
import math
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One kind of device.

    Fields:
      name: the name; for a TPU, the family in the name of a topology.
      memory: bytes of HBM.
      peak: FLOP/s of dense bfloat16 matrix products.
      kinds: the values of `jax.Device.device_kind` for this chip.
      config: the `chip_config_name` for which `jax.experimental.topologies.get_topology_desc` returns the devices of
        the hardware; with the default, v4 would have two devices per chip.
      cores: the TensorCores of a chip, which the number in a name such as "v5p-8" counts.
    """

    name: str
    memory: int
    peak: float
    kinds: tuple[str, ...]
    config: str = "default"
    cores: int = 1


CHIPS = (
    # cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x: "Peak compute per chip (bf16)" and "HBM capacity".
    Chip("v4", 32 * GIB, 275e12, ("TPU v4",), config="megacore", cores=2),
    Chip("v5e", 16 * GIB, 197e12, ("TPU v5 lite", "TPU v5e")),
    Chip("v5p", 95 * GIB, 459e12, ("TPU v5", "TPU v5p"), cores=2),
    Chip("v6e", 32 * GIB, 918e12, ("TPU v6 lite", "TPU v6e")),
    Chip("TPU7x", 192 * GIB // 2, 2307e12 / 2, ("TPU7x",), cores=2),
    # NVIDIA A100 Tensor Core GPU data sheet, 2021; PCIe cards have the same peak as SXM modules.
    Chip("A100 40GB", 40 * GIB, 312e12, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    Chip("A100 80GB", 80 * GIB, 312e12, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
    # NVIDIA H100 Tensor Core GPU Architecture (white paper, SXM5): 989.4 dense, 1,978.9 with sparsity. H200 data sheet.
    Chip("H100 SXM", 80 * GIB, 989.4e12, ("NVIDIA H100 80GB HBM3",)),
    Chip("H200 SXM", 141 * GIB, 989.4e12, ("NVIDIA H200",)),
    # NVIDIA DGX B200 data sheet, an eighth: 1,440 GB, and 72 PFLOP/s of sparse FP8, a quarter of it in dense bfloat16.
    Chip("B200", 180 * GIB, 2250e12, ("NVIDIA B200",)),
)

# The slices that Google offers, from the pages above: FLAT for v5e and v6e; for the other families SMALL, and multiples
# of 4x4x4 up to LARGEST chips. TPU7x also has single chips, of two devices.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
LARGEST = {"v4": 4096, "v5p": 6144, "TPU7x": 9216}


def chip(kind: str) -> Chip | None:
    """Return the chip of a `jax.Device.device_kind`, ignoring case; None if it is not in `CHIPS`."""
    return next((known for known in CHIPS if kind.lower() in map(str.lower, known.kinds)), None)


def topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Return the chip and the shape, in chips, of a TPU slice.

    libtpu accepts some of the names, but also slices that do not exist, and a side of 0 makes it abort the process.

    Args:
      name: a name of JAX, family and sides, such as "v5e:16x16", "v5p:4x4x8" or "tpu7x:2x2x1"; or one of Cloud TPU,
        family and number of TensorCores, such as "v5e-256", "v5p-256" or "tpu7x-8", which means the most cubic slice.
        Upper and lower case of the family are the same.

    Raises:
      ValueError: there is no such slice; the message lists the nearest ones.
    """
    known = _lower_family(name)
    if known not in names():
        nearest = difflib.get_close_matches(known[:40], names(), n=4, cutoff=0)
        raise ValueError(f"{name!r} is not a TPU slice; nearest: {', '.join(nearest)}")
    return names()[known]


def jax_name(chip: Chip, sides: tuple[int, ...]) -> str:
    """Return the name by which JAX knows a slice, such as "tpu7x:2x2x1"."""
    return f"{chip.name.lower()}:{'x'.join(map(str, sides))}"


@functools.cache
def names() -> dict[str, tuple[Chip, tuple[int, ...]]]:
    """Return (chip, shape) of all slices by both kinds of names, in lower case, by family and number of chips."""
    found: dict[str, tuple[Chip, tuple[int, ...]]] = {}
    for family in CHIPS:
        for sides in shapes(family.name):
            found[jax_name(family, sides)] = (family, sides)
            found.setdefault(f"{family.name.lower()}-{math.prod(sides) * family.cores}", (family, sides))
    return found


def shapes(family: str) -> list[tuple[int, ...]]:
    """Return the shapes, in chips, of a family's slices by number of chips; of equal numbers, the most cubic first."""
    if family not in LARGEST:
        return [_sides(name) for name in FLAT] if family in ("v5e", "v6e") else []
    cubes = LARGEST[family] // 4**3
    factors = [(a, b) for a in range(1, math.isqrt(cubes) + 1) for b in range(a, cubes // a + 1)]
    large = [(4 * a, 4 * b, 4 * c) for a, b in factors for c in range(b, cubes // (a * b) + 1)]
    small = [_sides(name) for name in (*["1x1x1"] * (family == "TPU7x"), *SMALL)]
    return [*small, *sorted(large, key=lambda sides: (math.prod(sides), sides[2], -sides[0]))]


def _lower_family(name: str) -> str:
    """Return a name with its family in lower case; the "x" between sides stays as it is."""
    at = min((n for n in (name.find(":"), name.find("-")) if n >= 0), default=len(name))
    return name[:at].lower() + name[at:]


def _sides(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))
