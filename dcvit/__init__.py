"""DCViT: Vision Transformers whose attention heads compose dynamically."""

__version__ = "0.1.0"
