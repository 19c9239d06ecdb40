"""Limits on the size and form of the source: functions, classes, files, docstrings, annotations."""

import ast
import re
from pathlib import Path

import check_size

from dcvit import __main__ as entry

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path.relative_to(ROOT)
    for pattern in ("dcvit/**/*.py", "input_pipeline/**/*.py", "scripts/**/*.py")
    for path in ROOT.glob(pattern)
)
TREES = {path: ast.parse((ROOT / path).read_text()) for path in SOURCES}

FUNCTION_LINES, CLASS_LINES, FILE_LINES = 60, 150, 450
CONFIG_PARAMETERS = 8
# File::name -> the reason why it may be longer than the limit.
LONG_DEFINITIONS = {}
LONG_FILES = {
    "dcvit/weights/modeling_dcvit.py": "transformers loads the code of a model from one file beside its weights"
}
ROOT_MODULES = {"__init__", "__main__", "cli", "errors", "process", "versions"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(path):
    return [node for node in ast.walk(TREES[path]) if isinstance(node, DEFINITIONS)]


def test_functions_and_classes_are_short():
    long = {}
    for path in SOURCES:
        for node in definitions(path):
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            lines = node.end_lineno - node.lineno + 1
            if lines > limit:
                long[f"{path.as_posix()}::{node.name}"] = lines
    assert long.keys() == LONG_DEFINITIONS.keys(), long


def test_functions_of_configs_are_short():
    for path in ROOT.glob("configs/*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        long = {node.name for node in functions if node.end_lineno - node.lineno + 1 > FUNCTION_LINES}
        assert not long, f"{path}: {long}"


def test_configs_have_few_parameters():
    """The rest are overrides."""
    for path in ROOT.glob("configs/*.py"):
        (get_config,) = (
            node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == "get_config"
        )  # fmt: skip
        assert len(get_config.args.args) <= CONFIG_PARAMETERS, path


def test_files_are_short():
    lines = {path.as_posix(): len((ROOT / path).read_text().splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > FILE_LINES}.keys() == LONG_FILES.keys()


def test_modules_at_the_root_of_the_package_are_commands_or_listed():
    commands = {name.replace("-", "_") for name in entry.COMMANDS}
    assert {path.stem for path in ROOT.glob("dcvit/*.py")} <= commands | ROOT_MODULES


def test_no_module_has_a_name_without_a_subject():
    assert [path for path in SOURCES if path.stem in VAGUE_NAMES] == []


def test_docstrings_start_with_a_noun_phrase_or_a_verb():
    found = []
    for path, tree in TREES.items():
        for node in [tree, *definitions(path)]:
            docstring = ast.get_docstring(node) or ""
            if re.match(r"(What|Whether|Being|That|How|Which|Where|Why|Who)\b", docstring):
                found.append(f"{path}::{getattr(node, 'name', '')}: {docstring.splitlines()[0]}")
    assert found == []


def test_code_beyond_its_bound_is_reported_with_advice(monkeypatch, capsys):
    """The bounds of lines are those of `.ci/run checks`, not of the tests, which a contribution in progress runs."""
    bounds = {("dcvit", "input_pipeline"): 10**6, ("tests",): 10**6, ("scripts",): 1}
    monkeypatch.setattr(check_size, "MOST_LINES", bounds)
    monkeypatch.setattr(check_size, "MOST_ANY", 10**6)
    assert check_size.main() == 1
    errors = capsys.readouterr().err
    assert re.fullmatch(r"error: lines of Python in scripts exceed their bound by [\d,]+: remove .*\n", errors)
    monkeypatch.setattr(check_size, "MOST_LINES", dict.fromkeys(bounds, 10**6))
    assert check_size.main() == 0


def test_the_readme_fits_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_config_is_read_in_few_files():
    """After `make_setup`, a run is described by its Setup; the config is not passed on."""
    reads = {path.as_posix() for path in SOURCES if re.search(r"ConfigDict|configs\.load\(", (ROOT / path).read_text())}
    files = (
        "config/big_vision.py",  # stands in for modules that return ConfigDicts
        "check_data.py",
        *(f"config/{name}.py" for name in ("durations", "load", "values")),
        *(f"hub/{name}.py" for name in ("kinds", "open", "tokenizers")),
        "cli.py",
        "inference/model.py",
        "train.py",
        *(
            f"training/{name}.py"
            for name in ("distillation", "evaluation", "inputs", "model", "optim", "run", "setup", "tasks")
        ),
    )
    assert reads == {f"dcvit/{name}" for name in files}
