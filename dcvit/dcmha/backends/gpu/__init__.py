"""Fused kernels for NVIDIA GPUs; see `dcvit.dcmha.backends.gpu.api`."""
