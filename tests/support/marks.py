"""Marks of sets of parameters."""

import pytest


def exhaustive(*values):
    """A set of parameters that only `scripts/test.sh --exhaustive` and `--all` run."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
