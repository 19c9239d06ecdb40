"""Flax linen models; a config's `model_name` is the name of a file here."""
