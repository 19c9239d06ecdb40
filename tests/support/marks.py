"""Marks of sets of parameters."""

import pytest


def exhaustive(*values):
    """A set of parameters that only `scripts/test.sh --exhaustive` and `--all` run."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def mostly_exhaustive(names, *chosen):
    """Names as parameters, of which all but the chosen ones, which represent them, are exhaustive."""
    assert {*chosen} <= {*names}
    return [name if name in chosen else exhaustive(name) for name in names]
