"""DCViT: Vision Transformers and language models whose attention heads compose dynamically."""

__version__ = "0.1.0"
