"""Fused kernels for NVIDIA GPUs; see `dcvit.dcmha.pallas_gpu.api`. This module imports no part of Pallas."""

import jax

HOPPER = "9.0"  # compute capability of H100 and H200, whose matrix instruction the kernels use


def compute_capability() -> str:
    """Return the compute capability of this process's GPU, such as "8.0"; `HOPPER` on a host without a GPU.

    A host without a GPU interprets the kernels, or lowers them for a GPU that is not there.
    """
    return str(getattr(jax.devices()[0], "compute_capability", HOPPER))
