"""Accelerators: memory and peak speed of each chip, and the TPU slices that exist.

Figures are per JAX device, which is a chip, except for TPU7x, whose chips are two devices each. Memory is the
manufacturer's figure. Programs cannot use a few per cent of it: libtpu 0.0.51 compiles for up to 30.75 GiB of v4, 15.75
of v5e, 95.73 of v5p, 31.24 of v6e and 94.74 of a TPU7x device.
"""

from __future__ import annotations

import math
import re
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
    """

    name: str
    memory: int
    peak: float
    kinds: tuple[str, ...]
    config: str = "default"


CHIPS = (
    # cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x: "Peak compute per chip (bf16)" and "HBM capacity".
    Chip("v4", 32 * GIB, 275e12, ("TPU v4",), config="megacore"),
    Chip("v5e", 16 * GIB, 197e12, ("TPU v5 lite", "TPU v5e")),
    Chip("v5p", 95 * GIB, 459e12, ("TPU v5", "TPU v5p")),
    Chip("v6e", 32 * GIB, 918e12, ("TPU v6 lite", "TPU v6e")),
    Chip("TPU7x", 192 * GIB // 2, 2307e12 / 2, ("TPU7x",)),
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
# of 4x4x4 up to LARGEST chips.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
LARGEST = {"v4": 4096, "v5p": 6144, "TPU7x": 9216}
SLICES = (
    f"v5e and v6e have {', '.join(FLAT)}; {', '.join(LARGEST)} have {', '.join(SMALL)} and AxBxC with multiples of 4 "
    f"with A <= B <= C, up to {', '.join(map(str, LARGEST.values()))} chips"
)


def chip(kind: str) -> Chip | None:
    """Return the chip of a `jax.Device.device_kind`, ignoring case; None if it is not in `CHIPS`."""
    return next((known for known in CHIPS if kind.lower() in map(str.lower, known.kinds)), None)


def topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Return the chip and the shape, in chips, of a TPU slice such as "v5e:16x16" or "v5p:4x4x8".

    libtpu accepts the same names, but also slices that do not exist, and a side of 0 makes it abort the process.

    Raises:
      ValueError: there is no such slice; the message lists the existing ones.
    """
    family, _, sides = name.partition(":")
    found = next((known for known in CHIPS if known.name.lower() == family.lower()), None)
    if found is None or not _exists(found.name, sides):
        raise ValueError(f"{name!r} is not a TPU slice; expected a name such as v5p:4x4x8: {SLICES}")
    return found, tuple(map(int, sides.split("x")))


def _exists(family: str, sides: str) -> bool:
    """Return True if a family has a slice with the given sides."""
    if family not in LARGEST:
        return family in ("v5e", "v6e") and sides in FLAT
    if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*", sides):
        return False
    shape = [int(side) for side in sides.split("x")]
    cubes = all(side % 4 == 0 for side in shape) and shape == sorted(shape)
    return sides in SMALL or (cubes and math.prod(shape) <= LARGEST[family])
