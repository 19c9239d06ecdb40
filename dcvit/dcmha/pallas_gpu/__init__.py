"""Fused kernels for NVIDIA GPUs; see `dcvit.dcmha.pallas_gpu.api`."""
