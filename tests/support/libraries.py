"""Libraries that tests need: a check of the mark `interop`, and skips where a library of an extra is not installed."""

import dis
import functools
import inspect
import re
import types
from importlib.machinery import PathFinder
from pathlib import Path

TESTS = Path(__file__).parent.parent
# Not among the default extras of scripts/test.sh: a test that needs one has the mark `interop`.
OUTSIDE = {
    "jax2onnx", "onnx", "onnxruntime", "ray", "submitit", "timm", "torch", "torchvision", "wandb",
}  # fmt: skip
# In errors of the package, and of Python for libraries of the default extras that a test itself uses.
OPTIONAL = (
    "datasets|flatbuffers|gcsfs|huggingface_hub|lm_eval|numba|s3fs|tensorflow|tensorflow_datasets|tokenizers|yaml|"
    "zstandard"
)
MISSING = re.compile(rf"([\w.]+)(?:, which)? is not installed: pip install|No module named '({OPTIONAL})'")


def unmarked(items):
    """Return the tests that need a library in `OUTSIDE` and lack the mark, with the library."""
    found = {}
    for item in items:
        if not item.get_closest_marker("interop"):
            fixtures = [d.func for defs in item._fixtureinfo.name2fixturedefs.values() for d in defs]
            for needed in set().union(*map(imported, [item.function, *fixtures])) & OUTSIDE:
                found[item.nodeid.partition("[")[0]] = needed
    return found


@functools.cache
def imported(function):
    """Return the libraries that a function imports, by itself or through functions of tests/ that it names."""
    seen, found, todo = set(), set(), [function]
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or (function := inspect.unwrap(function)) in seen:
            continue
        seen.add(function)
        if not Path(function.__code__.co_filename).is_relative_to(TESTS):
            continue
        names, libraries = names_of(function.__code__)
        found |= libraries
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [value for value in values if isinstance(value, types.ModuleType)]
        found |= {module.__name__.partition(".")[0] for module in modules}
        todo += values + [getattr(m, name) for m in modules for name in names if name in vars(m)]
    return frozenset(found)


def names_of(code):
    """Return all names in a function's code, and which of `OUTSIDE` it imports or gives to `pytest.importorskip`."""
    names, libraries = set(code.co_names), set()
    if OUTSIDE & {name.partition(".")[0] for name in names}:  # to read the instructions takes long
        libraries = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    if "importorskip" in names:
        libraries |= {value for value in code.co_consts if isinstance(value, str)}
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            more_names, more_libraries = names_of(value)
            names, libraries = names | more_names, libraries | more_libraries
    return names, {name.partition(".")[0] for name in libraries}


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
