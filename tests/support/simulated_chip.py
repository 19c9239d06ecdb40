"""Command of the package on a simulated TPU: `KERNEL=NAME python tests/support/simulated_chip.py COMMAND …`.

The CPU is taken for a TPU, and `pallas_tpu` is replaced by a function of this module; all else is the code of a chip.
"""

import os
import sys
import time

import jax
import numpy as np

from dcvit import cli
from dcvit.__main__ import dispatch as command
from dcvit.dcmha import device, verification
from dcvit.dcmha.backends.tpu import api, tiling
from dcvit.dcmha.backends.xla import blockwise, reference

right = blockwise.run


def correct(call):
    return right(call)


def fast(call):
    """Be right, and the fastest: `__main__` delays the other implementations."""
    return correct(call)


def wrong(call):
    return correct(call) * 1.1


def raises(call):
    raise RuntimeError("Mosaic failed to compile the kernel")


def blocks(call):
    """Never finish, as a kernel that waits for a semaphore."""
    return correct(call) + wait(10_000).astype(call.inputs.q.dtype)


def wait(seconds):
    """Return zero after some time."""
    return jax.pure_callback(lambda: (time.sleep(seconds), np.float32(0))[1], jax.ShapeDtypeStruct((), np.float32))


def delayed(implementation):
    return lambda *args, **options: implementation(*args, **options) + wait(0.2)


if __name__ == "__main__":
    verification.SECONDS = 10.0
    device.platform = lambda: "tpu"
    tiling.device_kind = lambda: "TPU v5 lite"
    kernel = os.environ["KERNEL"]
    if kernel == "fast":
        for module in (blockwise, reference):
            module.run = delayed(module.run)
    api.run = globals()[kernel]
    sys.exit(cli.run(command))
