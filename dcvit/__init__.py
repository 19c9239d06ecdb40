"""Vision transformers and language models with Dynamically Composable Multi-Head Attention, in JAX."""

__version__ = "0.1.0"
