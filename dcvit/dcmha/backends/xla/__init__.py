"""Implementations that XLA compiles, for every platform."""
