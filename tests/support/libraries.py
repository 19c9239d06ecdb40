"""Skips of tests where a library of an extra is not installed."""

import re
from importlib.machinery import PathFinder

# In errors of the package, and of Python for libraries of the default extras that a test itself uses.
OPTIONAL = (
    "datasets|flatbuffers|gcsfs|huggingface_hub|lm_eval|numba|s3fs|tensorflow|tensorflow_datasets|tokenizers|yaml|"
    "zstandard"
)
MISSING = re.compile(rf"([\w.]+)(?:, which)? is not installed: pip install|No module named '({OPTIONAL})'")


# Bound before a test can hide a library from `importlib` or in `sys.modules`: a failure of such a test stays one.
find_spec = PathFinder.find_spec


def skip_if_missing(report):
    """Make a failure a skip if the package said in its error that a library is not installed, and this is true."""
    if report.failed:
        for found in MISSING.finditer(f"{report.longreprtext} {report.capstdout} {report.capstderr}"):
            name = (found[1] or found[2]).partition(".")[0]
            if find_spec(name) is None:
                path, line, _ = report.location
                report.outcome, report.longrepr = "skipped", (path, line, f"Skipped: needs {name}")
                return
